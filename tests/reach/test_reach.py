"""`ringverify reach`: each verdict, each cause, and each bad input, on models of two layers and 24 tokens."""

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ringverify
from ringverify.cli.main import main
from ringverify.errors import Inconclusive, UsageError
from ringverify.reach import run
from ringverify.reach.command import told
from ringverify.reach.run import ReachOptions, reach
from ringverify.worlds.simulated import SimulatedWorld

REACHING = Path(__file__).resolve().parents[1] / "miniatures" / "reaching.py"
OWN_SHARD = "each rank attends only to its own shard"


@pytest.fixture
def here(monkeypatch):
    """Run the ranks as threads of this process, which saves starting another."""
    monkeypatch.setattr(run, "ContainedWorld", SimulatedWorld)


def reached(name, **options):
    """The result for a model of `tests/miniatures/reaching.py`."""
    return reach(ReachOptions(f"{REACHING}:{name}", **options))


def kinds(result):
    """The kinds of what was found."""
    return [finding.kind for finding in result.findings]


@pytest.mark.parametrize(
    "name",
    [
        "right",
        "right_striped",
        "right_in_a_sharding_of_its_own",
        "right_window",
        "right_loss",
        "right_of_layers",
        "right_batch_norm",
        "infinite_logits",
        "plain",
    ],
)
def test_ranks_that_do_what_one_process_does_are_conformant(name, here):
    """Whatever the sharding, with a loss, and where nothing is declared."""
    result = reached(name, ranks=2 if name != "right_striped" else None, length=24)
    assert result.findings == ()
    assert sum(forward for forward, _ in result.sent) > 0
    assert result.pairs.max() == 1


@pytest.mark.parametrize(
    ("name", "found", "causes"),
    [
        ("shard_only", ["lost", "values", "silent"], (OWN_SHARD,)),
        ("one_layer_local", ["values", "gradients"],
         ("context parallelism does not reach every layer: of 3 modules Layer, layers.1 sends nothing in the forward, "
          "and layers.0 does",)),
        ("mask_dropped", ["leaked", "values", "gradients"], ("the causal mask is dropped",)),
        ("documents_dropped", ["leaked", "values", "gradients"], ("the documents are dropped",)),
        ("window_dropped", ["leaked", "values", "gradients"], ("the window is dropped",)),
        ("window_too_short", ["lost", "values", "gradients"], ()),
        ("mask_of_the_rank", ["lost", "values", "gradients"],
         ("the mask counts a rank's queries from the rank's own first token",)),
        ("mask_of_zigzag", ["leaked", "lost", "values", "gradients"], ("the mask takes the shards for zigzag",)),
        ("values_off", ["values", "gradients"], ()),
        ("mean_of_means", ["loss", "gradients"], ("the loss is a mean of means over unequal shards",)),
        ("labels_shifted", ["loss", "gradients"],
         ("labels are shifted within each shard, so that each shard's first label is lost",)),
        ("gradients_not_added_up", ["gradients"], ("the backward does not add up parameter gradients over ranks",)),
        ("gradients_detached", ["gradients"], ("the backward sends nothing: gradients stop at the edge of a shard",)),
        ("gradients_twice", ["gradients"],
         ("parameter gradients are 2 times too large, as if added up over ranks twice",)),
        ("gradients_averaged", ["gradients"],
         ("parameter gradients are 2 times too small, as if averaged over ranks",)),
        ("everywhere", ["silent"], ("context parallelism did not happen",)),
    ],
)  # fmt: skip
def test_what_people_report_is_found_and_named(name, found, causes, here):
    """The findings, and the known faults that reproduce them; none is named where none does."""
    result = reached(name)
    assert kinds(result) == found
    assert result.causes == causes


ITSELF = ("the model itself computes NaN, and not its context parallelism",)


@pytest.mark.parametrize(
    ("name", "said", "causes"),
    [
        ("nan_everywhere", "outputs are NaN in one process: 24 of 24 tokens, first token 0 of rank 0", ITSELF),
        ("nan_in_a_row", "outputs are NaN in one process: 1 of 24 tokens, first token 3 of rank 0", ITSELF),
        (
            "nan_on_a_rank",
            "outputs are NaN on rank 1, and not in one process: 4 of 24 tokens, first token 20 of rank 1",
            ("NaN begins on rank 1 in masked_fill, whose inputs are finite",),
        ),
        (
            "nan_in_an_empty_block",
            "outputs are NaN on ranks 0, 1, and not in one process: 24 of 24 tokens, first token 0 of rank 0",
            ("NaN begins on rank 0 in softmax, whose inputs have rows that are all -inf, as a query without keys has",),
        ),
        (
            "nan_that_was_sent",
            "outputs are NaN on ranks 0, 1, and not in one process: 24 of 24 tokens, first token 0 of rank 0",
            ("NaN begins on rank 1 in mul, whose inputs are infinite in places",),
        ),
    ],
)
def test_outputs_that_are_nan_are_said_to_be_and_not_to_be_lost_or_of_other_values(name, said, causes, here):
    """No change of a token shows in them; what is allowed elsewhere is a number."""
    result = reached(name)
    assert [(one.kind, one.text) for one in result.findings] == [("nan", said)]
    assert tuple(re.sub(r" \(at reaching.py:\d+\)", "", cause) for cause in result.causes) == causes
    assert math.isfinite(result.allowed)


def test_the_line_where_nan_begins_is_that_of_the_model(here):
    """That it was sent, and what torch calls on the way, is left out."""
    for name, line in (("nan_in_an_empty_block", ".softmax(-1) @ v"), ("nan_that_was_sent", "* torch.inf * 0")):
        (cause,) = reached(name).causes
        number = int(re.search(r"reaching.py:(\d+)\)", cause)[1])
        assert line in REACHING.read_text().splitlines()[number - 1]


def test_outputs_that_are_nan_are_drawn_as_such(here):
    """They are neither lost nor unread; where there are none, no picture speaks of them."""
    from ringverify.reach import picture

    result = reached("nan_on_a_rank")
    assert (result.pairs[20:] == 4).all()
    assert result.pairs[:20].max() == 1
    lines = picture.lines(result)
    assert lines[-2] == f"{'':8}{'??' * 24}"
    assert lines[-1].endswith("?? NaN")
    assert "NaN (96)" in picture.svg(result)
    assert "NaN" not in picture.svg(reached("right"))


@pytest.mark.parametrize(
    ("name", "line"), [("positions_by_arange", "torch.arange("), ("positions_by_slice", "[None, :")]
)
def test_positions_that_count_within_the_shard_are_found_with_their_line(name, line, here):
    """One process that counts so on that line computes the same wrong outputs."""
    result = reached(name)
    assert kinds(result) == ["values", "gradients"]
    (cause,) = result.causes
    assert cause.startswith("positions count from the rank's own first token (at reaching.py:")
    number = int(re.search(r":(\d+)\)", cause)[1])
    assert line in REACHING.read_text().splitlines()[number - 1]


def test_the_picture_says_which_pairs_are_lost_and_which_leak(here):
    """Output by token: half of a causal map is lost on a rank that attends to its own shard only."""
    pairs = reached("shard_only").pairs
    assert (pairs[12:, :12] == 2).all()
    assert (pairs[:12, :12].diagonal() == 1).all()
    assert (pairs[0, 1:] == 0).all()
    assert (reached("mask_dropped").pairs[0, 1:] == 3).all()


def test_a_leak_says_what_is_read(here):
    """Later tokens, or other documents, with an example."""
    (leak,) = [one.text for one in reached("mask_dropped").findings if one.kind == "leaked"]
    assert "23 outputs" in leak
    assert "such as output 0 of rank 0 and token 1 of rank 0) read later tokens" in leak
    (leak,) = [one.text for one in reached("documents_dropped").findings if one.kind == "leaked"]
    assert leak.endswith("read other documents")
    (leak,) = [one.text for one in reached("window_dropped").findings if one.kind == "leaked"]
    assert leak.endswith("read tokens beyond the window")


@pytest.mark.parametrize(
    ("name", "kind", "cause"),
    [("plain_shard_only", "lost", OWN_SHARD), ("plain_without_mask", "leaked", "the causal mask is dropped")],
)
def test_where_nothing_is_declared_one_process_says_what_is_right(name, kind, cause, here):
    """The pattern is read off it."""
    result = reached(name, ranks=2, length=24)
    assert kinds(result)[0] == kind
    assert result.causes == (cause,)
    assert result.expectation == "what one process reads"


def test_a_model_that_breaks_its_declaration_in_one_process_too_is_told_so(here):
    """It is declared causal, and is not."""
    result = reached("never_causal")
    assert kinds(result) == ["leaked", "leaked"]
    assert "one process does not keep to what is declared" in result.findings[0].text
    assert result.findings[1].text.endswith(", in one process too")


def test_a_model_whose_sequences_depend_on_one_another_is_probed_one_at_a_time(here):
    """Else every output would seem to read every token."""
    result = reached("coupled")
    assert "leaked" not in kinds(result)
    assert (result.pairs[0, 1:] == 0).all()


def test_vectors_may_be_tokens_and_a_function_a_model(here, tmp_path):
    """Nothing is sent where nothing has to be."""
    target = tmp_path / "vectors.py"
    target.write_text(
        "import ringverify\n\n"
        "@ringverify.model(features=3, length=8, ranks=2)\n"
        "def build(group):\n    return lambda x: x * 2\n"
    )
    result = reach(ReachOptions(f"{target}:build"))
    assert result.findings == ()
    assert (result.pairs == [[int(i == j) for j in range(8)] for i in range(8)]).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises_on_one_rank", r"rank 1 raises RuntimeError: no such shard \(at .*reaching.py:\d+\)"),
        ("waits_for_nobody", "deadlock: rank 0 waits for all_gather"),
    ],
)
def test_ranks_that_fail_where_one_process_does_not_are_a_violation(name, message, here):
    """With the rank and the line, or with who waits for whom."""
    result = reached(name)
    assert kinds(result) == ["failed"]
    assert re.search(message, result.findings[0].text + result.detail)
    assert result.pairs is None


def test_a_rank_that_hangs_ends_at_the_deadline():
    """In a process that can be ended; it says where the rank was."""
    result = reached("never_returns", deadline=2.0)
    assert kinds(result) == ["failed"]
    assert "after 2 s rank 1 had not returned: it was at" in result.findings[0].text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dropout_on", r"has dropout on \(1, p=0.1\): return model.eval\(\) from the builder"),
        ("random_numbers", r"the second time .* it draws random numbers in its forward: call model.eval"),
        ("batch_norm", r"mixes tokens and sequences by statistics of the batch \(norm, BatchNorm1d\): return model"),
        ("batch_norm_without_averages", r"\(norm, BatchNorm1d\): give it track_running_stats=True"),
        ("python_random", r"such as a running average, a cache, or random numbers that are not torch's \(Python's"),
        ("says_it_needs_a_gpu", r"CUDA tensors \(at .*\); no GPU is here: if the model needs one, build it"),
        ("not_deterministic", r"gives other outputs the second time in one process, .* switch off what"),
        ("not_per_token", r"returns outputs of shape \(2, 11\) for tokens of \(2, 24\): expected a tensor"),
        ("no_numbers", r"returns outputs of torch.int64: expected floating-point numbers"),
        ("no_labels", r"takes no labels: leave loss out"),
        ("no_loss", r"returns no loss: expected \(outputs, loss\)"),
        ("no_embedding", r"without nn.Embedding: declare what tokens are"),
        ("builder_raises", r"in one process: rank 0 raises RuntimeError: no checkpoint \(at .*reaching.py:\d+\)$"),
        ("builds_a_number", r"builds a int: expected a callable"),
        ("other_weights", r"builds other weights on rank 0, 1 than in one process: call torch.manual_seed"),
        ("takes_nothing", r"takes_nothing\(\) cannot be called as build\(group\): too many positional arguments"),
        ("NUMBER", r"is a int: expected a function build\(group\)"),
        ("nothing_of_that_name", r"has no attribute 'nothing_of_that_name'"),
    ],
)  # fmt: skip
def test_what_reach_is_not_for_is_refused_in_one_line(name, message, here):
    """With what to switch off, or to write instead."""
    with pytest.raises(UsageError, match=message) as refused:
        reached(name)
    assert "\n" not in str(refused.value)


def test_a_model_that_needs_a_gpu_is_inconclusive(here):
    """Nothing is learned about it."""
    with pytest.raises(Inconclusive, match="needs a GPU, and none is here: build the model on the CPU"):
        reached("needs_a_gpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 1}, "--ranks 1: ranks are compared with one process, so it takes at least 2"),
        ({"length": 3}, "at --length 3: documents"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options, message, here):
    """Before anything is run."""
    with pytest.raises(UsageError, match=message):
        reached("documents_dropped", **options)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"vocabulary": 9, "features": 3}, "tokens are ids or vectors, not both"),
        ({"vocabulary": 2}, "vocabulary=2: expected a whole number of at least 3"),
        ({"ranks": 1}, "ranks=1: expected a whole number of at least 2"),
        ({"loss": "median"}, "loss='median': expected one of mean, sum, whole"),
        ({"window": (4, 0)}, "say layers too"),
        ({"sharding": "zag"}, "sharding='zag': expected one of"),
        ({"sharding": "replicated_query"}, "outputs of a model are sharded like tokens"),
        ({"documents": (0, 999)}, "documents"),
    ],
)
def test_a_declaration_that_is_wrong_is_refused_where_it_is_written(declared, message):
    """With the value and what was expected."""
    with pytest.raises(ValueError, match=message):
        ringverify.model(**declared)


def test_the_command_prints_the_verdict_and_writes_its_files(capsys, tmp_path):
    """Exit code 1; text, SVG, page and data say the same."""
    files = {kind: tmp_path / f"reach.{kind}" for kind in ("svg", "html", "json")}
    arguments = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main(["reach", f"{REACHING}:shard_only", *arguments]) == 1
    out = capsys.readouterr().out
    assert "  cause      each rank attends only to its own shard\n" in out
    assert out.endswith("  violations: lost, values, silent\n")
    assert f"rank 1  {'░░' * 12}██{'··' * 11}\n" in out
    drawn = ElementTree.fromstring(files["svg"].read_text())
    assert "lost (144)" in [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert files["svg"].read_text().strip() in files["html"].read_text()
    data = json.loads(files["json"].read_text())
    assert data["causes"] == [OWN_SHARD]
    assert data["pairs"][12] == "2" * 12 + "1" + "0" * 11


def test_the_command_ends_with_the_codes_of_the_contract(capsys, tmp_path):
    """0 where ranks do what one process does; 2 for a file that cannot be written, before anything is run."""
    assert main(["reach", f"{REACHING}:right", "-q"]) == 0
    out = capsys.readouterr().out
    assert "  conformant: outputs read the declared pattern, and differ by " in out
    assert "██" not in out
    assert main(["reach", f"{REACHING}:right", "--svg", str(tmp_path / "none" / "a.svg")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["reach", str(REACHING)]) == 2
    assert "name the function that builds the model" in capsys.readouterr().err


def test_gloo_ranks_are_processes_whose_messages_are_counted():
    """A world that does not watch is watched by torch's dispatcher."""
    right = reached("right", world="gloo")
    assert right.findings == ()
    assert min(min(one) for one in right.sent) > 0


def test_a_long_sequence_is_joined_in_the_terminal(here):
    """32 rows at most, and the worst of what is joined is shown."""
    from ringverify.reach import picture

    result = reached("mask_dropped", length=40)
    lines = picture.lines(result)
    assert len(lines) == 2 + 20 + 1
    assert lines[2] == f"rank 0  {'XX' * 20}"
    assert "a cell is 2 outputs by 2 tokens" in lines[-1]
    assert told(result)[-1] == "  violations: leaked, values, gradients"

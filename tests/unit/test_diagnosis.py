"""The diagnosis names what is wrong with known mutants, and names nothing where nothing reproduces the numbers."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check.declaring import OTHERS, contradicted, would_pass
from ringverify.check.drawing import drawn
from ringverify.check.explaining import explained
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.diagnose import Diagnosis, diagnose, diagnose_rounding
from ringverify.diagnosis.further_cases import VARIED, unlike
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.limiting import limited
from ringverify.diagnosis.narrowing import _coarser
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.standing import Standing
from ringverify.diagnosis.when.needs import Needs, Requirement, needs
from ringverify.faults.catalogue import CAUSES, MUTANTS
from ringverify.faults.place import Partial
from ringverify.faults.ring import EVERYTHING, PLAIN, STEPS, attend, multiplicity, ring_of
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.extremes import MASKED_ROWS
from ringverify.properties.property import judge_everything
from ringverify.properties.world_size_invariance import WORLD_SIZE_INVARIANCE
from ringverify.strategies import cases
from ringverify.worlds.patience import slowness
from ringverify.worlds.simulated import SimulatedWorld


def case_of(*, size=3, sharding="contiguous", values="normal", **problem):
    """Nine positions on three ranks."""
    plain = {"query_length": 9, "heads": 2, "head_dim": 3}
    return Case(problem=Problem(**plain | problem), world_size=size, sharding=sharding, values=values, seed=1)


def diagnosed(implementation, case, *, gradients, needs=None):
    """The diagnosis of an implementation on one case and others like it."""
    with_world = SimulatedWorld()
    try:
        runner = Runner(implementation, with_world)
        return diagnose(
            lambda c: runner.run(c, gradients=gradients),
            [case, case],
            implementation.capabilities,
            differentiate=None if gradients else lambda c: runner.run(c, gradients=True),
            needs=needs,
        )
    finally:
        with_world.close()


CAUSAL = case_of(causal=True)
FORWARD = {
    "O14": (case_of(), "scale is 1/sqrt(D + 1)"),
    "A8b": (case_of(), "lse is in base 2"),
    "A9": (case_of(), "sum of the blocks' own softmaxes"),
    "B2": (CAUSAL, "the ring turns the other way"),
    "B8a": (case_of(causal=True, key_length=12), "aligned top-left instead of bottom-right"),
    "B9b": (case_of(window=(2, 1)), "one key too few on the left"),
    "B10": (case_of(documents=(0, 4, 9)), "documents ignored"),
    "O28": (case_of(heads=4, key_heads=2), "h % Hk"),
    "O42": (CAUSAL, "one key too many on blocks from other ranks"),
    "O65": (case_of(), "the block of the last hop is never merged"),
    "O69": (case_of(), "the block of rank 0 is counted twice"),
    "R6a": (case_of(), "attends its own block only"),
    "A10": (case_of(causal=True, query_length=15), "every tile that is masked in part forgets the tiles before it"),
    "B9a": (case_of(window=(1, 0)), "window uses local indices"),
    "D6b": (case_of(), "values of other ranks are zeros"),
    "G6": (case_of(causal=True, query_length=15), "the mask is cut in 2 chunks, the keys in tiles of 2"),
    "O02": (case_of(), "the merge drops the new block's term of out"),
    "O53": (case_of(dilation=Dilation(branches=((4, 2),), heads="shared")), "dilation offset ignored"),
    "O81": (case_of(dtype="float64"), "every returned value is one of float32"),
    "O93": (case_of(head_dim=40), "dimensions past the first 32 are left out of the scores"),
    "H3": (case_of(dilation=Dilation(branches=((4, 2),))), "depends on the segment"),
    "O107": (case_of(documents=(2, 5, 9)), "document offsets are counted from the first one"),
    "O108": (case_of(values="zero_queries"), "parts of equal lse are not merged"),
    "O110": (case_of(batch=2, key_lengths=(7, 0)), "a batch element of key length 0 attends its first key"),
}
BACKWARD = {
    "C4b": (case_of(), "dq's elements are permuted"),
    "F4b": (case_of(dtype="float64", sharding="zigzag", key_lengths=(7,)), "the block's own out and lse"),
    "F4a": (case_of(), "the block's own lse"),
    "O16": (case_of(), "scale is missing from dq"),
    "O31": (case_of(), "dk and dv swapped"),
    "O32": (case_of(), "the returned dk holds the sum of the right dk and the right dv"),
    "D5b": (case_of(), "sent one hop too few"),
    "D11": (CAUSAL, "in the backward only"),
    "O20": (case_of(softcap=2.0), "derivative of the softcap missing"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mutant", FORWARD)
@pytest.mark.by_day(1)
def test_a_fault_of_the_forward_is_named(mutant):
    """Told from everything else in the library by out and lse alone."""
    case, words = FORWARD[mutant]
    found = diagnosed(MUTANTS[mutant].implementation, case, gradients=False)
    assert found.causes
    assert words in found.text.split("; or ")[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mutant", BACKWARD)
@pytest.mark.by_day(1)
def test_a_fault_of_the_backward_is_named(mutant):
    """The forward is right, and has to stay right under the hypothesis."""
    case, words = BACKWARD[mutant]
    found = diagnosed(MUTANTS[mutant].implementation, case, gradients=True)
    assert found.causes
    assert words in found.text.split("; or ")[0]


OWN_ENTRY = {
    "values of the wrong block: from hop 2 on that of the hop before": (case_of(), False),
    "dq is made of the wrong block's keys: that of the hop before, in the backward only": (case_of(), True),
    "short blocks are filled up with zero keys, which are attended where no mask covers them": (
        case_of(query_length=8), False
    ),
    "short blocks are filled up with zero keys at position 0, which are attended where the mask allows it": (
        case_of(query_length=8, documents=(0, 4, 8)), False
    ),
    "rows without keys make dv NaN: their softmax is NaN": (case_of(documents=(2, 9)), True),
    "the running sum of exponentials is not rescaled where the maximum grows": (case_of(), False),
    "keys past the last whole tile of 4 of a block are never attended": (case_of(size=1), False),
    "tiles of 4: only the last tile of each block's keys count in dq": (case_of(size=1), True),
    "scale is 1/sqrt of the number of heads a rank instead of head_dim": (case_of(heads=6), False),
    "documents: positions of queries are local to the shard instead of global": (case_of(documents=(0, 4, 9)), False),
    "segments of a dilation are counted from the start of each shard": (
        case_of(dilation=Dilation(branches=((4, 2),))), False
    ),
}  # fmt: skip
CAUSE_OF = {cause.sentence(): cause for cause in CAUSES}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", OWN_ENTRY)
@pytest.mark.by_day(1)
def test_a_ring_that_has_a_cause_is_named_by_it(words):
    """Its steps are run as a ring that sends, and predicted by ranks that take turns."""
    (case, gradients), steps = OWN_ENTRY[words], CAUSE_OF[words].steps
    found = diagnosed(Implementation(ring_of(steps), words, EVERYTHING), case, gradients=gradients)
    assert found.text.split("; or ")[0].split(" (residual")[0] == words


def _gathered_in_the_wrong_order(q, k, v, call):
    """Keys and values, `(batch, tokens)` of each rank, read as one `(batch, tokens)` of all."""
    n, every = call.problem.nk, []
    for x in (k, v):
        lengths = [n // call.world_size + (rank < n % call.world_size) for rank in range(call.world_size)]
        parts = [x.new_empty(x.size(0), length, *x.shape[2:]) for length in lengths]
        parts[call.rank] = x.contiguous()
        for rank, part in enumerate(parts):
            dist.broadcast(part, dist.get_global_rank(call.group, rank), group=call.group)
        joined = torch.cat([part.reshape(-1, *x.shape[2:]) for part in parts])
        every.append(joined.view(x.size(0), n, *x.shape[2:]).transpose(1, 2))
    s = call.scale * q.transpose(1, 2) @ every[0].transpose(2, 3)
    return (s.softmax(dim=-1) @ every[1]).transpose(1, 2)


@pytest.mark.timeout(60)
def test_pieces_read_in_the_wrong_order_are_named():
    """As all_gather_into_tensor returns them, which puts ranks before the batch; on shards of different lengths too."""
    declared = Capabilities(causal="never", gradients=False, uneven=True)
    implementation = Implementation(_gathered_in_the_wrong_order, "gathered", declared)
    found = diagnosed(implementation, case_of(batch=2, query_length=10), gradients=False)
    assert found.text.startswith("k and v are read in the wrong order: pieces (rank, batch, tokens)")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mutant", ["O75", "O76"])
@pytest.mark.by_day(1)
def test_what_is_rounded_is_named_by_its_digits(mutant):
    """Bounds are loose in 16 bits, but the digits of a fault of rounding are not those of another one."""
    case = case_of(dtype="bfloat16", values="dominating_key")
    found = diagnosed(MUTANTS[mutant].implementation, case, gradients=False)
    assert found.text.startswith(MUTANTS[mutant].fault.says)


@pytest.mark.timeout(60)
@pytest.mark.nightly
def test_a_mean_error_is_named_by_its_digits_too():
    """Every value may be within bounds where the property `precision` fails."""
    world = SimulatedWorld()
    try:
        runner = Runner(MUTANTS["A12a"].implementation, world)
        case = case_of(size=4, dtype="bfloat16", query_length=16)
        found = diagnose_rounding(lambda c: runner.run(c, gradients=True), [case], EVERYTHING)
        right = Runner(PLAIN, world)
        assert diagnose_rounding(lambda c: right.run(c, gradients=True), [case], EVERYTHING) is None
    finally:
        world.close()
    assert found.text == MUTANTS["A12a"].fault.says
    assert found.causes[0].allowed_by == ("accumulates",)
    assert contradicted({"probabilities": "input"}, found)
    assert not contradicted({"accumulates": "bfloat16"}, found)
    assert not contradicted({"probabilities": "input"}, Diagnosis())


ONE_RANK = {
    "scale applied twice, on rank 1 only": (
        replace(STEPS, scale=lambda here: here.problem.scale_value ** (1 + (here.rank == 1))), False
    ),
    "dk and dv swapped, on rank 1 only": (
        replace(STEPS, returned_gradients=lambda here, dq, *rest: (dq, *(rest[::-1] if here.rank == 1 else rest))), True
    ),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", ONE_RANK)
@pytest.mark.by_day(1)
def test_a_fault_of_one_rank_is_named_with_the_rank(words):
    """The other ranks are right, so no fault of all ranks explains the case."""
    steps, gradients = ONE_RANK[words]
    found = diagnosed(Implementation(ring_of(steps), "one rank", EVERYTHING), case_of(), gradients=gradients)
    assert words in found.text.split("; or ")[0]


def where(condition, fault, *, hops=None):
    """A ring that has a fault where a call meets a condition; or, with `hops`, on some blocks."""
    right, wrong = ring_of(STEPS), ring_of(limited(fault, hops) if hops else fault)
    return Implementation(
        lambda q, k, v, call: (wrong if condition(q, call) else right)(q, k, v, call), "conditional", EVERYTHING
    )


def in_head_0(steps, here, q, k):
    """The scale applied twice, in head 0 only."""
    found = STEPS.capped(steps, here, q, k)
    return torch.cat([found[:, :1] * here.problem.scale_value, found[:, 1:]], dim=1)


def without_last_of_odd(steps, here, hop, owner):
    """The last key of a block is forgotten if their number is odd."""
    m = multiplicity(steps, here, hop, owner)
    return m * (torch.arange(m.size(3)) < m.size(3) // 2 * 2)


def fault(id):
    """The steps of a mutant."""
    return MUTANTS[id].fault.steps


MANY = Requirement("at least 3 ranks", lambda case: case.world_size >= 3)
MASKED = Requirement("a causal mask", lambda case: case.problem.causal)
SHARED = Requirement("shared key heads", lambda case: case.problem.hk != case.problem.heads)
NARROW = Requirement("a 16-bit dtype", lambda case: case.problem.dtype in ("bfloat16", "float16"))
SHARED_HEADS = case_of(heads=4, key_heads=2)
CONDITIONAL = {
    "lse is in base 2": (
        where(lambda q, call: call.world_size > 2, fault("A8b")), case_of(), False, [MANY, MASKED]
    ),
    "the merged lse is the larger of both": (
        where(lambda q, call: call.causal, fault("O05")), CAUSAL, False, [MANY, MASKED]
    ),
    "scale is missing from dq": (
        where(lambda q, call: call.problem.hk != call.problem.heads, fault("O16")), SHARED_HEADS, True, [SHARED]
    ),
    "scale not applied": (
        where(lambda q, call: q.dtype.itemsize == 2, replace(STEPS, scale=lambda here: 1.0)),
        case_of(dtype="bfloat16", query_length=6), False, [NARROW]
    ),
    "scale applied twice, though not in every case": (
        where(lambda q, call: call.world_size > 2, fault("O15")), case_of(), False, []
    ),
    "causal mask shifted by one: every query sees one key too few, on the last rank only": (
        where(lambda q, call: call.rank == call.world_size - 1, fault("O41")), CAUSAL, False, []
    ),
    "dk and dv swapped, on rank 2 and later only": (
        where(lambda q, call: call.rank >= 2, fault("O31")), case_of(), True, []
    ),
    "the softmax is taken for constant: ds = p · dp, its correction delta is missing, on odd ranks only": (
        where(lambda q, call: call.rank % 2 == 1, fault("R9")), case_of(size=2), True, []
    ),
    "scale applied twice, from hop 2 on": (
        where(lambda q, call: True, fault("O15"), hops=lambda here, hop, owner: hop >= 2), case_of(), False, []
    ),
    "scale applied twice, from hop 2 on, in a ring that sends to the left": (
        where(lambda q, call: True, fault("O15"), hops=lambda here, hop, owner: 0 < hop < here.size - 1),
        case_of(), False, []
    ),
    "scale applied twice, on the blocks of the ranks on either side only": (
        where(lambda q, call: True, fault("O15"), hops=lambda here, hop, owner: hop in {1, here.size - 1} - {0}),
        case_of(), False, []
    ),
    "the weights of the merge are exchanged, on the next rank's block only (the last hop of a ring that sends to the "
    "right)": (
        where(lambda q, call: True, fault("O04"), hops=lambda here, hop, owner: 0 < hop == here.size - 1),
        case_of(), False, []
    ),
    "scale applied twice, in head 0 only": (
        Implementation(ring_of(replace(STEPS, capped=in_head_0), STEPS), "one head", EVERYTHING), case_of(), False, []
    ),
    "scale applied twice, on blocks with an odd number of keys only": (
        where(lambda q, call: True, fault("O15"), hops=lambda here, hop, owner: len(here.shards[owner]) % 2 == 1),
        case_of(), False, []
    ),
    "keys past the last whole tile of 2 of a block are never attended": (
        Implementation(ring_of(replace(STEPS, pattern=without_last_of_odd)), "odd", EVERYTHING), case_of(), False, []
    ),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", CONDITIONAL)
@pytest.mark.by_day(1)
def test_a_fault_that_is_there_under_a_condition_is_named(words):
    """Cases that lack the condition are right, and rule no hypothesis out."""
    implementation, case, gradients, requires = CONDITIONAL[words]
    needs = Needs(tuple(requires), (), complete=True, tried=0) if requires else None
    found = diagnosed(implementation, case, gradients=gradients, needs=needs)
    assert found.text.split("; or ")[0].split(" (residual")[0] == words


@pytest.mark.nightly
def test_a_cause_explains_the_variants_that_failed_too():
    """On seven ranks, which nothing else tries, another fault is there: the first explains one case of the two."""
    right_until = ring_of(fault("A8b")), ring_of(fault("A9"))
    both = Implementation(lambda q, k, v, call: right_until[call.world_size == 7](q, k, v, call), "two", EVERYTHING)
    case, few, many = (case_of(size=size) for size in (3, 2, 7))
    for failing, words in (((case, few), "lse is in base 2"), ((case, few, many), None)):
        needs = Needs((), (), complete=True, tried=2, failing=failing)
        text = diagnosed(both, case, gradients=False, needs=needs).text
        assert (text and text.split(" (residual")[0]) == words


@pytest.mark.nightly
def test_of_variants_that_passed_a_cause_says_that_it_is_not_there():
    """On seven ranks, which nothing else tries, all is right."""
    wrong, right = ring_of(fault("A8b")), ring_of(STEPS)
    most = Implementation(lambda *args: (right if args[3].world_size == 7 else wrong)(*args), "most", EVERYTHING)
    for passing, words in (((), ""), ((case_of(size=7),), ", though not in every case")):
        needs = Needs((), (), complete=True, tried=2, failing=(case_of(size=2),), passing=passing)
        text = diagnosed(most, case_of(), gradients=False, needs=needs).text
        assert text.split(" (residual")[0] == "lse is in base 2" + words


def test_cases_with_sinks_say_nothing_of_another_declaration():
    """The emulation of a declaration has none; of what is drawn to judge it by, some have."""

    def attend(q, k, v, call):
        out, lse = PLAIN.function(q, k, v, call)[:2]
        return out, lse.to(q.dtype).to(lse.dtype)

    declared = replace(EVERYTHING, sinks=True, gradients=False, lse_gradient=False)
    runner = Runner(Implementation(attend, "rounded", declared), SimulatedWorld())
    case = case_of(dtype="bfloat16", key_lengths=(5,))
    violation = judge_everything(case, runner).violation
    assert violation is not None
    narrow = replace(declared, dtypes=("bfloat16",))
    assert any(one.problem.sinks for one in drawn(MASKED_ROWS, narrow, OTHERS))
    assert would_pass(MASKED_ROWS, runner, violation, [case, case]) == {"accumulates": "bfloat16"}


def test_variants_are_chosen_that_are_unlike_each_other():
    """Of cases that differ in numbers alone one is enough; no choice is left out as long as there is room."""
    alike = [case_of(query_length=n) for n in (9, 12, 6)]
    masks = [
        case_of(**{name: value}) for name, value in (("causal", True), ("window", (1, 1)), ("documents", (0, 4, 9)))
    ]
    assert set(unlike([*alike, *masks])) == {alike[0], *masks}
    assert unlike([]) == []
    assert len(unlike([case_of(size=size) for size in range(1, 9)])) == VARIED


def test_a_condition_is_what_right_cases_lack():
    """Of all that a case needs, the fewest things that every right case lacks of which a hypothesis is wrong."""
    cases = (3, True), (1, True), (2, False)
    failing, *right = (Scene(case_of(size=size, causal=causal), EVERYTHING, None) for size, causal in cases)
    standing = Standing(Hypothesis("a fault", STEPS), 0.0, confirmed=[failing], excused=right)
    assert standing.settled(failing, [MASKED, MANY]).only == (MANY,)
    assert standing.settled(failing, [MASKED]) is None
    assert replace(standing, confirmed=[]).settled(failing, [MASKED, MANY]) is None


def test_a_condition_is_met_by_every_case_that_fails():
    """Three ranks are no condition of what fails on two; the plain conditions are tried where two cases agree."""
    cases = (3, True), (2, True), (2, False)
    *failing, right = (Scene(case_of(size=size, causal=causal), EVERYTHING, None) for size, causal in cases)
    standing = Standing(Hypothesis("a fault", STEPS), 0.0, confirmed=failing[1:], excused=[right])
    assert standing.settled(failing[0], [MANY]) is None
    sure = replace(standing, confirmed=failing)
    settled = sure.settled(failing[0], [MANY])
    assert [one.text for one in settled.only] == ["causal"]
    fault = settled.with_its_condition()
    assert (fault.may_be_in(failing[0].case), fault.may_be_in(right.case)) == (True, False)
    assert replace(settled, excused=[], elsewhere=[right]).with_its_condition().may_be_in(right.case)


def test_a_number_that_was_fitted_is_not_named_without_its_condition():
    """A tile of 4 keys that some cases contradict may be a tile of another kind."""
    scene = Scene(case_of(), EVERYTHING, None)
    assert Standing(Hypothesis("a fault", STEPS), 0.0, confirmed=[scene, scene]).may_be
    assert not Standing(Hypothesis("tiles of 4", STEPS, tile=4), 0.0, confirmed=[scene, scene]).may_be


@pytest.mark.timeout(60)
def test_of_cases_that_are_compared_the_one_that_is_wrong_is_explained():
    """One rank is right; two ranks, with which it is compared, are not. Where is told of the case itself only."""
    implementation, world = where(lambda q, call: call.world_size > 1, fault("O15")), SimulatedWorld()
    try:
        runner, case = Runner(implementation, world), case_of(size=1)
        violation = WORLD_SIZE_INVARIANCE.judge(case, runner).violation
        found = explained(runner, WORLD_SIZE_INVARIANCE, violation, case, case)
    finally:
        world.close()
    assert found.text.startswith("scale applied twice")
    assert found.where is found.region is None


def test_numbers_that_a_coarser_dtype_holds_are_not_called_those_of_a_finer_one():
    """Numbers of bfloat16 are numbers of float16, too."""
    numbers = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    assert not _coarser("float16", numbers.half().double().numpy())
    assert _coarser("float16", numbers.bfloat16().double().numpy())
    assert _coarser("bfloat16", numbers.to(torch.float8_e4m3fn).double().numpy())
    assert not _coarser("bfloat16", numbers[:2].to(torch.float8_e4m3fn).double().numpy())  # may be chance


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", ["O65", "O31", "F4a"])
def test_recognition_takes_less_than_five_seconds(mutant):
    """Of a quick processor, since others may have it meanwhile: with cases that tell causes apart, run and compared."""
    gradients = mutant in BACKWARD
    case, _ = (BACKWARD if gradients else FORWARD)[mutant]
    started = time.process_time()
    found = diagnosed(MUTANTS[mutant].implementation, case, gradients=gradients)
    assert time.process_time() - started < 5.0 * slowness()
    assert found.causes


def _biased(steps, here, hop, owner, q, block):
    """A block's lse is a little too large, the more so the later it comes."""
    found = Partial(*attend(steps, here, hop, owner, q, block))
    return found._replace(lse=found.lse + hop / 100)


NAMELESS = {
    "lse biased by the hop": replace(STEPS, attend=_biased),
    "dk divided by rank + 1": replace(
        STEPS, returned_gradients=lambda here, dq, dk, dv: (dq, dk / (here.rank + 1), dv)
    ),
    "two faults at once": replace(
        STEPS,
        scale=lambda here: float((here.problem.head_dim + 1) ** -0.5),
        causal=lambda problem, i, j: j < i + problem.diagonal,
    ),
    "scores squared": replace(STEPS, scores=lambda q, k, scale: (q @ k.transpose(2, 3) * scale) ** 2),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", NAMELESS)
@pytest.mark.by_day(1)
def test_what_nothing_reproduces_is_not_named(fault):
    """Faults that are in no library, among them two that are, together. Where they are wrong is told all the same."""
    case = case_of(causal=True, heads=4, key_heads=2)
    implementation = Implementation(ring_of(NAMELESS[fault]), fault, EVERYTHING)
    found = diagnosed(implementation, case, gradients="dk" in fault)
    assert (found.text, found.causes) == (None, ())
    assert found.where.rows


def _zero_lse(steps, here, hop, owner, q, block):
    """As of a kernel that returns no lse."""
    found = Partial(*attend(steps, here, hop, owner, q, block))
    return found._replace(lse=torch.where(found.lse == -torch.inf, found.lse, 0.0))


def _narrow_lse(steps, here, hop, owner, q, block):
    """As of an adapter that ends with `lse.to(q.dtype)`."""
    found = Partial(*attend(steps, here, hop, owner, q, block))
    return found._replace(lse=found.lse.to(getattr(torch, here.problem.dtype)))


def _sigmoid_merge(first, second):
    """In whatever dtype the log-sum-exps have."""
    weight = torch.sigmoid(second.lse - first.lse)[..., None]
    lse = first.lse - torch.nn.functional.logsigmoid(first.lse - second.lse)
    return Partial(first.out - weight * (first.out - second.out), lse)


PUBLISHED = {
    "the lse of every block is 0": (replace(STEPS, attend=_zero_lse), "float32"),
    "log-sum-exps of blocks are rounded to the dtype of the inputs": (
        replace(STEPS, attend=_narrow_lse, merge=_sigmoid_merge),
        "bfloat16",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", PUBLISHED)
@pytest.mark.by_day(1)
def test_a_fault_of_a_published_ring_is_named(words):
    """Both are yunchang's, on its torch backends."""
    steps, dtype = PUBLISHED[words]
    ring, only_out = ring_of(steps), replace(EVERYTHING, lse=False, lse_gradient=False)
    implementation = Implementation(lambda q, k, v, call: ring(q, k, v, call)[0], "published", only_out)
    case = case_of(dtype=dtype, query_length=21, causal=True, values="rising_blocks")
    found = diagnosed(implementation, case, gradients=False)
    assert found.causes
    assert found.text.startswith(words)


class SameWay(torch.autograd.Function):
    """Gathers blocks; their gradients travel to the right, and blocks are visited to the right too."""

    @staticmethod
    def forward(ctx, block):
        """All blocks, in the order of ranks."""
        found = [torch.empty_like(block) for _ in range(dist.get_world_size())]
        dist.all_gather(found, block.contiguous())
        return torch.cat(found, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        """Rank r adds the part of block r + hop to the gradient of block r - hop."""
        rank, size = dist.get_rank(), dist.get_world_size()
        parts, total = gradient.chunk(size, dim=1), 0.0
        for hop in range(size):
            total = (total + parts[(rank + hop) % size]).contiguous()
            arriving = torch.empty_like(total)
            passes = [
                dist.P2POp(dist.isend, total, (rank + 1) % size), dist.P2POp(dist.irecv, arriving, (rank - 1) % size)
            ]  # fmt: skip
            for work in dist.batch_isend_irecv(passes):
                work.wait()
            total = arriving
        return total


@pytest.mark.timeout(60)
@pytest.mark.nightly
def test_gradients_that_travel_the_way_of_their_blocks_are_named():
    """diffusers 0.42.1: on two ranks left and right are one."""

    def gathered(q, k, v, call):
        k, v = SameWay.apply(k), SameWay.apply(v)
        scores = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

    only = Capabilities(causal="never", scale=True)
    implementation = Implementation(gathered, "same way", only)
    found = diagnosed(implementation, case_of(), gradients=True)
    assert found.causes
    assert found.text.startswith("gradients of blocks are sent on in the wrong direction")


class RoundsGradient(torch.autograd.Function):
    """The identity, whose gradient goes through another dtype."""

    @staticmethod
    def forward(ctx, x, dtype):
        """As it is."""
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        """Rounded."""
        return gradient.to(ctx.dtype).to(gradient.dtype), None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("tensor", ["dq", "dv"])
@pytest.mark.nightly
def test_a_gradient_that_is_rounded_to_another_dtype_is_named(dtype, tensor):
    """`dq.to(torch.bfloat16)` at the end of a backward, whatever q is: right in bfloat16, too coarse in float16."""

    def rounds(q, k, v, call):
        q, v = (RoundsGradient.apply(x, torch.bfloat16) if name == tensor else x for name, x in (("dq", q), ("dv", v)))
        return PLAIN.function(q, k, v, call)

    implementation = Implementation(rounds, "rounds", EVERYTHING)
    found = diagnosed(implementation, case_of(dtype=dtype), gradients=True)
    assert found.causes
    assert found.text.startswith(f"{tensor} is rounded to bfloat16, whatever dtype it is returned in")


@pytest.mark.nightly
def test_gradients_that_are_added_up_in_another_dtype_are_named():
    """Those of keys and values, in a buffer of float32 that travels, whatever the inputs are."""

    def rounds(q, k, v, call):
        k, v = (RoundsGradient.apply(x, torch.float32) for x in (k, v))
        return PLAIN.function(q, k, v, call)

    found = diagnosed(Implementation(rounds, "rounds", EVERYTHING), case_of(dtype="float64"), gradients=True)
    assert found.text.startswith("dk and dv of inputs of a wider dtype are computed in float32")


def test_what_is_right_has_no_diagnosis():
    """There is nothing to explain."""
    assert diagnosed(PLAIN, CAUSAL, gradients=True) is None


@pytest.mark.timeout(60)
@settings(max_examples=25)
@given(cases(PLAIN.capabilities, cotangents=("both",), dtypes=("float64",)))
def test_with_nothing_suspected_the_model_is_the_oracle(case):
    """What the plain ring returns is what the steps predict, on every rank, gradients included."""
    world = SimulatedWorld()
    try:
        observation = Runner(PLAIN, world).run(case, gradients=True)
    finally:
        world.close()
    assert Hypothesis("", STEPS).explains(Scene(case, PLAIN.capabilities, observation)) is not None


def test_cases_of_selectors_are_only_varied_where_selectors_can_be_built():
    """Another scale, or more keys than dimensions, and there are no such inputs: that ended the run."""
    case = case_of(causal=True, values="selectors", query_length=4, head_dim=4)
    assert "the ring turns the other way" in diagnosed(MUTANTS["B2"].implementation, case, gradients=False).text


# -- misunderstandings -------------------------------------------------------------------------------------------------


def _gathered(x, call):
    pieces = [torch.empty_like(x).contiguous() for _ in range(call.world_size)]
    dist.all_gather(pieces, x.detach().contiguous(), group=call.group)
    return torch.cat(pieces, dim=1)


def _attention(q, k, v, call, *, causal=None, positions=None, key_positions=None):
    """As a user writes it: keys and values gathered in rank order, (batch, tokens, heads, dim)."""
    k, v = _gathered(k, call), _gathered(v, call)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * call.scale
    if call.causal if causal is None else causal:
        i = call.positions if positions is None else positions
        j = torch.arange(k.shape[1]) if key_positions is None else key_positions
        scores = scores.masked_fill(j[None, :] > i[:, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def _of_stripes(q, k, v, call):
    """Every rank takes its tokens for every P-th of the sequence."""
    held = [torch.arange(rank, call.problem.nk, call.world_size) for rank in range(call.world_size)]
    return _attention(q, k, v, call, positions=held[call.rank], key_positions=torch.cat(held))


def _of_mirrored_pieces(q, k, v, call):
    """Every rank takes its tokens for piece r and piece 2P - 1 - r of the sequence."""
    pieces = torch.arange(call.problem.nk).tensor_split(2 * call.world_size)
    held = [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(call.world_size)]
    return _attention(q, k, v, call, positions=held[call.rank], key_positions=torch.cat(held))


def _turned(q, k, v, call):
    return _attention(*(x.transpose(1, 2) for x in (q, k, v)), call, causal=False).transpose(1, 2)


SQUARE = case_of(size=2, query_length=8, heads=4)
MISUNDERSTOOD = {
    "k and v are exchanged": (case_of(), {}, lambda q, k, v, call: _attention(q, v, k, call)),
    "q and k are exchanged": (case_of(), {}, lambda q, k, v, call: _attention(k, q, v, call)),
    "q and v are exchanged": (case_of(), {}, lambda q, k, v, call: _attention(v, k, q, call)),
    'tensors are read as "bhsd", but tensor_layout="bshd" is declared': (case_of(), {"causal": "never"}, _turned),
    'tensors are read as "bshd", but tensor_layout="bhsd" is declared': (
        case_of(),
        {"tensor_layout": "bhsd", "causal": "never"},
        lambda q, k, v, call: _attention(q, k, v, call, causal=False),
    ),
    'out is returned as "bhsd"': (SQUARE, {}, lambda q, k, v, call: _attention(q, k, v, call).transpose(1, 2)),
    "a causal mask is applied though the problem is not causal": (
        case_of(),
        {},
        lambda q, k, v, call: _attention(q, k, v, call, causal=True),
    ),
    "causal mask missing": (CAUSAL, {}, lambda q, k, v, call: _attention(q, k, v, call, causal=False)),
    "positions are those of striped shards": (CAUSAL, {}, _of_stripes),
    "positions are those of zigzag shards": (CAUSAL, {}, _of_mirrored_pieces),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", MISUNDERSTOOD)
@pytest.mark.by_day(3)
def test_a_misunderstanding_is_named_first(words):
    """Code that is right in itself, and is given or declares something else than its author meant."""
    case, declared, attend = MISUNDERSTOOD[words]
    found = diagnosed(Implementation(attend, "misunderstood", Capabilities(**declared)), case, gradients=False)
    assert words in found.text.split("; or ")[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["out", "lse"])
@pytest.mark.by_day(1)
def test_a_result_that_is_reshaped_instead_of_transposed_is_named(name):
    """And of its rows and heads it is said how many are wrong: the first and the last elements stay in their places."""

    def attend(q, k, v, call):
        found = dict(zip(("out", "lse"), ring_of(STEPS)(q, k, v, call), strict=True))
        found[name] = found[name].transpose(1, 2).reshape(found[name].shape)
        return found["out"], found["lse"]

    found = diagnosed(Implementation(attend, "reshaped", Capabilities(lse=True)), case_of(), gradients=False)
    assert found.text.startswith(f"{name} is brought from (batch, ")
    assert "by a reshape instead of a transposition of heads and tokens" in found.text
    assert found.where.text[0] == f"{name}, all queries of every rank, all heads, 12 of 18 of these"


@pytest.mark.timeout(60)
def test_exchanged_arguments_are_named_by_their_gradients_too():
    """What is returned as dk is then the gradient of what was used as v."""

    def attend(q, k, v, call):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, v) * call.scale
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), k)

    case = case_of(size=1)
    found = diagnosed(
        Implementation(attend, "exchanged", Capabilities(world_sizes=(1,), causal="never")), case, gradients=True
    )
    assert found.text.startswith("k and v are exchanged: q is used as q, v as k and k as v")


def named_with_needs(attend, capabilities, cases, **how):
    """The cause of cases of which it is known what they need, as `check` finds both."""
    world = SimulatedWorld()
    runner = Runner(Implementation(attend, "with needs", capabilities), world)

    def fails(case):
        return judge_everything(case, runner).violation is not None

    try:
        found = diagnose(
            lambda case: runner.run(case, gradients=False),
            cases,
            capabilities,
            needs=needs(cases[0], fails, capabilities),
            probe=lambda case, inputs: runner.run(case, gradients=False, inputs=inputs),
            **how,
        )
    finally:
        world.close()
    return found.text or ""


@pytest.mark.parametrize("other", [(), (6, 7, 10, 11)])
def test_what_is_named_is_held_against_cases_of_all_lengths(other):
    """One fault explains the cases that are like the smallest; at some lengths there is another one."""

    def attend(q, k, v, call):
        d = call.problem.head_dim + 1
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (1.0 if call.problem.nk in other else d**-0.5)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)

    declared = Capabilities(world_sizes=(1,), lse=True, causal="never")
    text = named_with_needs(attend, declared, [case_of(size=1, query_length=n) for n in (2, 5)])
    assert text.startswith("scale is 1/sqrt(D + 1)") is not bool(other)


@pytest.mark.parametrize("by_turns", [True, False])
def test_which_heads_go_together_is_held_against_other_numbers_of_them(by_turns):
    """Of 6 heads and 3 key heads, halves of groups that are read by turns are heads that are; of 12 they are not."""

    def reads(here):
        group, count, h = here.problem.group_size, here.problem.hk, torch.arange(here.problem.heads)
        return h // group if count != 3 or group % 2 else h // (1 if by_turns else group // 2) % count

    steps = replace(STEPS, per_query_head=lambda here, x: x[:, reads(here)])
    declared = Capabilities(world_sizes=(2,), gqa=True, lse=True, gradients=False, causal="never")
    case = case_of(size=2, query_length=4, heads=6, key_heads=3)
    known = [one for one in HYPOTHESES if "h % Hk" in str(one.says)]
    text = named_with_needs(ring_of(steps), declared, [case, case], hypotheses=known)
    assert text.startswith("grouped heads: query head h reads key head h % Hk") is by_turns


@pytest.mark.nightly
def test_what_was_fitted_to_cases_that_all_have_a_mask_is_held_against_others():
    """Documents are ignored beside a window, which every case at hand has: without one they are obeyed."""

    def attend(q, k, v, call):
        nk = call.problem.nk
        i, j = torch.arange(nk)[:, None], torch.arange(nk)
        number = torch.bucketize(torch.arange(nk), torch.tensor(call.documents or (0, nk)), right=True)
        outside = (number == 0) | (number == len(call.documents or (0, nk)))
        q, k, v = (x.masked_fill(outside[:, None, None], 0.0) for x in (q, k, v))
        there = (number[:, None] == number) & ~outside
        if call.window is not None:
            left, right = (nk if side is None else side for side in call.window)
            there = (j >= i - left) & (j <= i + right)
        s = (torch.einsum("bqhd,bkhd->bhqk", q, k) * call.scale).masked_fill(~there, -torch.inf)
        lse = s.logsumexp(-1)
        weights = (s - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
        return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse

    c = Capabilities(world_sizes=(1,), documents=True, window=True, lse=True, causal="never")
    case = case_of(size=1, query_length=1, window=(0, 0), documents=(1, 1))
    assert "documents ignored (" in named_with_needs(attend, c, [case, case])


def test_gradients_that_come_to_another_rank_are_not_held_against_padding():
    """It may have been cleared before it is sent."""
    doubled = ring_of(replace(STEPS, times_in_part=lambda here, hop, owner: (2, 2)))
    world = SimulatedWorld()
    try:
        runner = Runner(Implementation(doubled, "doubled", EVERYTHING), world)
        cases = [case_of(documents=documents) for documents in (None, (0, 9), (2, 9))]
        scenes = [Scene(case, EVERYTHING, runner.run(case, gradients=True)) for case in cases]
    finally:
        world.close()
    moved = next(one for one in HYPOTHESES if "sent on in the wrong direction" in str(one.says))
    assert [moved.explains(scene) for scene in scenes] == [None, None, None]
    assert [Standing(moved, 0.0).stands(scene) for scene in scenes] == [False, False, True]

"""Reports that are read back: whole ones as they were told, all others refused in one line that names the file."""

import json

import pytest
import sample_events as sample

from ringverify.events import FooterEvent, as_json
from ringverify.reports.jsonl import ReportError, ReportWriter, read_report
from ringverify.reports.results import Source, read_results, results_of


def written(path, events):
    """A report as `check` writes it."""
    with ReportWriter(path) as writer:
        for event in sample.typed(events):
            writer.write(event)
    return path


def test_a_report_says_what_was_told(tmp_path):
    """Every event comes back, with numbers that JSON lacks as text; the seal is the file's."""
    told = sample.run(sample.RIGHT)
    told[1] |= {"margin": float("inf"), "reason": "a line\u2028that JSON leaves as it is, \x85 and \ud800 too"}
    path = written(tmp_path / "a.jsonl", told)
    assert read_report(path) == sample.typed(told)
    assert len(json.loads(path.read_text(encoding="utf-8").split("\n")[-2])["seal"]) == 64


def test_line_ends_of_another_system_do_not_break_the_seal(tmp_path):
    """What git may do to a file is no edit."""
    path = written(tmp_path / "a.jsonl", sample.everything())
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert isinstance(read_report(path)[-1], FooterEvent)


def test_a_mark_of_byte_order_is_no_edit(tmp_path):
    """Some editors and shells put one before a text in UTF-8."""
    path = written(tmp_path / "a.jsonl", sample.everything())
    whole = read_report(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_report(path) == whole


def test_events_of_a_kind_that_is_new_are_left_out(tmp_path):
    """Adding is free: an older reader goes on."""
    told = sample.run(sample.RIGHT)
    path = tmp_path / "a.jsonl"
    lines = as_json(sample.typed(told))
    path.write_text(sample.sealed([lines[0], {"event": "weather", "sun": True}, *lines[1:]]))
    assert read_report(path) == sample.typed(told)


def edited(text):
    """A verdict changed by hand."""
    return text.replace('"verdict": "fail"', '"verdict": "pass"', 1)


def without(field, line=1):
    """A report with a line, the second by default, that lacks a field; it keeps its seal."""

    def spoil(text):
        lines = [json.loads(line) for line in text.splitlines()]
        del lines[line][field]
        return sample.lines(lines)

    return spoil


def with_footer(**fields):
    """A report with another footer; it keeps its seal."""

    def spoil(text):
        lines = [json.loads(line) for line in text.splitlines()]
        return sample.lines([*lines[:-1], lines[-1] | fields])

    return spoil


def resealed(spoil):
    """A report that was written like this: its seal is right."""

    def written_so(text):
        lines = [json.loads(line) for line in spoil(text).splitlines()]
        del lines[-1]["seal"]
        return sample.sealed(lines)

    return written_so


BAD = {
    "without footer": (lambda text: "".join(text.splitlines(keepends=True)[:-1]), ["incomplete", "no footer"]),
    "truncated": (lambda text: text[: len(text) // 2], ["cut off or damaged at line", "run check again"]),
    "edited": (edited, ["was edited", "run check again"]),
    "a line less": (lambda text: text.replace(text.splitlines(keepends=True)[2], ""), ["was edited"]),
    "without seal": (without("seal", line=-1), ["was edited", "run check again"]),
    "an edited footer": (with_footer(exit_code=0), ["was edited"]),
    "more in the footer": (with_footer(known=7), ["was edited"]),
    "a header with a footer": (
        lambda text: sample.lines([sample.HEADER, {"event": "footer", "verdict": "conformant", "exit_code": 0}]),
        ["was edited"],
    ),
    "two in one": (lambda text: text + text, ["more than one report", "a file of its own"]),
    "not JSON": (lambda text: "dear diary\n", ["damaged at line 1"]),
    "other JSON": (lambda text: "[1, 2]\n", ["line 1: not an event"]),
    "not text": (lambda text: b"\xff\xfe\x00", ["not UTF-8 text"]),
    "empty": (lambda text: "", ["not a report"]),
    "newer": (lambda text: text.replace('"schema": 1', '"schema": 2', 1), ["schema 2", "this reads 1", "upgrade"]),
    "a field less": (resealed(without("examples")), ["line 2", "'examples' is a required property"]),
    "a field of another type": (resealed(with_footer(exit_code="one")), ["footer field exit_code", "'one'"]),
    "a verdict that is none": (resealed(with_footer(verdict="fine")), ["footer field verdict", "'fine'"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", BAD)
def test_what_is_not_a_whole_report_is_refused(damage, tmp_path):
    """In one line with the file's name, before anything is drawn."""
    path = written(tmp_path / "a.jsonl", sample.everything())
    spoil, words = BAD[damage]
    spoiled = spoil(path.read_text(encoding="utf-8"))
    path.write_bytes(spoiled if isinstance(spoiled, bytes) else spoiled.encode())
    with pytest.raises(ReportError) as refusal:
        read_report(path)
    assert "\n" not in str(refusal.value)
    for word in [str(path), *words]:
        assert word in str(refusal.value)


def test_a_run_that_was_cut_off_is_named(tmp_path):
    """There is no report then, and what is there says why."""
    (tmp_path / "a.jsonl.partial").write_text("{}\n")
    with pytest.raises(ReportError, match=r"only .*a\.jsonl\.partial: the run was cut off"):
        read_report(tmp_path / "a.jsonl")


# -- several -----------------------------------------------------------------------------------------------------------


def test_two_reports_are_one_result(tmp_path):
    """Implementations in order; a property that only one run has comes where that run had it."""
    first = sample.run({"a": ("conformant", [sample.row("a", name, "pass") for name in ("forward", "dtypes")])})
    second = sample.run(
        {"b": ("conformant", [sample.row("b", name, "pass") for name in ("forward", "lse", "dtypes", "memory")])},
        device="cuda",
    )
    paths = [written(tmp_path / f"{n}.jsonl", events) for n, events in enumerate((first, second))]
    results = read_results([Source(path) for path in paths])
    assert [one.name for one in results.implementations] == ["a", "b"]
    assert results.properties == ("forward", "lse", "dtypes", "memory")
    assert [header.device for header in results.headers] == ["cpu", "cuda"]
    assert results.verdict == "conformant"


def test_two_implementations_of_one_name_are_refused_with_the_way_out(tmp_path):
    """Both files are named; a label tells the runs apart."""
    paths = [written(tmp_path / f"{n}.jsonl", sample.run(sample.RIGHT)) for n in "ab"]
    with pytest.raises(ReportError) as refusal:
        read_results([Source(path) for path in paths])
    for word in [*map(str, paths), "'my_package.ring.attend'", "label", f"new={paths[1]}"]:
        assert word in str(refusal.value)
    results = read_results([Source.of(str(paths[0])), Source.of(f"new={paths[1]}")])
    assert [one.name for one in results.implementations] == ["my_package.ring.attend", "my_package.ring.attend (new)"]
    with pytest.raises(ReportError, match="both tell of"):
        read_results([Source.of(f"new={path}") for path in paths])


def test_a_report_that_is_named_twice_is_refused(tmp_path):
    """Under a label too."""
    path = written(tmp_path / "a.jsonl", sample.run(sample.RIGHT))
    with pytest.raises(ReportError, match="named twice"):
        read_results([Source(path), Source.of(f"again={path}")])


def test_a_file_with_an_equals_sign_in_its_name_is_a_file(tmp_path, monkeypatch):
    """A label is only what is no file."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "n=8.jsonl", sample.run(sample.RIGHT))
    assert Source.of("n=8.jsonl").label is None
    assert Source.of("gpu=n=8.jsonl") == Source(Source.of("n=8.jsonl").path, "gpu")
    for text in ("=a.jsonl", "gpu="):
        with pytest.raises(ReportError, match=r"expected FILE or LABEL=FILE"):
            Source.of(text)


CONTRADICTIONS = {
    "no verdict on 'a'": [sample.row("a", "forward", "pass")],
    "two verdicts on forward of 'a'": [sample.row("a", "forward", "pass")] * 2,
    "a counterexample to forward of 'a', which is not said to fail": [
        sample.row("a", "forward", "pass"),
        sample.counterexample("a", "forward"),
    ],
    "two implementations are named 'a'": [sample.run({"a": ("conformant", [])})[1]] * 2,
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_events_that_contradict_one_another_are_refused(what):
    """Each follows the schema; together they say nothing."""
    footer = {"event": "footer", "verdict": "conformant", "exit_code": 0}
    events = sample.typed([sample.HEADER, *CONTRADICTIONS[what], footer])
    with pytest.raises(ReportError, match=what):
        results_of(events)

"""Make docs/mutants.md from the file that runs of `ringverify mutants --json` wrote."""

from __future__ import annotations

from collections.abc import Iterable

from ringverify.faults.catalogue import MUTANTS
from ringverify.faults.reports import OUT_OF_SCOPE
from ringverify.lab.kill_report import FalseAlarms, FirstKills, KillMatrix, KillReport, MergeKills, Section
from ringverify.lab.variants import VARIANTS
from ringverify.merging.faults import FAULTS
from ringverify.properties.catalogue import PROPERTIES
from ringverify.reports.markdown import table

LENSES: dict[str, tuple[str, ...]] = {
    "exact": ("exact_selection",),
    "semantic": (
        "forward", "lse", "gradients", "lse_gradient", "masked_rows", "overflow", "chunk_boundaries", "dtypes",
        "strided_inputs", "uninitialised", "reentrancy", "subgroups", "incremental",
    ),
    "precision": ("precision",),
    "invariants": ("invariants", "isolation", "world_size_invariance", "inputs_untouched", "modes", "determinism"),
    "transport": ("hazards", "progress", "traffic", "memory", "balance"),
}  # fmt: skip
"""Properties by lens: the four of DESIGN §6, and `transport`, which is not about values. Each property has one."""


def markdown(report: KillReport, source: str) -> str:
    """Return the page as Markdown.

    Args:
        report: the file's content; sections that are missing are left out.
        source: the file's name.
    """
    parts = [
        "# What the suite kills, and what it lets through\n",
        f"Generated from `{source}` by `ringverify mutants --table`; do not edit. Made again by:\n",
        f"```console\n{_commands(report, source)}\n```\n",
    ]
    if report.first is not None:
        parts += _first(report.first)
    if report.matrix is not None:
        parts += _justification(report.matrix, report.variants)
    if report.variants is not None:
        parts += _variants(report.variants)
    if report.merges is not None:
        parts += _merges(report.merges)
    parts += ["## Reports without a mutant\n", table(("row", "why"), OUT_OF_SCOPE.items())]
    if report.matrix is not None:
        parts += _every_mutant(report.matrix, report.first)
    return "\n".join(parts)


def _commands(report: KillReport, source: str) -> str:
    lines = []
    sections = (
        (report.first, ""),
        (report.matrix, " --matrix"),
        (report.variants, " --variants"),
        (report.merges, " --merges"),
    )
    for made, option in sections:
        if made is not None:
            most = "" if made.max_examples is None else f" --max-examples {made.max_examples}"
            lines.append(f"$ ringverify mutants{option}{most} --jobs {made.jobs} --json {source}")
    return "\n".join([*lines, f"$ ringverify mutants --table docs/mutants.md --json {source}"])


def _made(section: Section) -> str:
    jobs = "one process" if section.jobs == 1 else f"{section.jobs} processes"
    return (
        f"Run on {section.date} with ringverify {section.ringverify}, torch {section.torch}, "
        f"Python {section.python}, seed {section.seed}, {jobs}, in {section.seconds / 60:.1f} minutes."
    )


def _first(first: FirstKills) -> Iterable[str]:
    yield "## The first kill\n"
    yield f"Every mutant against the quick suite, properties in the order of the README. {_made(first)}\n"
    small, by_value = first.value_mutants_shrunk_small, first.value_mutants
    median = "-"
    if first.median_examples is not None:
        median = f"{first.median_seconds} s, {first.median_examples:g} examples"
    yield table(
        ("", ""),
        [
            ("mutants killed", f"{first.killed} of {first.mutants}"),
            ("survivors", ", ".join(first.survivors) or "none"),
            ("median to the first kill", median),
            ("value mutants shrunk to at most 3 ranks and 6 tokens", f"{small} of {by_value}"),
        ],
    )


def _justification(matrix: KillMatrix, variants: FalseAlarms | None) -> Iterable[str]:
    yield "## What each lens and each property is for\n"
    within = "the quick suite" if matrix.max_examples is None else f"{matrix.max_examples} examples"
    yield (
        f"Every property on every mutant, within {within} a pair; a mutant that nothing kills so is tried in full. "
        f"{_made(matrix)} {matrix.killed} of {matrix.mutants} mutants are killed, {matrix.pairs} pairs tried. "
        "*Alone* are mutants that no other property kills, or for a lens no other lens, within as many examples.\n"
    )
    kills = matrix.kills
    tried = dict(variants.by_property) if variants else {}
    alarms = [one.property for one in variants.alarms] if variants else []

    def alarmed(ids: Iterable[str]) -> str:
        ids = list(ids)
        return f"{sum(map(alarms.count, ids))} in {sum(tried.get(id, 0) for id in ids)}" if variants else "not run"

    rows: list[tuple[object, ...]] = []
    for lens, ids in LENSES.items():
        killed = [id for id, by in kills.items() if set(by) & set(ids)]
        alone = [id for id in killed if set(kills[id]) <= set(ids)]
        rows.append((f"**{lens}**", len(killed), len(alone), _some(alone), alarmed(ids)))
    yield table(("lens", "kills", "alone", "which", "false alarms in examples"), rows)
    rows = []
    for id in PROPERTIES:
        killed = [mutant for mutant, by in kills.items() if id in by]
        alone = [mutant for mutant in killed if len(kills[mutant]) == 1]
        lens = next(name for name, ids in LENSES.items() if id in ids)
        rows.append((f"`{id}`", lens, len(killed), len(alone), _some(alone), alarmed([id])))
    yield table(("property", "lens", "kills", "alone", "which", "false alarms in examples"), rows)


def _some(ids: list[str]) -> str:
    return " ".join(ids[:24]) + (f" and {len(ids) - 24} more" if len(ids) > 24 else "")


def _variants(variants: FalseAlarms) -> Iterable[str]:
    yield "## False alarms\n"
    yield (
        f"{variants.implementations} correct implementations, most of which look wrong, against every property that "
        f"applies, in all dtypes: {variants.examples} examples, {variants.fewest} or more of each, "
        f"**{len(variants.alarms)} false alarms**. {_made(variants)}\n"
    )
    if variants.alarms:
        yield table(
            ("implementation", "property", "case", "what is said"),
            [(one.name, one.property, one.case, one.summary) for one in variants.alarms],
        )
    margins = {id: top for id, top in variants.largest_margin.items() if top}
    yield table(
        ("property", "examples", "largest error over error allowed"),
        [(f"`{id}`", variants.by_property[id], f"{top:.2g}") for id, top in margins.items()],
    )
    stories = {one.implementation.name: one.story for one in VARIANTS.values()}
    yield table(
        ("implementation", "examples", "what looks wrong"),
        [(name, count, stories.get(name, "")) for name, count in variants.each.items()],
    )


def _merges(merges: MergeKills) -> Iterable[str]:
    yield "## Merges of partial results\n"
    killed, examples = len(merges.kills) - len(merges.survivors), sum(merges.each.values())
    yield (
        f"{killed} of {len(merges.kills)} wrong merges are killed; {len(merges.each)} correct ones, in {examples} "
        f"examples: **{len(merges.alarms)} false alarms**. {_made(merges)} Each property that kills a fault has the "
        "examples it took, in a merge of two or in one of n.\n"
    )
    rows = [
        (f"`{id}`", FAULTS[id].sentence, ", ".join(f"{name} {count}" for name, count in found.items()) or "**none**")
        for id, found in merges.kills.items()
        if id in FAULTS
    ]
    yield table(("fault", "what is wrong", "killed by"), rows)
    yield table(("correct merge", "examples"), list(merges.each.items()))


def _every_mutant(matrix: KillMatrix, first: FirstKills | None) -> Iterable[str]:
    yield "## Every mutant\n"
    yield (
        "Properties that kill it, each with the examples it took; then the first kill in the quick suite, all "
        "properties before it included, and the size of the shrunk case.\n"
    )
    rows = []
    for id, by in matrix.kills.items():
        if id not in MUTANTS:
            continue
        cheapest = sorted(by.items(), key=lambda pair: pair[1])
        shown = ", ".join(f"{property} {examples}" for property, examples in cheapest) or "**none**"
        after = ""
        if first is not None and id in first.kills:
            one = first.kills[id]
            took = f"{one.examples} examples, {one.seconds:.1f} s; {one.ranks} ranks, {one.tokens} tokens"
            after = f"{one.property}: {took}" if one.property else "**survives**"
        rows.append((id, MUTANTS[id].kind, MUTANTS[id].sentence, shown, after))
    yield table(("mutant", "kind", "what is wrong", "killed by", "first kill"), rows)

"""The pytest plugin: `pytest --ringverify my_package.ring:attend` collects a test a property.

It is loaded in every project that has ringverify installed, so importing it imports little, and nothing of torch.
"""

from __future__ import annotations

import pytest

from ringverify.properties.suites import SUITES

OPTIONS = {
    "world": ("simulated|gloo|nccl", "where ranks run (default: what the target declares)"),
    "world_sizes": ("1,2,3", "numbers of ranks"),
    "device": ("DEVICE", "device of the tensors (default: cpu; nccl world: cuda)"),
    "suite": ("|".join(SUITES), "how many examples (default: quick; smoke: at most 10 of each property)"),
    "only": ("ID,…", "these properties only"),
    "skip": ("ID,…", "not these properties"),
    "seed": ("N", "decides which cases are tried (default: 0; nightly: drawn, and told)"),
    "max_examples": ("N", "examples of each property, at most"),
    "time_budget": ("SECONDS", "time for all properties together (with -n: of each worker)"),
    "deadline": ("SECONDS", "time for one run of a case (default: 10, gloo 30)"),
    "load_deadline": ("SECONDS", "time to import an implementation in a process (default: 120)"),
    "cases": ("DIR", "folder for counterexamples (default: .ringverify)"),
    "baseline": ("FILE.toml", "violations that are known: xfailed, and failed if they are gone"),
}
"""Options of `ringverify check`, which the configuration file has as ringverify_world and so on."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("ringverify", "conformance of sequence-parallel attention")
    group.addoption(
        "--ringverify",
        action="append",
        metavar="TARGET",
        help="collect one test a property of this implementation: a built-in name, module:attribute or "
        "path/to/file.py:attribute; may be repeated. Arguments ringverify::TARGET and ringverify::TARGET::PROPERTY "
        "run these tests and no others",
    )
    parser.addini("ringverify_targets", "targets that are checked where no argument says what to run", type="linelist")
    for name, (metavar, text) in OPTIONS.items():
        group.addoption(f"--ringverify-{name.replace('_', '-')}", metavar=metavar, help=text)
        parser.addini(f"ringverify_{name}", text, default="")
    group.addoption("--ringverify-report", metavar="FILE.jsonl", help="write events as JSON lines")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Look at what is asked for, before anything is said or collected."""
    from ringverify.errors import UsageError
    from ringverify.reports.jsonl import ReportError
    from ringverify.testing.asked import in_our_words
    from ringverify.testing.session import RingVerifySession
    from ringverify.words import LINE, cut, legible

    try:
        plugin = RingVerifySession(session.config)
    except (UsageError, ReportError) as error:
        raise pytest.UsageError(f"ringverify: {legible(cut(in_our_words(str(error)), 2 * LINE))}") from None
    session.config.pluginmanager.register(plugin, "ringverify-session")

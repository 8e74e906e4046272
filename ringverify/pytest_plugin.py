"""The pytest plugin: `pytest --ringverify my_package.ring:attend` collects one test for each property.

pytest loads it in every project in which ringverify is installed, so importing it is cheap and does not import torch.
"""

from __future__ import annotations

import pytest

from ringverify.check.option_table import OPTIONS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and settings of ringverify."""
    group = parser.getgroup("ringverify", "conformance of sequence-parallel attention")
    group.addoption(
        "--ringverify",
        action="append",
        metavar="TARGET",
        help="collect one test for each property of this implementation: a built-in name, module:attribute or "
        "path/to/file.py:attribute; may be repeated. Arguments ringverify::TARGET and ringverify::TARGET::PROPERTY "
        "run these tests and no others",
    )
    parser.addini("ringverify_targets", "targets that are checked where no argument says what to run", type="linelist")
    for option in OPTIONS:
        if option.pytest:
            group.addoption(f"--ringverify-{option.key}", metavar=option.pytest_metavar, help=option.pytest_help)
        if option.argument:
            parser.addini(f"ringverify_{option.name}", option.pytest_help, default="")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Read the options and look at the targets, before anything is printed or collected."""
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

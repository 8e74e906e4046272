"""What a case needs in order to fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ringverify.cases.case import Case


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One thing that a case needs in order to fail.

    Attributes:
        text: the requirement in a few words, such as "at least 3 ranks".
        holds: whether a case meets it.
    """

    text: str
    holds: Callable[[Case], bool]


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a counterexample needs in order to fail.

    Attributes:
        requires: what it needs.
        irrelevant: what makes no difference.
        complete: whether everything was tried in the time allowed.
        tried: how many cases were run.
    """

    requires: tuple[Requirement, ...]
    irrelevant: tuple[str, ...]
    complete: bool
    tried: int

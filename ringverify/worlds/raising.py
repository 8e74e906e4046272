"""What a rank raised, as data that can be sent to another process or become a `Failure`.

Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from ringverify.words import TEXT, cut
from ringverify.worlds.exceptions import exit_call, name_of, one_line, text_of
from ringverify.worlds.limits import Limit, limit_of
from ringverify.worlds.stacks import line_of_user, traceback_of_user


class Charge(Exception):
    """Raised by ringverify to report what the implementation did wrong, such as a breach of the contract.

    Args:
        message: what the rank did, to follow "rank 1".
        rule: one word for the rule that it broke, the same for all breaches of one kind.
        tensor: name of the result concerned, if there is one.
    """

    def __init__(self, message: str, *, rule: str, tensor: str | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.tensor = tensor


@dataclasses.dataclass(frozen=True)
class Raising:
    """What a rank raised.

    Attributes:
        what: "raised ValueError: no such thing" or "called sys.exit(3)", to follow "rank 1".
        detail: the rank's traceback; empty for a `Charge`, whose traceback would be ours.
        exception: type of the exception; `None` where the rank ended its process.
        call: the function by which the rank ended its process, if it did.
        rule: that of a `Charge`.
        tensor: that of a `Charge`.
        refusal: the rule by which a transport refused the call, if that is what was raised.
        limit: the machine limit that the rank reached, if it was one.
        line: the innermost line of the user's code, as in `Failure`.
    """

    what: str
    detail: str
    exception: str | None = None
    call: str | None = None
    rule: str | None = None
    tensor: str | None = None
    refusal: str | None = None
    limit: Limit | None = None
    line: str | None = None


def raising_of(error: BaseException) -> Raising:
    """Describe an exception as data. Its class may be the user's: what its methods do is not relied on."""
    kind = type(error)  # `isinstance` would ask the exception's own `__class__`
    if issubclass(kind, Charge):
        charge = cast(Charge, error)
        return Raising(cut(text_of(error) or ""), "", name_of(error), rule=charge.rule, tensor=charge.tensor)
    detail = cut(traceback_of_user(error), TEXT)
    if issubclass(kind, SystemExit):
        return Raising(cut(f"called {exit_call(cast(SystemExit, error))}"), detail, call="sys.exit")
    what = cut(f"raised {one_line(error)}")
    line = line_of_user(error)
    return Raising(what, detail, name_of(error), refusal=refusal_of(error), limit=limit_of(error), line=line)


def marked(error: RuntimeError, rule: str) -> RuntimeError:
    """Mark an error with the name of the rule by which a transport refused the call, and return it."""
    error.refusal = rule  # type: ignore[attr-defined] # a plain RuntimeError, as torch raises, that says why
    return error


def refusal_of(error: BaseException) -> str | None:
    """Return the rule by which a transport refused a call, if this is an error that `marked` marked; else `None`."""
    if type(error) is not RuntimeError:  # `marked` marks no other, and a class of a user's may compute attributes
        return None
    rule = getattr(error, "refusal", None)
    return rule if isinstance(rule, str) else None

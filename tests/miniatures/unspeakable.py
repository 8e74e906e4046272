"""Exceptions that misbehave when somebody asks them what they are, and a program that raises one."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist


class StrRaises(ValueError):
    """Its text raises."""

    def __str__(self):
        raise RuntimeError("no text")


class StrExits(ValueError):
    """Its text ends the interpreter, politely."""

    def __str__(self):
        sys.exit(0)


class StrInterrupts(ValueError):
    """Its text is a Ctrl-C."""

    def __str__(self):
        raise KeyboardInterrupt


class StrReturnsANumber(ValueError):
    """Its text is none."""

    def __str__(self):
        return 7


class StrRecurses(ValueError):
    """Its text is that of itself."""

    def __str__(self):
        return str(self)


class Text(str):
    """A text that can be no part of another one."""

    def _refuse(self, *_):
        raise RuntimeError("no")

    strip = splitlines = lower = split = __format__ = __len__ = __add__ = __reduce__ = _refuse


class StrReturnsAnotherText(ValueError):
    """Its text is of a class of its own, which lets nothing be done with it."""

    def __str__(self):
        return Text("odd")


class ReprRaises(ValueError):
    """It has no representation, and cannot be pickled."""

    def __repr__(self):
        raise RuntimeError("no representation")

    __reduce__ = __reduce_ex__ = __repr__


class ClassRaises(ValueError):
    """Neither `isinstance` nor any attribute has an answer."""

    def __getattribute__(self, name):
        raise RuntimeError("no attributes")

    __str__ = __repr__ = StrRaises.__str__


class Nameless(type):
    """Of a class whose name is a number."""

    __name__ = property(lambda cls: 7)


class NameIsANumber(ValueError, metaclass=Nameless):
    """Its type has no name but its true one."""

    __str__ = StrRaises.__str__


class CauseRaises(ValueError):
    """What led to it is computed, and cannot be."""

    __cause__ = __context__ = __notes__ = property(StrRaises.__str__)  # type: ignore[assignment]


class ExitsInSilence(SystemExit):
    """Ends the interpreter with a code that cannot be shown."""

    code = property(StrRaises.__str__)  # type: ignore[assignment]


class StrLeaves(ValueError):
    """Its text ends the process."""

    def __str__(self):
        os._exit(9)


CANNOT = " (its text cannot be read: __str__ fails)"
SAID = {
    "StrRaises": f"raised StrRaises{CANNOT}",
    "StrExits": f"raised StrExits{CANNOT}",
    "StrInterrupts": f"raised StrInterrupts{CANNOT}",
    "StrReturnsANumber": f"raised StrReturnsANumber{CANNOT}",
    "StrRecurses": f"raised StrRecurses{CANNOT}",
    "StrReturnsAnotherText": "raised StrReturnsAnotherText: odd",
    "ReprRaises": "raised ReprRaises: me",
    "ClassRaises": f"raised ClassRaises{CANNOT}",
    "NameIsANumber": f"raised NameIsANumber{CANNOT}",
    "CauseRaises": "raised CauseRaises: me",
    "ExitsInSilence": "called sys.exit(…)",
}
"""What is to be said of each, by the name of its class."""


def raises(name: str) -> Any:
    """Rank 1 raises it; the others wait for rank 1."""
    if dist.get_rank() == 1:
        raise globals()[name]("me")
    dist.all_reduce(torch.ones(1))


def raises_in_backward(name: str) -> Any:
    """The same, from autograd's engine."""
    one = torch.ones(1, requires_grad=True)
    product = one * 1
    product.register_hook(lambda _: raises(name))
    product.backward()

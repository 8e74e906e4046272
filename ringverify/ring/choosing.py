"""Which method computes a call: on this rank alone, by gathering everything, or hop by hop; and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from ringverify.ring.kernels.kernel import Setting
from ringverify.ring.plan import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Method = Literal["auto", "ring", "allgather", "local"]
METHODS: tuple[Method, ...] = get_args(Method)


class Choice(NamedTuple):
    """A method and the reason in a few words."""

    method: Method
    reason: str


def choose_method(
    plan: Plan,
    setting: Setting,
    group: ProcessGroup | None,
    method: Method,
    memory_budget: int | None,
    bandwidth: float | None,
) -> Choice:
    """The method of a call; the same on every rank, because it depends on what all ranks know.

    Raises:
        ValueError: `local` was asked for, but some rank needs keys of another.
    """
    del setting, group, memory_budget, bandwidth
    if method != "auto":
        return Choice(method, "asked for")
    return Choice("ring", "to be chosen")

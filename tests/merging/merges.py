"""Merges for tests: those of the lab, and wrong ones in ways that are not those of numbers."""

import torch

from ringverify import merge
from ringverify.lab.merge_kills import calls_of
from ringverify.lab.variants_of_merges import CORRECT, INF, WRONG, by_maximum, in_place, in_sixteen_bits
from ringverify.merging.judging import search
from ringverify.merging.properties import PROPERTIES


def violated(merge, *, examples=None, seed=0, only=PROPERTIES):
    """What is found wrong with a merge: pairs of a property and the search that found it."""
    for property in (PROPERTIES[name] for name in only):
        if property.lacks(merge.capabilities) is None:
            found = search(
                property, merge.capabilities, calls_of(merge), examples=examples or property.examples, seed=seed
            )
            if found.case is not None:
                yield property, found


RIGHT = tuple(CORRECT.values())
BROKEN = {id: of_two for id, (of_two, _) in WRONG.items()}


def right(out_a, lse_a, out_b, lse_b):
    """The undecorated right one, for mutants to spoil."""
    return by_maximum.function(out_a, lse_a, out_b, lse_b)


@merge()
def changes_b(out_a, lse_a, out_b, lse_b):
    """Masks what it was given."""
    found = right(out_a, lse_a, out_b, lse_b)
    lse_b.clamp_(min=-1.0)
    return found


@merge(in_place=True, out_layout="bhsd")
def into_the_second(out_a, lse_a, out_b, lse_b):
    """In place, but in the wrong one."""
    in_place.function(out_b, lse_b, out_a, lse_a)
    return out_a, lse_a


@merge(in_place=True)
def not_in_place(out_a, lse_a, out_b, lse_b):
    """Declared in place, and returns new memory."""
    return right(out_a, lse_a, out_b, lse_b)


@merge()
def rounds_lse(out_a, lse_a, out_b, lse_b):
    """In 16 bits, where float32 is declared."""
    out, lse = right(out_a, lse_a, out_b, lse_b)
    return out, lse.bfloat16()


@merge()
def needs_contiguous(out_a, lse_a, out_b, lse_b):
    """Reads the memory of out_b as if it were contiguous."""
    flat = torch.as_strided(out_b, out_b.shape, torch.empty(out_b.shape).stride())
    return right(out_a, lse_a, flat, lse_b)


@merge(dtypes=("bfloat16",))
def in_float32(out_a, lse_a, out_b, lse_b):
    """Returns what it computed in."""
    out, lse = right(out_a, lse_a, out_b, lse_b)
    return out.float(), lse


@merge(dtypes=("float32", "bfloat16"))
def rounds_weights(out_a, lse_a, out_b, lse_b):
    """Weights and sums in the dtype of out, undeclared: in bfloat16 that costs digits."""
    return in_sixteen_bits.function(out_a, lse_a, out_b, lse_b)


@merge(lse_layout="bsh")
def transposed_lse(out_a, lse_a, out_b, lse_b):
    """Returns lse in another layout than it declares."""
    out, lse = right(out_a, lse_a.transpose(1, 2), out_b, lse_b.transpose(1, 2))
    return out, lse


@merge()
def out_only(out_a, lse_a, out_b, lse_b):
    """Declares that it returns lse."""
    return right(out_a, lse_a, out_b, lse_b)[0]


@merge()
def three_values(out_a, lse_a, out_b, lse_b):
    """One too many."""
    return (*right(out_a, lse_a, out_b, lse_b), None)


@merge(gradients=True)
def lse_detached(out_a, lse_a, out_b, lse_b):
    """Its lse has no gradient."""
    out, lse = right(out_a, lse_a, out_b, lse_b)
    return out, lse.detach()


@merge()
def raises(out_a, lse_a, out_b, lse_b):
    """Raises for a row that is empty in both."""
    if ((lse_a == -INF) & (lse_b == -INF)).any():
        raise ValueError("nothing to merge")
    return right(out_a, lse_a, out_b, lse_b)


@merge()
def ends_its_process(out_a, lse_a, out_b, lse_b):
    """Not to be called in a test's own process."""
    import os

    os._exit(3)


@merge()
def never_returns(out_a, lse_a, out_b, lse_b):
    """Waits for ever."""
    import time

    time.sleep(1000)


OTHERWISE = (
    changes_b,
    into_the_second,
    not_in_place,
    needs_contiguous,
    rounds_lse,
    in_float32,
    rounds_weights,
    transposed_lse,
    out_only,
    three_values,
    lse_detached,
    raises,
)
"""Wrong in ways that are not those of numbers."""

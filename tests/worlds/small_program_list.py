"""Several hundred small programs: each call with each dtype, layout, size, reduction and root, and random sequences.

Most are right, the others have one thing wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

from small_programs import PLAIN, Form, Program, Step, times

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64",
    "float8_e4m3fn",
)  # fmt: skip
OPERATORS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
COLLECTIVES = (
    *REDUCING, "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all",
    "all_to_all_single",
)  # fmt: skip
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
FUNCTIONAL = ("functional_all_reduce", "functional_all_gather", "functional_reduce_scatter", "functional_all_to_all")


def everywhere(name: str, *steps: Step, size: int) -> Program:
    """Every rank does the same."""
    return Program(name, (steps,) * size)


def ring(
    name: str,
    *,
    size: int,
    form: Form = PLAIN,
    into: Form | None = None,
    tags: tuple[int, int] = (0, 0),
    way: str = "i",
) -> Program:
    """Every rank sends to the right and receives from the left.

    Args:
        name: what it is about.
        size: number of ranks.
        form: what is sent.
        into: what it is received into.
        tags: of the send and of the receive.
        way: "i" for isend and irecv, "batched " for batches, "" for blocking calls, even ranks first.
    """
    ranks = []
    for rank in range(size):
        call = "i" if way == "i" else way
        prefix = call if call != "batched " else "batched i"
        send = Step(f"{prefix}send", form, peer=(rank + 1) % size, tag=tags[0])
        receive = Step(f"{prefix}recv", into or form, peer=(rank - 1) % size, tag=tags[1])
        both = (send, receive) if rank % 2 == 0 else (receive, send)
        ranks.append((*both, Step("wait")) if way else both)
    return Program(name, tuple(ranks))


def changed(program: Program, rank: int, at: int, **changes: Any) -> Program:
    """One step of one rank is another."""
    steps = list(program.steps[rank])
    steps[at] = steps[at].but(**changes)
    return dataclasses.replace(program, steps=(*program.steps[:rank], tuple(steps), *program.steps[rank + 1 :]))


def systematic() -> Iterator[Program]:
    """Each call with each dtype, layout, size and reduction, then each with one thing wrong."""
    yield from _messages()
    yield from _collectives()


def _messages() -> Iterator[Program]:
    for dtype in DTYPES:
        yield ring(f"ring of {dtype}", size=2, form=Form(dtype=dtype))
    for size, way in itertools.product((2, 3, 4), ("i", "batched ")):
        yield ring(f"{way}ring of {size}", size=size, way=way)
    yield ring("blocking ring of 4", size=4, way="")
    yield ring("blocking ring of 3", size=3, way="")
    for layout in ("transposed", "gaps", "expanded"):
        yield ring(f"send {layout}", size=2, form=Form((2, 3), layout=layout), into=Form((2, 3)))
        yield ring(f"receive {layout}", size=2, form=Form((2, 3)), into=Form((2, 3), layout=layout))
    for shape in ((), (0,), (0, 3), (1,), (2, 0, 2)):
        yield ring(f"ring of shape {shape}", size=2, form=Form(shape))
    yield ring("flat into shaped", size=2, form=Form((6,)), into=Form((2, 3)))
    yield ring("a longer buffer", size=2, form=Form((3,)), into=Form((5,)))
    yield ring("a shorter buffer", size=2, form=Form((5,)), into=Form((3,)))
    yield ring("nothing into a buffer", size=2, form=Form((0,)), into=Form((3,)))
    yield ring("something into no buffer", size=2, form=Form((3,)), into=Form((0,)))
    yield ring("float32 into int32", size=2, form=Form((4,)), into=Form((4,), "int32"))
    yield ring("float32 into float64 of as many", size=2, form=Form((4,)), into=Form((4,), "float64"))
    yield ring("float32 into bfloat16 of as many bytes", size=2, form=Form((2,)), into=Form((4,), "bfloat16"))
    yield ring("tag 7", size=2, tags=(7, 7))
    yield ring("tags that differ", size=2, tags=(7, 8))
    for tag in (-1, 2**31, 2**32 + 1, 2**40):
        yield ring(f"tag {tag}", size=2, tags=(tag, tag))
    for size, way in itertools.product((1, 2), ("isend", "irecv", "send", "recv", "batched isend", "batched irecv")):
        for shape in ((4,), (0,)):
            step = Step(way, Form(shape))
            steps = tuple((step.but(peer=rank),) for rank in range(size))
            yield Program(f"{way} {shape} to itself in a world of {size}", steps)
    for way in ("i", "batched "):
        yield ring(f"{way}ring of one", size=1, way=way)
    for rank, way, by in itertools.product((-1, 2, 5), ("isend", "irecv"), (False, True)):
        yield everywhere(f"{way} with peer {rank}", Step(way, peer=rank, by_group_rank=by), size=2)
    anyone = ring("receive from anyone", size=2, way="i")
    yield changed(anyone, 0, 1, peer=None)
    yield changed(ring("blocking receive from anyone", size=2, way=""), 1, 0, peer=None)
    out_of_order = [(Step("isend", peer=1, tag=1), Step("isend", Form((2,)), peer=1, tag=2), Step("wait"))]
    out_of_order += [(Step("recv", Form((2,)), tag=2), Step("recv", tag=1))]
    yield Program("tags out of order", tuple(out_of_order))
    yield Program("nobody sends", ((Step("irecv", peer=1), Step("wait")), ()))
    yield Program("both receive first", ((Step("recv", peer=1), Step("send", peer=1)), (Step("recv"), Step("send"))))
    yield Program("one rank does nothing", ((Step("all_reduce"),), ()))
    sub = ring("a ring in a sub-group", size=2)
    yield Program("a ring in a sub-group", ((), *sub.steps), (1, 2))
    by_group = [tuple(step.but(by_group_rank=True) for step in steps) for steps in sub.steps]
    yield Program("a ring in a sub-group by group ranks", (by_group[0], (), by_group[1]), (0, 2))
    outside = changed(sub, 0, 0, peer=2, by_group_rank=True)
    yield Program("a peer outside the sub-group", ((), *outside.steps), (1, 2))
    alone = ((Step("isend", peer=0, by_group_rank=True),), ())
    yield Program("to itself in a sub-group of one", alone, (0,))


def _collectives() -> Iterator[Program]:
    for call, dtype in itertools.product(COLLECTIVES, DTYPES):
        yield everywhere(f"{call} of {dtype}", Step(call, Form((2, 2), dtype)), size=2)
    for call, operator in itertools.product(REDUCING, OPERATORS):
        for dtype in ("float32", "int32", "bool", "bfloat16"):
            if operator != "SUM":
                form = Form((2, 2), dtype)
                yield everywhere(f"{call}({operator}) of {dtype}", Step(call, form, operator=operator), size=2)
    for call, layout in itertools.product(COLLECTIVES, ("transposed", "gaps", "expanded")):
        form, strange = Form((2, 3)), Form((2, 3), layout=layout)
        yield everywhere(f"{call} of {layout}", Step(call, strange), size=2)
        if call not in ("all_reduce", "reduce", "broadcast"):
            yield everywhere(f"{call} from {layout}", Step(call, strange, _output_of(call, form, 2)), size=2)
            yield everywhere(f"{call} into {layout}", Step(call, form, _output_of(call, strange, 2)), size=2)
        else:
            program = everywhere(f"{call} with {layout} on rank 1", Step(call, form), size=2)
            yield changed(program, 1, 0, form=strange)
    for call, shape in itertools.product(COLLECTIVES, ((), (0,), (0, 3), (3, 0))):
        yield everywhere(f"{call} of shape {shape}", Step(call, Form(shape)), size=2)
    for call, size in itertools.product((*COLLECTIVES, *OBJECTS, *FUNCTIONAL, "barrier"), (1, 3)):
        yield everywhere(f"{call} on {size}", Step(call, Form((2, 2)), root=size - 1), size=size)
    for call in (*ROOTED, *OBJECTS[1:]):
        for root in (-1, 2):
            yield everywhere(f"{call} with root {root}", Step(call, root=root), size=2)
        yield everywhere(f"{call} by group rank", Step(call, root=1, by_group_rank=True), size=2)
        steps = (Step(call, root=1),)
        yield Program(f"{call} in a sub-group", ((), steps, steps), (1, 2))
        yield changed(everywhere(f"{call} with roots that differ", Step(call), size=2), 1, 0, root=1)
    for call, wrong in itertools.product(COLLECTIVES, (Form((3, 2)), Form((2, 2), "float64"), Form((2, 2), "int32"))):
        program = everywhere(f"{call}, rank 1 has {wrong}", Step(call, Form((2, 2))), size=2)
        yield changed(program, 1, 0, form=wrong)
        if call not in ("all_reduce", "reduce", "broadcast"):
            yield everywhere(f"{call} into {wrong}", Step(call, Form((2, 2)), _output_of(call, wrong, 2)), size=2)
    for call in ("all_gather", "gather", "all_gather_into_tensor"):
        flat, form = Form((4,)), Form((2, 2))
        yield everywhere(f"{call} into flat", Step(call, form, _output_of(call, flat, 2)), size=2)
    yield everywhere("gathered, stacked", Step("all_gather_into_tensor", Form((2, 2)), Form((2, 2, 2))), size=2)
    yield everywhere("gathered, all flat", Step("all_gather_into_tensor", Form((2, 2)), Form((8,))), size=2)
    yield everywhere("reduced, scattered flat", Step("reduce_scatter_tensor", Form((2, 2)), Form((4,))), size=2)
    lists = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
    for call, count in itertools.product(lists, (0, 1, 3)):
        yield everywhere(f"{call} of {count} on 2 ranks", Step(call, count=count), size=2)
    yield everywhere("objects of 1 on 2 ranks", Step("all_gather_object", count=1), size=2)
    single = Step("all_to_all_single", Form((2,)))
    for sizes in ((3, 1), (4, 0), (4,), (2, 2, 0)):
        yield everywhere(f"split {sizes}", single.but(splits=(sizes, sizes)), size=2)
    for sizes in ((1, 1), (5, -1)):
        yield everywhere(f"split {sizes}", single.but(splits=(sizes, (2, 2))), size=2)
    uneven = (
        single.but(other=Form((6,)), splits=((3, 1), (3, 3))),
        single.but(other=Form((2,)), splits=((3, 1), (1, 1))),
    )
    yield Program("uneven splits", tuple((step,) for step in uneven))
    yield everywhere("not in equal parts", Step("all_to_all_single", Form((1,)), Form((3,))), size=2)
    for call, other in itertools.combinations(("all_reduce", "broadcast", "all_gather", "barrier", "all_to_all"), 2):
        yield Program(f"{call} meets {other}", ((Step(call),), (Step(other),)))
    operators = everywhere("reductions that differ", Step("all_reduce"), size=2)
    yield changed(operators, 1, 0, operator="MAX")


def _output_of(call: str, form: Form, size: int) -> Form:
    return times(form, size) if call in ("all_gather_into_tensor", "all_to_all_single") else form


def mixed(seed: int) -> Program:
    """A random sequence of right calls, with one thing wrong in every third."""
    draw = random.Random(seed)
    size = draw.randint(2, 4)
    ranks: list[list[Step]] = [[] for _ in range(size)]
    for _ in range(draw.randint(2, 4)):
        form = Form(draw.choice(((4,), (2, 3), (1,), (0,))), draw.choice(DTYPES[:5]))
        kind = draw.randrange(3)
        if kind == 0:
            tag, way = draw.randrange(3), draw.choice(("i", "batched "))
            for steps, more in zip(ranks, ring("", size=size, form=form, tags=(tag, tag), way=way).steps, strict=True):
                steps += more
        else:
            step = Step(draw.choice(COLLECTIVES), form, root=draw.randrange(size), by_group_rank=draw.random() < 0.5)
            for steps in ranks:
                steps.append(step)
    if seed % 3 == 0:
        rank, at = draw.randrange(size), draw.randrange(len(ranks[0]))
        step = ranks[rank][at]
        changes: tuple[dict[str, Any], ...] = (
            {"form": Form((5,), step.form.dtype)},
            {"form": Form((2, 3), layout="gaps")},
            {"peer": rank, "by_group_rank": True},
            {"tag": 9},
        )
        ranks[rank][at] = step.but(**draw.choice(changes))
    return Program(f"mixed {seed}", tuple(tuple(steps) for steps in ranks))


PROGRAMS = tuple(systematic())

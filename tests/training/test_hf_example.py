"""The example that puts a Hugging Face model on a ring: one process's numbers, and what such models get wrong there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import EXAMPLES, module_of, printed

from ringref.rounding import scaled_bound
from ringverify.ring import position_ids, ring_sdpa, shard
from ringverify.worlds.simulated import SimulatedWorld

EXAMPLE = EXAMPLES / "hf_model.py"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def example() -> Any:
    """The example as a module."""
    return module_of(EXAMPLE)


def reported(text: str) -> list[tuple[str, str, list[float], list[float]]]:
    """dtype, sharding, what the ring is off by, and what rounding is; logits and gradients each."""
    found = re.findall(
        r"^(\w+) (\w+) \d+ ranks: logits (\S+), gradients (\S+)\n"
        r"\1 one process, rounding: logits (\S+), gradients (\S+)$",
        text,
        re.MULTILINE,
    )
    return [(dtype, sharding, [*map(float, rest[:2])], [*map(float, rest[2:])]) for dtype, sharding, *rest in found]


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (4, [str(EXAMPLE)]),
        (2, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]),
    ],
)
def test_shards_in_are_one_process_s_numbers_out(ranks: int, command: list[str]) -> None:
    """Logits and every parameter's gradient, in float32 and bfloat16, contiguous and zigzag, to rounding."""
    text = printed(*command)
    assert f"zigzag {ranks} ranks" in text
    results = reported(text)
    assert {result[:2] for result in results} == {
        (dtype, sharding) for dtype in ("float32", "bfloat16") for sharding in ("contiguous", "zigzag")
    }
    for dtype, _, ring, rounding in results:
        for off, error in zip(ring, rounding, strict=True):
            assert 0 < off <= scaled_bound(error, dtype, dtype)


def test_attention_within_the_shards_is_told_from_rounding(example: Any) -> None:
    """The gate can close: the same model on two halves of the text, without the context."""
    model, (tokens, labels) = example.build(torch.float32), example.text()
    one = example.alone(model)
    model.zero_grad()
    exact = example.alone(example.build(torch.float32).double())
    places = torch.arange(example.LENGTH)[None]
    halves = [
        model(input_ids=tokens[:, half], position_ids=places[:, half]).logits
        for half in (slice(0, 31), slice(31, None))
    ]
    logits = torch.cat(halves, dim=1)
    example.summed_loss(logits, labels).backward()
    wrong = example.off([logits.detach(), *(p.grad for p in model.parameters())], one)
    for off, error in zip(wrong, example.off(one, exact), strict=True):
        assert off > scaled_bound(error, "float32", "float32")


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
def test_a_mask_that_the_model_makes_of_its_shard_is_refused_on_every_rank(example: Any, sharding: str) -> None:
    """Two pieces with a gap between their positions look like two documents; only rank 0 of 2 has a gap in a zigzag."""
    tokens, _ = example.text()

    def program(_: None) -> str:
        model = example.build(torch.float32)
        here = shard(tokens, sharding=sharding)
        places = position_ids(example.LENGTH, sharding=sharding)[None]
        try:
            with ring_sdpa(sharding=sharding, length=example.LENGTH):
                model(input_ids=here, position_ids=places, use_cache=False)
        except ValueError as error:
            return str(error)
        return "computed"

    run = SimulatedWorld().run(program, None, world_size=2, seed=0, deadline=100)
    assert run.failure is None, run.failure.detail
    assert not dist.is_initialized()
    if sharding == "contiguous":
        assert run.results == ("computed", "computed")
    else:
        assert all("attention_mask=torch.ones_like(input_ids)" in message for message in run.results)


def test_a_model_that_attends_elsewhere_is_told_so(example: Any) -> None:
    """`attn_implementation="eager"` would attend within the shard, and nobody would hear of it."""
    model = example.build(torch.float32)
    model.set_attn_implementation("eager")
    with pytest.warns(UserWarning, match="attn_implementation='sdpa'"), ring_sdpa():
        model(input_ids=example.text()[0])

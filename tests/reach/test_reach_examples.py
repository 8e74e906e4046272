"""The models of `docs/examples` that `docs/reach.md` names: what is found in those that are wrong, and in no other."""

from pathlib import Path

import pytest

from ringverify.reach import run
from ringverify.reach.run import ReachOptions, reach
from ringverify.worlds.simulated import SimulatedWorld

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
OWN_SHARD = "each rank attends only to its own shard"


def found_in(example, **options):
    """Kinds of findings, and the causes without their line."""
    result = reach(ReachOptions(f"{EXAMPLES / example}", deadline=100.0, **options))
    return [one.kind for one in result.findings], [cause.partition(" (at")[0] for cause in result.causes]


@pytest.mark.parametrize(
    ("name", "kinds", "causes"),
    [
        ("ring", [], []),
        ("ring_of_four_layers", [], []),
        ("shard_only", ["lost", "values", "silent"], [OWN_SHARD]),
        ("mask_dropped", ["leaked", "values", "gradients"], ["the causal mask is dropped"]),
        ("documents_dropped", ["leaked", "values", "gradients"], ["the documents are dropped"]),
        ("local_positions", ["values", "gradients"], ["positions count from the rank's own first token"]),
        ("mean_of_means", ["loss", "gradients"], ["the loss is a mean of means over unequal shards"]),
    ],
)
def test_our_ring_in_a_model(name, kinds, causes, monkeypatch):
    """Right, and with each fault that people report."""
    monkeypatch.setattr(run, "ContainedWorld", SimulatedWorld)
    assert found_in(f"reach_models.py:{name}") == (kinds, causes)


FAULTS = {
    "mask_dropped": (["leaked", "values", "gradients"], ["the causal mask is dropped"]),
    "shard_only": (["lost", "values", "silent"], [OWN_SHARD]),
    "local_positions": (["values", "gradients"], ["positions count from the rank's own first token"]),
    "mean_of_means": (["loss", "gradients"], ["the loss is a mean of means over unequal shards"]),
}


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("package", ["torch", "yunchang"])
def test_published_context_parallelism_with_each_fault_that_people_report(name, package, monkeypatch):
    """Found, and named."""
    pytest.importorskip(package)
    monkeypatch.setattr(run, "ContainedWorld", SimulatedWorld)
    assert found_in(f"reach_published.py:{package}_{name}") == FAULTS[name]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "package", "kinds", "causes"),
    [
        ("torch_zigzag", "torch", [], []),
        ("torch_taken_for_zigzag", "torch", ["leaked", "lost", "values", "gradients"],
         ["the mask takes the shards for zigzag"]),
        ("ring_transformer", "ring_attention_pytorch", ["gradients"], []),
        ("ring_transformer_local_positions", "ring_attention_pytorch", ["values", "gradients"],
         ["positions count from the rank's own first token"]),
        ("ring_transformer_shard_only", "ring_attention_pytorch", ["lost", "values", "gradients"], [OWN_SHARD]),
        ("ring_transformer_mask_dropped", "ring_attention_pytorch", *FAULTS["mask_dropped"]),
        ("ring_transformer_mean_of_means", "ring_attention_pytorch", *FAULTS["mean_of_means"]),
        ("yunchang_ulysses", "yunchang", [], []),
        ("flux_ulysses", "diffusers", [], []),
        ("flux_forgotten", "diffusers", ["silent"], ["context parallelism did not happen"]),
    ],
)  # fmt: skip
def test_published_context_parallelism_in_a_model(name, package, kinds, causes):
    """Right, but for gradients that are known to be wrong; and with each fault."""
    pytest.importorskip(package)
    assert found_in(f"reach_published.py:{name}") == (kinds, causes)

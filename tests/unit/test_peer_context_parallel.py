"""Adapters of torch's context parallelism, diffusers, DeepSpeed and dilated-attention-pytorch, a few examples of each.

Where a package is right the adapter must be, and what the package gets wrong is known, and found.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch
from hunts import hunted, loaded
from torch.nn.attention.flex_attention import create_block_mask

from ringref.sharding import key_positions
from ringverify.errors import Inconclusive
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import BUILT_IN, load
from ringverify.worlds.processes.gloo import GlooWorld

pytestmark = pytest.mark.timeout(120)

TORCH = [name for name in BUILT_IN if name.startswith("peer:torch-cp")]
DIFFUSERS = [name for name in BUILT_IN if name.startswith("peer:diffusers")]
DEEPSPEED = [name for name in BUILT_IN if name.startswith("peer:deepspeed")]
LOST_GRADIENTS = "peer:diffusers-ring"
SHIFTED_MASK = "peer:diffusers-ulysses-anything"
DILATED = "peer:dilated-attention-pytorch"


@pytest.fixture(scope="module")
def processes() -> Iterator[GlooWorld]:
    """One world of processes for all that need one."""
    world = GlooWorld()
    yield world
    world.close()


@pytest.mark.parametrize("target", [*TORCH, *DIFFUSERS])
@pytest.mark.by_day(1)
def test_the_forward_pass_is_right(target: str) -> None:
    """Out and, where it is returned, the log-sum-exp, of any scale and any number of ranks that is declared."""
    found = hunted(loaded(target), "lse" if loaded(target).capabilities.lse else "forward", 24)
    wrong = None if found.counterexample is None else found.counterexample.case.problem
    assert (wrong is None) == (target != SHIFTED_MASK)
    if wrong is not None:
        assert wrong.key_lengths is not None


def test_meshes_are_made_once() -> None:
    """Rings within Ulysses need groups of some of the ranks: those of an adapter are no fault of the package."""
    assert hunted(loaded("peer:diffusers-unified"), "reentrancy", 2).counterexample is None


@pytest.mark.parametrize("target", [name for name in (*TORCH, *DIFFUSERS) if not name.endswith("anything")])
@pytest.mark.by_day(2)
def test_gradients_are_right_but_for_one(target: str) -> None:
    """The ring of diffusers loses dk and dv from three ranks on; its two ranks within `unified` are right."""
    found = hunted(loaded(target), "gradients", 12).counterexample
    assert (found is None) == (target != LOST_GRADIENTS)
    if found is not None:
        assert found.case.world_size == 3
        assert found.violation.finding is not None
        assert found.violation.finding.tensor in ("dk", "dv")


def test_a_block_mask_is_read_block_by_block_and_pair_by_pair() -> None:
    """What its function allows, in blocks that it lists; another block is not attended."""
    loaded("peer:torch-cp-flex-documents")  # skipped where torch is another one
    adapter = importlib.import_module("ringverify.peers.torch_context_parallel")
    causal = torch.ones(256, 256, dtype=torch.bool).tril()
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 256, 256, device="cpu")
    assert torch.equal(adapter._allowed(mask, 256, 256)[0, 0], causal)
    mask.full_kv_num_blocks.zero_()  # of the block below the diagonal
    causal[128:, :128] = False
    assert torch.equal(adapter._allowed(mask, 256, 256)[0, 0], causal)


def test_the_balancer_of_documents_is_a_permutation_that_its_restore_indices_undo(monkeypatch) -> None:
    """As torch gives both; indices that do not restore the order would be found."""
    peer = loaded("peer:torch-cp-flex-documents-balanced")
    assert hunted(peer, "balance", 20).counterexample is None
    adapter = importlib.import_module("ringverify.peers.torch_context_parallel")
    indices = adapter._cp._PerDocumentHeadTailLoadBalancer._generate_indices
    monkeypatch.setattr(
        adapter._cp._PerDocumentHeadTailLoadBalancer, "_generate_indices", lambda self, restore=False: indices(self)
    )
    found = hunted(peer, "balance", 20).counterexample
    assert found is not None
    assert found.violation.reason == ("inverse", "order")


def test_the_balancer_of_documents_gives_whole_documents_to_the_first_ranks() -> None:
    """Where its documentation draws head and tail of each document on every rank: a figure, and no claim to break."""
    peer = loaded("peer:torch-cp-flex-documents-balanced")
    balanced = peer.capabilities.shardings[1]
    held = [rows.tolist() for rows in key_positions(balanced, 16, 2, (0, 4, 12, 16))]
    assert held == [[0, 3, 1, 2, 4, 5, 10, 11], [6, 7, 8, 9, 12, 15, 13, 14]]
    assert peer.capabilities.balance is None
    (figure,) = PROPERTIES["balance"].figures(peer.capabilities)
    assert figure.startswith("per_document: of 3 ranks, the busiest has 1.")


def test_rows_that_no_pair_needs_may_hold_anything() -> None:
    """A query without keys is 0, and NaN in padding reaches neither the output nor a gradient."""
    loaded("peer:torch-cp-flex-documents")  # skipped where torch is another one
    adapter = importlib.import_module("ringverify.peers.torch_context_parallel")
    q, k, v = torch.randn(3, 1, 1, 3, 4)
    for tensor in (q, k, v):
        tensor[..., 2, :] = torch.nan
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    mask = torch.ones(3, 3, dtype=torch.bool).tril() & (torch.arange(3) < 2) & (torch.arange(3)[:, None] < 2)
    out = adapter._DenseFlex()(*leaves, mask[None, None], 0.5)
    out.sum().backward()
    right = adapter.attention(*(x[..., :2, :] for x in leaves), mask=mask[:2, :2], scale=0.5)
    assert torch.equal(out[..., :2, :], right)
    assert not out[..., 2, :].any()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("target", DEEPSPEED)
def test_deepspeed_is_right_in_processes(target: str, processes: GlooWorld) -> None:
    """Key heads that the ranks divide, that they do not divide, and fewer than there are ranks."""
    assert hunted(loaded(target), "gradients", 12, world=processes, target=target).counterexample is None


def test_a_normalised_sum_is_no_attention() -> None:
    """dilated-attention-pytorch divides by the sum of outputs: the only value of one position comes out as 1."""
    found = hunted(loaded(DILATED), "forward", 4).counterexample
    assert found is not None
    assert (found.case.problem.nq, found.case.problem.head_dim) == (1, 1)
    assert found.violation.finding is not None
    assert found.violation.finding.actual == 1


def test_no_stand_in_stays_behind() -> None:
    """Who imports xformers later gets what is installed."""
    hunted(loaded(DILATED), "forward", 1)
    assert not [name for name in sys.modules if name.partition(".")[0] == "xformers"]


@pytest.mark.parametrize("target", [name for name in DIFFUSERS if name.endswith("anything")])
def test_a_package_that_needs_an_accelerator_that_is_missing_is_not_judged(target: str, monkeypatch) -> None:
    """It would raise in every case on a machine whose torch was built for GPUs and that has none: no fault of its."""
    loaded(target)  # skipped where the package is missing
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(Inconclusive, match="exchanges lengths on cuda, for which this torch was built"):
        load(target)

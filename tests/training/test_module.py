"""`RingAttention`: the function, configured once; what its copies and pickles keep, and what they cannot."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ringverify.ring import RingAttention, ring_attention, shard
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(60)


def on_ranks(program, world_size):
    """What `program()` returns on each rank of a simulated world."""
    run = SimulatedWorld().run(lambda _: program(), None, world_size=world_size, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    return run.results


def inputs(length=5):
    """q, k and v, whole: `(2, length, 4 or 2, 3)`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, heads, 3, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]


def test_the_module_takes_what_the_function_takes_with_the_same_defaults():
    """Settings on construction, what differs from call to call in forward; nothing else, and nothing missing."""
    function = inspect.signature(ring_attention).parameters
    settings = dict(inspect.signature(RingAttention).parameters)
    called = dict(inspect.signature(RingAttention.forward).parameters)
    del called["self"]
    assert not set(settings) & set(called)
    assert set(settings) | set(called) == set(function)
    assert {name: p.default for name, p in (settings | called).items()} == {n: p.default for n, p in function.items()}
    assert set(RingAttention().settings) == set(settings) - {"group"}


def test_the_module_computes_what_the_function_computes():
    """Bit for bit, with settings, with lengths, with documents, on every rank."""

    def program():
        attend = RingAttention(sharding="zigzag", causal=True, softcap=2.0, return_lse=True)
        q, k, v = (shard(x, sharding="zigzag") for x in inputs())
        lengths = {"query_length": 5, "key_length": 5, "documents": [0, 2, 5]}
        ours = attend(q, k, v, **lengths)
        theirs = ring_attention(q, k, v, sharding="zigzag", causal=True, softcap=2.0, return_lse=True, **lengths)
        return all(map(torch.equal, ours, theirs))

    assert on_ranks(program, 2) == (True, True)


def test_it_has_no_parameters_and_no_state():
    """It can take the place of the attention of a trained model."""
    model = nn.Sequential(nn.Linear(2, 2), RingAttention())
    assert list(RingAttention().parameters()) == list(RingAttention().buffers()) == []
    assert set(model.state_dict()) == {"0.weight", "0.bias"}


def test_its_text_shows_what_is_not_default():
    """And nothing else."""

    def program():
        mesh = init_device_mesh("cpu", (2,))
        return [repr(RingAttention(group=group, causal=True)) for group in (mesh, mesh.get_group())]

    assert repr(RingAttention()) == "RingAttention()"
    assert repr(RingAttention(sharding="striped", window=(4, 0))) == "RingAttention(sharding=striped, window=(4, 0))"
    of_mesh, of_group = on_ranks(program, 2)[0]
    assert of_mesh == "RingAttention(causal=True, group=DeviceMesh of 2 ranks)"
    assert of_group.endswith("of 2 ranks)")


@pytest.mark.parametrize("as_mesh", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda module: copy.deepcopy(nn.ModuleList([module]))[0]])
def test_a_copy_shares_the_group(copied, as_mesh):
    """Connections cannot be doubled; settings are."""

    def program():
        mesh = init_device_mesh("cpu", (2,))
        attend = RingAttention(group=mesh if as_mesh else mesh.get_group(), causal=True)
        twin = copied(attend)
        assert twin.group is attend.group
        assert twin.settings == attend.settings
        assert twin.settings is not attend.settings
        q, k, v = (shard(x, group=mesh) for x in inputs())
        return torch.equal(twin(q, k, v, query_length=5, key_length=5), attend(q, k, v, query_length=5, key_length=5))

    assert on_ranks(program, 2) == (True, True)


@pytest.mark.parametrize("as_mesh", [False, True])
def test_a_pickle_keeps_the_settings_and_says_that_the_group_is_missing(as_mesh):
    """It must not run in another group than it was made for; set again, it runs."""

    def program():
        mesh = init_device_mesh("cpu", (2,))
        group = mesh if as_mesh else mesh.get_group()
        model = nn.Sequential(RingAttention(group=group, causal=True))
        model = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model))))
        assert repr(model[0]) == "RingAttention(causal=True, group=left behind by a pickle)"
        q, k, v = (shard(x, group=mesh) for x in inputs())
        with pytest.raises(RuntimeError, match=r"came out of a pickle.*set module\.group"):
            model[0](q, k, v, query_length=5, key_length=5)
        model[0].group = group
        out = model[0](q, k, v, query_length=5, key_length=5)
        return torch.equal(out, ring_attention(q, k, v, group=group, causal=True, query_length=5, key_length=5))

    assert on_ranks(program, 2) == (True, True)


def test_a_module_of_the_default_group_is_saved_whole():
    """There is nothing to leave behind."""
    file = io.BytesIO()
    torch.save(RingAttention(causal=True), file)
    file.seek(0)
    attend = torch.load(file, weights_only=False)
    assert repr(attend) == "RingAttention(causal=True)"
    q, k, v = inputs()
    assert torch.equal(attend(q, k, v), ring_attention(q, k, v, causal=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sharding": "zickzack"}, "sharding='zickzack': expected one of contiguous"),
        ({"softcap": -1.0}, r"softcap=-1\.0: expected a positive number"),
        ({"causal": 1}, "causal=1: expected True or False"),
        ({"dropout_p": 0.1}, "dropout_p=0.1: ring attention has no dropout"),
        ({"layout": "sbhd"}, "layout='sbhd': expected bshd or bhsd"),
    ],
)
def test_a_pattern_that_is_none_is_refused_on_construction(settings, words):
    """Before there is anything to compute."""
    with pytest.raises(ValueError, match=words):
        RingAttention(**settings)


def test_a_mesh_of_two_dimensions_is_refused():
    """It does not say which of them is the ring."""

    def program():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "sequence"))
        with pytest.raises(ValueError, match=r"mesh\[name\]"):
            RingAttention(group=mesh)
        return True

    assert on_ranks(program, 2) == (True, True)

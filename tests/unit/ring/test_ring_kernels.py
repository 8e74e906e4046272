"""Every kernel against the oracle, tile by tile, forward and backward, and what a mask keeps out of it."""

import importlib.util
import itertools
import math
import re

import pytest
import torch
from by_tile import computed, inputs_of, setting_of, worst_margin
from torch.nn.attention import flex_attention as flex_attention_module
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from ringref.problem import DTYPES, Dilation, Problem
from ringverify.ring.kernels import flex
from ringverify.ring.kernels.choose import KERNELS, STREAMING, choose_kernel
from ringverify.ring.kernels.flex import Flex
from ringverify.ring.kernels.kernel import Setting

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
EVERY = [(kernel, device) for device in DEVICES for kernel in KERNELS]
pytestmark = pytest.mark.timeout(300)  # on a GPU flex is compiled for every shape
BY_KERNEL = pytest.mark.parametrize(("kernel", "device"), EVERY, ids=[f"{k.name}-{d}" for k, d in EVERY])

SHAPES = [
    {"heads": 2, "head_dim": 4},
    {"batch": 2, "heads": 4, "key_heads": 2, "head_dim": 3, "value_dim": 10},
    {"heads": 6, "key_heads": 1, "head_dim": 8, "value_dim": 2},
    {"heads": 2, "head_dim": 4, "scale": -0.7},
    {"heads": 2, "key_heads": 1, "head_dim": 4, "scale": 0.0},
    {"head_dim": 1},
]
MASKS = {
    "none": ({"query_length": 7, "key_length": 11}, ((5,), (4,)), {"none"}),
    "causal": ({"query_length": 9, "causal": True}, ((), ()), {"causal"}),
    "causal in tiles": ({"query_length": 9, "causal": True}, ((3, 5), (3, 5)), {"causal", "none"}),
    "rows of nothing": ({"query_length": 12, "key_length": 5, "window": (2, 1)}, ((4,), (3,)), {"bias"}),
    "padding": ({"query_length": 6, "batch": 3, "key_lengths": (2, 0, 5)}, ((), (3,)), {"bias"}),
    "counted": (
        {"query_length": 9, "dilation": Dilation(((4, 1), (3, 2), (9, 1)), heads="shared"), "causal": True},
        ((5,), (6,)),
        {"bias", "none"},
    ),
}
"""Fields of a problem, where tiles end, and the kinds of masks that they have."""


def runs(kernel, problem, device):
    """Whether a kernel computes such a problem there."""
    return kernel.why_not(setting_of(problem, device)) is None


def agrees(kernel, problem, device, cuts, **inputs):
    """Whether all results are within what rounding allows; `None` where the kernel cannot compute it."""
    if not runs(kernel, problem, device):
        return None
    given = inputs_of(problem, device=device, **inputs)
    results, kinds = computed(kernel, problem, given, cuts)
    margin = worst_margin(problem, given, results)
    assert margin <= 1, (kernel.name, problem, margin)
    return kinds


@BY_KERNEL
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_merged_are_attention(kernel, device, dtype):
    """Every shape under every mask, with a cotangent of lse and without, in every dtype that the kernel takes."""
    for shape in SHAPES:
        for fields, cuts, kinds in MASKS.values():
            for dlse in (True, False):
                if "bias" not in kinds or kernel.takes_bias:
                    found = agrees(kernel, Problem(**{**shape, **fields}, dtype=dtype), device, cuts, dlse=dlse)
                    assert found is None or found <= kinds


@BY_KERNEL
def test_softcap_is_computed_where_it_is_known(kernel, device):
    """With every mask; the others say no."""
    computes = False
    for fields, cuts, kinds in MASKS.values():
        if "bias" in kinds and not kernel.takes_bias:
            continue
        problem = Problem(**{"heads": 4, "key_heads": 2, "head_dim": 4, "softcap": 1.5, **fields})
        computes |= agrees(kernel, problem, device, cuts, size=2.0) is not None
    assert computes == (kernel.name == "streaming" or (device == "cuda" and kernel.name == "flex_cuda"))


def flex_by_definition(q, k, v, *, score_mod, scale, enable_gqa, return_aux):
    """What `flex_attention` is documented to compute, and refuses when it is lowered for a CUDA device."""
    assert return_aux == AuxRequest(lse=True)
    assert q.size(0) == k.size(0) == v.size(0)
    assert k.shape[1:3] == v.shape[1:3]
    assert q.size(3) == k.size(3)
    assert min(q.size(3), v.size(3)) >= 16, "NYI: embedding dimension of the query, key, and value must be at least 16"
    assert enable_gqa or q.size(1) == k.size(1)
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.size(2))), indexing="ij")
    s = score_mod(q @ k.transpose(2, 3) * scale, b, h, i, j)
    return s.softmax(dim=-1) @ v, AuxOutput(lse=s.logsumexp(dim=-1))


@pytest.fixture
def flex_uncompiled(monkeypatch):
    """The definition in place of the op, uncompiled."""
    monkeypatch.setattr(flex_attention_module, "flex_attention", flex_by_definition)
    monkeypatch.setattr(flex, "compiled", flex.written)


@pytest.mark.parametrize("dims", [(8, 8), (3, 20), (24, 5), (64, 64)])
def test_the_arithmetic_around_flex_is_right(flex_uncompiled, dims):
    """The chain rule through merged weights, where the op itself is the definition; it is chosen on CUDA alone."""
    for name in ("none", "causal", "causal in tiles"):
        fields, cuts, _ = MASKS[name]
        for softcap, dlse in itertools.product((None, 2.0), (True, False)):
            shape = {"heads": 4, "key_heads": 2, "head_dim": dims[0], "value_dim": dims[1]}
            problem = Problem(**shape, softcap=softcap, **fields)
            given = inputs_of(problem, dlse=dlse)
            assert worst_margin(problem, given, computed(Flex(), problem, given, cuts)[0]) <= 1, (name, softcap)


def graphs_of(function, *calls):
    """What dynamo hands to a compiler for some calls: inputs of a graph, and those of its score function."""
    found = []

    def noted(graph, inputs):
        scores = graph.score_mod_0.graph.nodes
        found.append((inputs, sum(node.op == "placeholder" for node in scores)))
        return graph.forward

    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=noted)
    for call in calls:
        compiled(*call)
    return found


def given_flex(rows, keys):
    """q, k and v of one call."""
    return torch.randn(1, 2, rows, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)


def written(softcap, scale, causal, *call):
    """The function that is compiled for such a call."""
    return flex.written(softcap, scale, causal, flex.kind_of(*call))


def scalars_of(function, *call):
    """How many 0-dim tensors a graph and its score function are given; `None` if dynamo gives up."""
    try:
        ((inputs, placeholders),) = graphs_of(function, call)
    except torch._dynamo.exc.TorchRuntimeError:
        return None
    scalars = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 0]
    return len(scalars) + placeholders - 5


def test_a_softcap_is_a_literal_of_the_kernel():
    """As a value of a closure it is a 0-dim tensor on CPU among the inputs of the graph, which a GPU cannot load."""
    softcap = 3.0

    def closure(q, k, v):
        return flex_attention_module.flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: softcap * torch.tanh(s / softcap)
        )

    given = given_flex(40, 50)
    assert scalars_of(written(3.0, 0.25, True, *given), *given) == 0
    assert scalars_of(closure, *given) != 0


def test_flex_stays_compiled_however_many_settings_there_are():
    """Dynamo counts by code: with code in common the ninth setting would run with all scores in memory."""
    given = given_flex(40, 50)
    with torch._dynamo.config.patch(recompile_limit=1):
        for softcap in (1.0, 2.0, 3.0):
            assert len(graphs_of(written(softcap, 0.25, True, *given), given)) == 1
        lengths = [given_flex(rows, rows + 1) for rows in (30, 40, 50, 60)]
        assert len(graphs_of(written(None, 0.5, False, *given), *lengths)) == 1
    kind = flex.kind_of(*given)
    assert flex.compiled(2.0, 0.25, True, kind) is flex.compiled(2.0, 0.25, True, kind)


def test_flex_stays_compiled_however_many_kinds_of_inputs_there_are():
    """For each of them dynamo compiles anew, and counts that by code too: none shares a function with another."""
    device, calls = DEVICES[-1], {}  # on a CPU, flex has no backward
    for batch, heads, key_heads, rows, keys, width in [
        (1, 2, 2, 40, 50, 16), (2, 2, 2, 40, 50, 16), (1, 4, 2, 40, 50, 16), (1, 1, 1, 40, 50, 16),
        (1, 2, 2, 1, 50, 16), (1, 2, 2, 40, 1, 16), (1, 2, 2, 40, 50, 32), (3, 2, 2, 7, 5, 16),
    ]:  # fmt: skip
        for dtype, differentiated in itertools.product((torch.float32, torch.bfloat16), {False, device == "cuda"}):
            q = torch.randn(batch, heads, rows, width, dtype=dtype, device=device, requires_grad=differentiated)
            k, v = torch.randn(2, batch, key_heads, keys, width, dtype=dtype, device=device)
            calls.setdefault(flex.kind_of(q, k, v), []).append((q, k, v))
    with torch._dynamo.config.patch(recompile_limit=1):
        for kind, some in calls.items():
            assert len(graphs_of(flex.written(2.0, 0.25, True, kind), *some)) == 1
    q, k, v = given_flex(40, 50)
    assert flex.kind_of(q, k, v) != flex.kind_of(q.requires_grad_(), k, v)


def test_few_pairs_are_not_compiled_for(monkeypatch):
    """It takes seconds for each kind of inputs, and a call of few pairs microseconds; who asks for flex gets it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    usual = Setting("cuda", torch.float32, torch.float32, 8, 8, 0.25, 30.0)
    for pairs, expected in ((flex.FEW_PAIRS, "streaming"), (flex.FEW_PAIRS + 1, "flex_cuda"), (None, "flex_cuda")):
        kernel, why = choose_kernel("auto", usual._replace(pairs=pairs))
        assert kernel.name == expected
        assert ("flex_cuda takes seconds to be compiled, and a rank has few pairs" in why) == (pairs == flex.FEW_PAIRS)
    assert choose_kernel("flex_cuda", usual._replace(pairs=4))[0].name == "flex_cuda"


def test_flex_is_asked_for_lse_without_a_warning(recwarn):
    """`return_lse=` is deprecated; what is computed is the same."""
    q, k, v = given_flex(8, 9)
    out, aux = written(2.0, 0.25, False, q, k, v)(q, k, v)
    assert (out.shape, aux.lse.shape) == (q.shape, q.shape[:3])
    assert not [one for one in recwarn if "return_lse" in str(one.message)]


@BY_KERNEL
@pytest.mark.parametrize("causal", [False, True])
def test_scores_beyond_the_largest_float16(kernel, device, causal):
    """Scores past 65504 are held in float32: weights and gradients are right, and nothing is infinite."""
    problem = Problem(query_length=8, heads=2, key_heads=1, head_dim=8, scale=1.0, causal=causal, dtype="float16")
    if not runs(kernel, problem, device):
        pytest.skip("the kernel does not compute this")
    given = inputs_of(problem, size=200.0, device=device)
    scores = given.q.double().transpose(1, 2) @ given.k.double().permute(0, 2, 3, 1)
    assert float(scores.abs().max()) > torch.finfo(torch.float16).max
    results, _ = computed(kernel, problem, given, ((), ()) if causal else ((3,), (5,)))
    assert worst_margin(problem, given, results) <= 1
    assert all(bool(torch.isfinite(result).all()) for result in results[:2])


def test_the_margin_sees_a_wrong_kernel():
    """A scale that is off, a multiplicity that is lost, an lse cotangent of the other sign, dk without its scale."""
    problem = Problem(
        query_length=9, heads=2, key_heads=1, head_dim=4, dilation=Dilation(((4, 1), (9, 1)), heads="shared")
    )
    given = inputs_of(problem)

    class Wrong:
        takes_bias = True

        def forward(self, setting, tile):
            return STREAMING.forward(*self.changed(setting, tile))

        def backward(self, setting, tile, rows):
            rows = rows._replace(dlse=self.cotangent(rows.dlse))
            return self.returned(STREAMING.backward(*self.changed(setting, tile), rows))

        changed = staticmethod(lambda *them: them)
        cotangent = staticmethod(lambda dlse: dlse)
        returned = staticmethod(lambda them: them)

    assert worst_margin(problem, given, computed(Wrong(), problem, given)[0]) <= 1
    for name, change in {
        "changed": lambda setting, tile: (setting._replace(scale=1.01 * setting.scale), tile),
        "cotangent": lambda dlse: -dlse,
        "returned": lambda them: (them[0], 2 * them[1], them[2]),
    }.items():
        wrong = type("Mutant", (Wrong,), {name: staticmethod(change)})()
        assert worst_margin(problem, given, computed(wrong, problem, given)[0]) > 1, name
    once = staticmethod(lambda setting, tile: (setting, tile._replace(mask=tile.mask.clamp(max=0.0))))
    lost = type("Mutant", (Wrong,), {"changed": once})()
    assert worst_margin(problem, given, computed(lost, problem, given)[0]) > 1


# -- what a mask keeps out ---------------------------------------------------------------------------------------------


POISONS = [math.nan, math.inf, -math.inf, 2.0**100]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_streaming_keeps_out_what_is_excluded(poison, softcap):
    """Padding may hold anything: every result is right to rounding, finite, and its own gradients are exactly 0.

    Not bit for bit what it is without: keys that are not finite are copied, so that products begin elsewhere in memory.
    """
    problem = Problem(query_length=7, heads=4, key_heads=2, head_dim=4, key_lengths=(4,), softcap=softcap)
    for cuts in (((), ()), ((3,), ()), ((), (2,)), ((2, 5), (6,))):
        given = inputs_of(problem)
        k, v = given.k.clone(), given.v.clone()
        k[:, 4:], v[:, 4:] = poison, poison
        poisoned, kinds = computed(STREAMING, problem, given._replace(k=k, v=v), cuts)
        assert "bias" in kinds
        assert all(bool(torch.isfinite(result).all()) for result in poisoned)
        assert worst_margin(problem, given, poisoned) <= 1
        assert not any(bool(gradient[:, 4:].any()) for gradient in poisoned[3:])


@pytest.mark.parametrize("poison", POISONS[:3])
def test_streaming_leaves_what_is_not_finite_with_those_that_attend_it(poison):
    """A document that holds a NaN or an infinity: all others are right to rounding."""
    problem = Problem(query_length=9, heads=2, head_dim=4, documents=(0, 3, 9))
    given = inputs_of(problem)
    clean, _ = computed(STREAMING, problem, given)
    for name in ("q", "k", "v", "dout"):
        spoilt = inputs_of(problem)
        getattr(spoilt, name)[:, 1] = poison
        poisoned, kinds = computed(STREAMING, problem, spoilt)
        assert kinds == {"bias"}
        others = [
            torch.cat([before.narrow(axis, 0, 3), result.narrow(axis, 3, 6)], dim=axis)
            for result, before, axis in zip(poisoned, clean, (1, 2, 1, 1, 1), strict=True)
        ]
        assert worst_margin(problem, given, others) <= 1, name
        assert not all(bool(torch.isfinite(result.narrow(1, 0, 3)).all()) for result in (poisoned[0], *poisoned[2:]))


@BY_KERNEL
def test_rows_of_nothing_ignore_their_cotangents(kernel, device):
    """out 0, lse −inf and no part in any gradient; for streaming even with a cotangent that is not finite."""
    problem = Problem(query_length=8, key_length=3, heads=2, head_dim=4, causal=True)  # rows 0 to 4 attend nothing
    if not (kernel.takes_bias and runs(kernel, problem, device)):
        pytest.skip("the kernel does not compute this")
    given = inputs_of(problem, device=device)
    clean, _ = computed(kernel, problem, given)
    assert torch.equal(clean[0][:, :5], torch.zeros_like(clean[0][:, :5]))
    assert bool((clean[1][:, :, :5] == -math.inf).all())
    for dout, dlse in [(2.0, 3.0)] + [(math.nan, math.inf)] * (kernel is STREAMING):
        given.dout[:, :5], given.dlse[:, :, :5] = dout, dlse
        results, _ = computed(kernel, problem, given)
        assert all(torch.equal(a, b) for a, b in zip(clean, results, strict=True))


# -- choosing ----------------------------------------------------------------------------------------------------------


def setting(device="cpu", dtype=torch.float32, head_dim=64, softcap=None):
    """An ordinary one, with changes."""
    return Setting(device, dtype, torch.float32, head_dim, head_dim, 0.125, softcap)


def test_the_first_kernel_that_can_is_chosen_and_the_reason_names_the_others():
    """On CPU the fused op but for softcap; on CUDA by dtype; anywhere else, plain tensor operations."""
    assert choose_kernel("auto", setting())[0].name == "fused_cpu"
    assert choose_kernel("auto", setting())[1] == "the first choice"
    streaming, why = choose_kernel("auto", setting(softcap=30.0))
    assert streaming is STREAMING
    assert why.startswith("fused_cpu knows no softcap; flash_cuda runs on cuda, not on cpu; ")
    chosen = {
        (torch.bfloat16, 64): "flash_cuda",
        (torch.float16, 300): "efficient_cuda",
        (torch.float32, 64): "efficient_cuda",
        (torch.float64, 64): "streaming",
    }
    for (dtype, head_dim), name in chosen.items():
        kernel, why = choose_kernel("auto", setting("cuda", dtype, head_dim))
        assert kernel.name == name
        assert "fused_cpu runs on cpu, not on cuda" in why
    assert choose_kernel("auto", setting("mps"))[0] is STREAMING


def test_a_kernel_may_be_asked_for():
    """By name, with that as its reason."""
    for name in ("fused_cpu", "streaming"):
        kernel, why = choose_kernel(name, setting())
        assert (kernel.name, why) == (name, "asked for")


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        (
            "flash",
            setting(),
            "kernel='flash': expected auto, fused_cpu, flash_cuda, efficient_cuda, flex_cuda, streaming",
        ),
        ("fused_cpu", setting(softcap=2.0), "kernel='fused_cpu' knows no softcap; kernel='auto' chooses one that can"),
        ("fused_cpu", setting("cuda"), "kernel='fused_cpu' runs on cpu, not on cuda; kernel='auto' chooses"),
        ("flash_cuda", setting("cuda"), "kernel='flash_cuda' computes in 16 bits, not in torch.float32; kernel='auto'"),
    ],
)
def test_a_kernel_that_cannot_is_refused_with_the_reason(name, call, message):
    """One line: the value, why not, and the way out."""
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        choose_kernel(name, call)
    assert "\n" not in str(raised.value)

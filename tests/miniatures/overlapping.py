"""A right attention whose calls get in one another's way, or which finds in new memory what it did not put there."""

import torch
import torch.distributed as dist
from right import attention

from ringverify import AttentionCall, implementation

KEPT = {}
"""By rank: what the last forward left for the next backward, and the last output."""


def remembered(q, k, v, call):
    """Copies of the inputs, and the output with its graph."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        return leaves, attention(*leaves, call)


class Layer(torch.autograd.Function):
    """Attention that keeps its graph on `ctx`."""

    again = "right"

    @classmethod
    def forward(cls, ctx, q, k, v, call):
        ctx.kept = remembered(q, k, v, call)
        return ctx.kept[1].detach().clone()

    @classmethod
    def backward(cls, ctx, dout):
        leaves, out = ctx.kept
        return *torch.autograd.grad(out, leaves, dout, retain_graph=True), None


class OnTheModule(Layer):
    """O94: the last forward's graph is the one that is used."""

    @classmethod
    def forward(cls, ctx, q, k, v, call):
        KEPT[dist.get_rank()] = remembered(q, k, v, call)
        return KEPT[dist.get_rank()][1].detach().clone()

    @classmethod
    def backward(cls, ctx, dout):
        leaves, out = KEPT[dist.get_rank()]
        return *torch.autograd.grad(out, leaves, dout, retain_graph=True), None


class UsedUp(Layer):
    """A backward that empties what it was left, and then says so."""

    @classmethod
    def backward(cls, ctx, dout):
        if ctx.kept is None:
            raise RuntimeError("what the backward needs was freed by the one before: run the forward once more")
        gradients = Layer.backward(ctx, dout)
        ctx.kept = None
        return gradients


class UsedUpSilently(Layer):
    """The same, without a word."""

    @classmethod
    def backward(cls, ctx, dout):
        gradients = Layer.backward(ctx, dout)
        ctx.kept = None
        return gradients


class Doubled(Layer):
    """What a backward returns, the next one adds to."""

    @classmethod
    def backward(cls, ctx, dout):
        found = Layer.backward(ctx, dout)[:3]
        before = getattr(ctx, "before", None)
        ctx.before = found
        return *(found if before is None else (a + b for a, b in zip(found, before, strict=True))), None


class AllOrNothing(Layer):
    """Takes it that every input has a gradient."""

    @classmethod
    def backward(cls, ctx, dout):
        assert all(ctx.needs_input_grad[:3])
        return Layer.backward(ctx, dout)


@implementation(name="a layer")
def layer(q, k, v, call: AttentionCall):
    """Right."""
    return Layer.apply(q, k, v, call)


@implementation(name="graph on the module")
def on_the_module(q, k, v, call: AttentionCall):
    """The backward of whichever forward came last."""
    return OnTheModule.apply(q, k, v, call)


@implementation(name="second backward refused")
def second_backward_refused(q, k, v, call: AttentionCall):
    """Right, once."""
    return UsedUp.apply(q, k, v, call)


@implementation(name="second backward stumbles")
def second_backward_stumbles(q, k, v, call: AttentionCall):
    """Fails on something that is `None`."""
    return UsedUpSilently.apply(q, k, v, call)


@implementation(name="second backward adds")
def second_backward_adds(q, k, v, call: AttentionCall):
    """Twice the gradients."""
    return Doubled.apply(q, k, v, call)


@implementation(name="all inputs or none")
def all_or_nothing(q, k, v, call: AttentionCall):
    """Fails where weights are frozen."""
    return AllOrNothing.apply(q, k, v, call)


@implementation(name="wrong in inference")
def wrong_in_inference(q, k, v, call: AttentionCall):
    """Right where gradients may be taken, and under no_grad."""
    out = attention(q, k, v, call)
    return 2 * out if torch.is_inference_mode_enabled() else out


@implementation(name="one output buffer", gradients=False)
def one_output_buffer(q, k, v, call: AttentionCall):
    """O96: the next call of the same shape writes where this one's output is."""
    out = attention(q, k, v, call)
    kept = KEPT.setdefault((dist.get_rank(), out.shape), torch.empty_like(out))
    return kept.copy_(out)


@implementation(name="added to empty", gradients=False)
def added_to_empty(q, k, v, call: AttentionCall):
    """F9: a sum that begins with whatever was in memory."""
    return torch.empty_like(q).mul_(0.0) + attention(q, k, v, call)


@implementation(name="empty, then written", gradients=False)
def empty_then_written(q, k, v, call: AttentionCall):
    """Right: new memory is written before it is read."""
    return torch.empty_like(q).copy_(attention(q, k, v, call))

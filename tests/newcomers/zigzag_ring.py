"""Zigzag ring attention: batch_isend_irecv, one autograd.Function, float32 accumulators, differentiable lse."""

import torch
import torch.distributed as dist

from ringverify import AttentionCall, implementation


class Ring:
    """Pass tensors to the right neighbour, and take those of the left one."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.right = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self.left = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def start(self, *tensors):
        tensors = [t.contiguous() for t in tensors]
        arriving = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
        ops = []
        for sent, taken in zip(tensors, arriving):
            ops.append(dist.P2POp(dist.isend, sent, self.right, self.group))
            ops.append(dist.P2POp(dist.irecv, taken, self.left, self.group))
        return dist.batch_isend_irecv(ops), arriving, tensors

    @staticmethod
    def finish(pending):
        works, arriving, _ = pending
        for work in works:
            work.wait()
        return arriving


def scores_of(q, k, scale, triangle):
    """(B, H, Sq, Sk) in the accumulator's dtype."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if triangle:
        later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(later, float("-inf"))
    return s


def part(rank, source, causal, length):
    """Which queries meet which keys of the block of `source`: (query slice, key slice, triangular)."""
    everything, half = slice(0, length), length // 2
    if not causal:
        return everything, everything, False
    if source == rank:
        return everything, everything, True
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, length), everything, False


class ZigzagAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, causal, scale):
        ring, acc = Ring(group), torch.promote_types(q.dtype, torch.float32)
        length, groups = q.shape[1], q.shape[2] // k.shape[2]
        qa = q.to(acc)
        out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=acc, device=q.device)
        lse = torch.full((q.shape[0], q.shape[2], length), float("-inf"), dtype=acc, device=q.device)
        kb, vb = k, v
        for step in range(ring.size):
            pending = ring.start(kb, vb) if step + 1 < ring.size else None
            rows, cols, triangle = part(ring.rank, (ring.rank - step) % ring.size, causal, length)
            kk = kb[:, cols].to(acc).repeat_interleave(groups, 2)
            vv = vb[:, cols].to(acc).repeat_interleave(groups, 2)
            s = scores_of(qa[:, rows], kk, scale, triangle)
            new = torch.logaddexp(lse[:, :, rows], s.logsumexp(-1))
            p = (s - new[..., None]).exp()
            keep = (lse[:, :, rows] - new).exp().transpose(1, 2)[..., None]
            out[:, rows] = out[:, rows] * keep + torch.einsum("bhqk,bkhd->bqhd", p, vv)
            lse[:, :, rows] = new
            if pending is not None:
                kb, vb = ring.finish(pending)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = group, causal, scale
        return out.to(q.dtype), lse.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        group, causal, scale = ctx.settings
        ring, acc = Ring(group), out.dtype
        length, hk = q.shape[1], k.shape[2]
        groups = q.shape[2] // hk
        qa, dout = q.to(acc), dout.to(acc)
        delta = (dout * out).sum(-1).transpose(1, 2) - dlse.to(acc)
        dq = torch.zeros_like(qa, memory_format=torch.contiguous_format)
        dk = torch.zeros(k.shape, dtype=acc, device=k.device)
        dv = torch.zeros(v.shape, dtype=acc, device=v.device)
        kb, vb = k, v
        for step in range(ring.size):
            pending = ring.start(kb, vb) if step + 1 < ring.size else None
            rows, cols, triangle = part(ring.rank, (ring.rank - step) % ring.size, causal, length)
            kk = kb[:, cols].to(acc).repeat_interleave(groups, 2)
            vv = vb[:, cols].to(acc).repeat_interleave(groups, 2)
            p = (scores_of(qa[:, rows], kk, scale, triangle) - lse[:, :, rows, None]).exp()
            dp = torch.einsum("bqhd,bkhd->bhqk", dout[:, rows], vv)
            ds = p * (dp - delta[:, :, rows, None]) * scale
            dq[:, rows] += torch.einsum("bhqk,bkhd->bqhd", ds, kk)
            dkk = torch.einsum("bhqk,bqhd->bkhd", ds, qa[:, rows])
            dvv = torch.einsum("bhqk,bqhd->bkhd", p, dout[:, rows])
            dk[:, cols] += dkk.unflatten(2, (hk, groups)).sum(3)
            dv[:, cols] += dvv.unflatten(2, (hk, groups)).sum(3)
            if pending is not None:
                kb, vb = ring.finish(pending)
            if ring.size > 1:  # the gradients follow their block; after the last step they are home
                dk, dv = ring.finish(ring.start(dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


@implementation(
    sharding="zigzag",
    causal="both",
    dtypes=("float32", "float64", "bfloat16"),
    lse=True,
    lse_gradient=True,
    gqa=True,
    value_dim=True,
    scale=True,
    subgroups=True,
    traffic="neighbours",
    memory="sharded",
)
def attend(q, k, v, call: AttentionCall):
    return ZigzagAttention.apply(q, k, v, call.group, call.causal, call.scale)

"""Grouped-query ring over a DeviceMesh: blocks padded to one size, values of their own width, keys of their own length."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringverify import AttentionCall, implementation


def pieces(length, size):
    """The position at which each rank's keys begin, and one more."""
    starts = [0]
    for r in range(size):
        starts.append(starts[-1] + length // size + (r < length % size))
    return starts


def pad(x, length):
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, length - x.shape[1])).contiguous()


class MeshRing:
    """Neighbours on one dimension of a mesh."""

    def __init__(self, mesh):
        self.group = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        members = dist.get_process_group_ranks(self.group)
        self.right, self.left = members[(self.rank + 1) % self.size], members[(self.rank - 1) % self.size]

    def rotate(self, *tensors):
        arriving = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        works = []
        for sent, taken in zip(tensors, arriving):
            if sent.numel():
                works.append(dist.isend(sent, self.right, group=self.group))
                works.append(dist.irecv(taken, self.left, group=self.group))
        for work in works:
            work.wait()
        return arriving


class GroupedRing(torch.autograd.Function):
    """q as (B, S, Hk, G, D): no key is ever repeated."""

    @staticmethod
    def hidden(positions, starts, source, longest, shift, causal):
        keys = starts[source] + torch.arange(longest, device=positions.device)
        hidden = (keys >= starts[source + 1])[None, :].expand(positions.numel(), -1)
        return hidden | (keys[None, :] > positions[:, None] + shift) if causal else hidden

    @staticmethod
    def forward(ctx, q, k, v, mesh, positions, nq, nk, causal, scale):
        ring, acc = MeshRing(mesh), torch.promote_types(q.dtype, torch.float32)
        starts = pieces(nk, ring.size)
        longest = starts[1]
        b, s, h, d = q.shape
        hk = k.shape[2]
        qa = q.to(acc).reshape(b, s, hk, h // hk, d)
        out = torch.zeros((b, s, hk, h // hk, v.shape[3]), dtype=acc, device=q.device)
        top = torch.full((b, s, hk, h // hk), float("-inf"), dtype=acc, device=q.device)
        total = torch.zeros_like(top)
        kb, vb = pad(k, longest), pad(v, longest)
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            hidden = GroupedRing.hidden(positions, starts, source, longest, nk - nq, causal)
            if longest and not hidden.all():
                scores = torch.einsum("bsngd,btnd->bsngt", qa, kb.to(acc)) * scale
                scores = scores.masked_fill(hidden[None, :, None, None, :], float("-inf"))
                new = torch.maximum(top, scores.amax(-1))
                finite = new.masked_fill(new == float("-inf"), 0.0)
                keep, p = (top - finite).exp(), (scores - finite[..., None]).exp()
                total = total * keep + p.sum(-1)
                out = out * keep[..., None] + torch.einsum("bsngt,btnd->bsngd", p, vb.to(acc))
                top = new
            if step + 1 < ring.size:
                kb, vb = ring.rotate(kb, vb)
        empty = total == 0
        out = out / total.masked_fill(empty, 1.0)[..., None]
        lse = torch.where(empty, float("-inf"), top + total.masked_fill(empty, 1.0).log())
        ctx.save_for_backward(q, k, v, out, lse, positions)
        ctx.settings = mesh, nq, nk, causal, scale
        return out.reshape(b, s, h, v.shape[3]).to(q.dtype), lse.reshape(b, s, h).transpose(1, 2).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, positions = ctx.saved_tensors
        mesh, nq, nk, causal, scale = ctx.settings
        ring, acc = MeshRing(mesh), out.dtype
        starts = pieces(nk, ring.size)
        longest = starts[1]
        b, s, h, d = q.shape
        hk = k.shape[2]
        qa = q.to(acc).reshape(b, s, hk, h // hk, d)
        dout = dout.to(acc).reshape(out.shape)
        delta = (dout * out).sum(-1) - dlse.to(acc).transpose(1, 2).reshape(lse.shape)
        finite = lse.masked_fill(lse == float("-inf"), 0.0)
        dq = torch.zeros(qa.shape, dtype=acc, device=q.device)
        kb, vb = pad(k, longest), pad(v, longest)
        dk = torch.zeros(kb.shape, dtype=acc, device=q.device)
        dv = torch.zeros(vb.shape, dtype=acc, device=q.device)
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            hidden = GroupedRing.hidden(positions, starts, source, longest, nk - nq, causal)
            if longest and not hidden.all():
                ka, va = kb.to(acc), vb.to(acc)
                scores = torch.einsum("bsngd,btnd->bsngt", qa, ka) * scale
                scores = scores.masked_fill(hidden[None, :, None, None, :], float("-inf"))
                p = (scores - finite[..., None]).exp()
                ds = p * (torch.einsum("bsngd,btnd->bsngt", dout, va) - delta[..., None]) * scale
                dq = dq + torch.einsum("bsngt,btnd->bsngd", ds, ka)
                dk = dk + torch.einsum("bsngt,bsngd->btnd", ds, qa)
                dv = dv + torch.einsum("bsngt,bsngd->btnd", p, dout)
            if step + 1 < ring.size:
                kb, vb = ring.rotate(kb, vb)
            if ring.size > 1:
                dk, dv = ring.rotate(dk.contiguous(), dv.contiguous())
        mine = k.shape[1]
        return (
            dq.reshape(q.shape).to(q.dtype),
            dk[:, :mine].to(k.dtype),
            dv[:, :mine].to(v.dtype),
            *(None,) * 6,
        )


@implementation(
    sharding="contiguous",
    causal="both",
    dtypes=("float32", "float64", "bfloat16"),
    lse=True,
    lse_gradient=True,
    gqa=True,
    value_dim=True,
    scale=True,
    cross_lengths=True,
    uneven=True,
    empty_shards=True,
    subgroups=True,
)
def attend(q, k, v, call: AttentionCall):
    mesh = DeviceMesh.from_group(call.group, q.device.type)
    return GroupedRing.apply(q, k, v, mesh, call.positions, call.problem.nq, call.problem.nk, call.causal, call.scale)

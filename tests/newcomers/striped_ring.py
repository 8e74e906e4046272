"""Striped ring attention: blocks with an lse each, merged by sigmoids; triangles with or without the diagonal."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringverify import AttentionCall, implementation


class RingComm:
    def __init__(self, group):
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.send_to = dist.get_global_rank(group, (self.rank + 1) % self.world_size)
        self.receive_from = dist.get_global_rank(group, (self.rank - 1) % self.world_size)
        self.ops, self.requests, self.keep = [], None, []

    def send_recv(self, tensor):
        tensor = tensor.contiguous()
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.keep.append(tensor)
        self.ops.append(dist.P2POp(dist.isend, tensor, self.send_to, group=self.group))
        self.ops.append(dist.P2POp(dist.irecv, result, self.receive_from, group=self.group))
        return result

    def commit(self):
        self.requests = dist.batch_isend_irecv(self.ops)

    def wait(self):
        for request in self.requests:
            request.wait()
        self.ops, self.requests, self.keep = [], None, []


def block_scores(q, k, scale, causal, diagonal_too):
    """(B, H, Sq, Sk); row i sees columns up to i, or up to i - 1."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1 if diagonal_too else 0)
        s = s.masked_fill(hidden, float("-inf"))
    return s


def forward_block(q, k, v, scale, causal, diagonal_too):
    s = block_scores(q, k, scale, causal, diagonal_too)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    return torch.einsum("bhqk,bkhd->bhqd", p, v), lse


def widen(x, dtype, groups):
    return x.to(dtype).repeat_interleave(groups, 2)


class StripedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, causal, scale):
        comm, acc = RingComm(group), torch.promote_types(q.dtype, torch.float32)
        groups = q.shape[2] // k.shape[2]
        out = lse = None
        kb, vb = k, v
        for step in range(comm.world_size):
            if step + 1 < comm.world_size:
                next_k, next_v = comm.send_recv(kb), comm.send_recv(vb)
                comm.commit()
            source = (comm.rank - step) % comm.world_size
            block_out, block_lse = forward_block(
                q.to(acc), widen(kb, acc, groups), widen(vb, acc, groups), scale, causal, source <= comm.rank
            )
            if out is None:  # our own block has the diagonal: lse is finite from here on
                out, lse = block_out, block_lse
            else:
                out = out - torch.sigmoid(block_lse - lse)[..., None] * (out - block_out)
                lse = lse - F.logsigmoid(lse - block_lse)
            if step + 1 < comm.world_size:
                comm.wait()
                kb, vb = next_k, next_v
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = group, causal, scale
        result, log = out.transpose(1, 2).to(q.dtype), lse.clone()
        ctx.mark_non_differentiable(log)
        return result, log

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        group, causal, scale = ctx.settings
        kv_comm, d_comm, acc = RingComm(group), RingComm(group), out.dtype
        hk = k.shape[2]
        groups, qa = q.shape[2] // hk, q.to(acc)
        dout = dout.to(acc).transpose(1, 2)
        delta = (dout * out).sum(-1, keepdim=True)
        dq = dk = dv = None
        kb, vb = k, v
        for step in range(kv_comm.world_size):
            if step + 1 < kv_comm.world_size:
                next_k, next_v = kv_comm.send_recv(kb), kv_comm.send_recv(vb)
                kv_comm.commit()
            source = (kv_comm.rank - step) % kv_comm.world_size
            kk, vv = widen(kb, acc, groups), widen(vb, acc, groups)
            p = (block_scores(qa, kk, scale, causal, source <= kv_comm.rank) - lse[..., None]).exp()
            ds = p * (torch.einsum("bhqd,bkhd->bhqk", dout, vv) - delta) * scale
            dq_block = torch.einsum("bhqk,bkhd->bqhd", ds, kk)
            dk_block = torch.einsum("bhqk,bqhd->bkhd", ds, qa).unflatten(2, (hk, groups)).sum(3)
            dv_block = torch.einsum("bhqk,bhqd->bkhd", p, dout).unflatten(2, (hk, groups)).sum(3)
            if dq is None:
                dq, dk, dv = dq_block, dk_block, dv_block
            else:
                dq = dq + dq_block
                d_comm.wait()
                dk, dv = next_dk + dk_block, next_dv + dv_block
            if step + 1 < kv_comm.world_size:
                kv_comm.wait()
                kb, vb = next_k, next_v
            if kv_comm.world_size > 1:
                next_dk, next_dv = d_comm.send_recv(dk), d_comm.send_recv(dv)
                d_comm.commit()
        if kv_comm.world_size > 1:
            d_comm.wait()
            dk, dv = next_dk, next_dv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


@implementation(
    sharding="striped",
    causal="both",
    dtypes=("float32", "bfloat16", "float16"),
    lse=True,
    gqa=True,
    value_dim=True,
    scale=True,
    subgroups=True,
    deterministic=True,
)
def attend(q, k, v, call: AttentionCall):
    return StripedAttention.apply(q, k, v, call.group, call.causal, call.scale)

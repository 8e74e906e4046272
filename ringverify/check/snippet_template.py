"""The stand-alone script, but for what `ringverify.check.snippet` puts in place of its `<<names>>`."""

TEMPLATE = r'''"""<<summary>>

<<case>>

Needs numpy, torch and the implementation. Exits with 1 if a result is off by more than rounding allows.
"""

import base64
import os
import sys
import tempfile
import zlib
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from numpy import inf, nan  # noqa: F401  # as arrays below have them

try:
    import ringverify  # noqa: F401
except ModuleNotFoundError:  # the implementation is declared with it, and nothing else of it is needed
    ringverify = ModuleType("ringverify")
    ringverify.AttentionCall = SimpleNamespace
    ringverify.implementation = lambda **declared: lambda function: function
    sys.modules["ringverify"] = ringverify

sys.path.insert(0, os.getcwd())
<<import>>

function = getattr(target, "function", target)


def unpacked(text, dtype, shape):
    """An array from its bytes."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype).reshape(shape)


WORLD, RING = <<world>>, <<ring>>  # processes, and those of them that are the ring
SHARDING, LAYOUT, MEMORY = <<sharding>>, <<layout>>, <<memory>>
DTYPE = getattr(torch, <<dtype>>)
RETURNS_LSE, GRADIENTS, COTANGENT = <<returns_lse>>, <<gradients>>, <<cotangent>>
PROBLEM = SimpleNamespace(**<<problem>>)
QUERIES = <<queries>>  # positions of each rank's queries
KEYS = <<keys>>  # and of its keys
INPUTS = <<inputs>>  # (batch, sequence, heads, dim); dlse (batch, heads, sequence)
M = <<multiplicity>>  # how often query i attends key j: (batch, heads, queries, keys)
ALLOWED = <<allowed>>
RMS, UNIT = <<rms>>, <<unit>>  # largest root mean square error, in units, and the rows (batch, sequence, heads) of it


def lay_out(array, dtype):
    """A tensor of these values that lies in memory as in the case; what it does not cover is NaN."""
    source = torch.from_numpy(np.array(array)).to(dtype)
    if MEMORY == "transposed":
        return source.transpose(1, 2).contiguous().transpose(1, 2)
    if MEMORY == "strided":
        view = source.new_full((source.shape[0], 2 * source.shape[1] + 1, *source.shape[2:]), float("nan"))
        view = view[:, 1 : 2 * source.shape[1] + 1 : 2]
    elif MEMORY == "offset":
        view = source.new_full((source.numel() + 12,), float("nan"))[7 : 7 + source.numel()].view(source.shape)
    elif MEMORY == "packed":
        view = source.new_full((*source.shape[:-1], source.shape[-1] + 3), float("nan"))[..., 1:-2]
    elif MEMORY == "expanded":
        for axis, size in enumerate(array.shape):
            if size and bool((source == source.narrow(axis, 0, 1)).all()):
                source = source.narrow(axis, 0, 1)
        return source.contiguous().expand(array.shape)
    else:
        return source
    return view.copy_(source)


def dense():
    """out, lse, dq, dk and dv of dense attention in float64, by autograd."""
    q, k, v = (torch.tensor(INPUTS[name]).nan_to_num().requires_grad_() for name in "qkv")
    m = torch.tensor(M)
    group = PROBLEM.group_size
    kh, vh = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, kh) * PROBLEM.scale_value
    if PROBLEM.softcap is not None:
        s = PROBLEM.softcap * torch.tanh(s / PROBLEM.softcap)
    empty = (m == 0).all(dim=-1)
    s = torch.where(m > 0, s + torch.log(m.clamp(min=1)), -torch.inf)
    s = torch.where(empty[..., None], 0.0, s)  # a row without keys: any finite number, for its gradient is 0
    lse = torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    p = torch.where(empty[..., None], 0.0, torch.exp(s - lse[..., None]))
    out = torch.einsum("bhqk,bkhd->bqhd", p, vh)
    loss = (out * torch.tensor(INPUTS["dout"])).sum()
    loss = loss + (torch.where(empty, 0.0, lse) * torch.tensor(INPUTS["dlse"])).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    lse = torch.where(empty, -torch.inf, lse)
    return {name: x.detach().numpy() for name, x in (("out", out), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv))}


def run_rank(world_rank, folder):
    """One process: its part in the ring, its results in a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=world_rank, world_size=WORLD)
    group = dist.group.WORLD if len(RING) == WORLD else dist.new_group(list(RING))
    if world_rank in RING:
        rank = RING.index(world_rank)
        swap = LAYOUT == "bhsd"
        rows = {"q": QUERIES[rank], "dout": QUERIES[rank], "k": KEYS[rank], "v": KEYS[rank]}
        local = {name: INPUTS[name][:, np.array(at, dtype=np.int64)] for name, at in rows.items()}
        q, k, v, dout = (lay_out(local[n].swapaxes(1, 2) if swap else local[n], DTYPE) for n in ("q", "k", "v", "dout"))
        if GRADIENTS:
            q, k, v = (x.requires_grad_() for x in (q, k, v))
        call = SimpleNamespace(
            group=group,
            rank=rank,
            world_size=len(RING),
            problem=PROBLEM,
            sharding=SHARDING,
            positions=torch.tensor(QUERIES[rank], dtype=torch.int64),
            key_positions=torch.tensor(KEYS[rank], dtype=torch.int64),
            scale=PROBLEM.scale_value,
            **{n: getattr(PROBLEM, n) for n in ("causal", "window", "dilation", "documents", "key_lengths", "softcap")},
        )
        returned = function(q, k, v, call)
        out, lse = returned if RETURNS_LSE else (returned, None)
        results = {"out": out}
        if RETURNS_LSE:
            results["lse"] = lse
        if GRADIENTS:
            pairs = []
            if COTANGENT != "lse":
                pairs.append((out, dout))
            if COTANGENT != "out" and lse is not None:
                dlse = INPUTS["dlse"][:, :, np.array(QUERIES[rank], dtype=np.int64)]
                pairs.append((lse, lay_out(dlse, torch.promote_types(DTYPE, torch.float32)).to(lse.dtype)))
            pairs = [(result, cotangent) for result, cotangent in pairs if result.requires_grad]
            found = [None] * 3
            if pairs:
                results_, cotangents = zip(*pairs)
                found = torch.autograd.grad(results_, (q, k, v), cotangents, allow_unused=True)
            for name, leaf, gradient in zip(("dq", "dk", "dv"), (q, k, v), found):
                results[name] = torch.zeros_like(leaf) if gradient is None else gradient
        arrays = {}
        for name, x in results.items():
            x = x.detach().to(torch.float64)
            arrays[name] = (x.transpose(1, 2) if swap and name != "lse" else x).numpy()
        np.savez(f"{folder}/{rank}.npz", **arrays)
    dist.barrier()
    dist.destroy_process_group()


def main():
    """Run all ranks, compare, and say by how much they are off."""
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    right, off, squares = dense(), [], {name: [] for name in RMS}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder,), nprocs=WORLD)
        for rank in range(len(RING)):
            with np.load(f"{folder}/{rank}.npz") as results:
                for name in results:
                    rows = np.array(KEYS[rank] if name in ("dk", "dv") else QUERIES[rank], dtype=np.int64)
                    at = (slice(None), slice(None), rows) if name == "lse" else (slice(None), rows)
                    seen, expected, allowed = results[name], right[name][at], ALLOWED[name][at]
                    with np.errstate(invalid="ignore"):
                        error = np.where(seen == expected, 0.0, np.abs(seen - expected))
                    worst = np.nan_to_num(error, nan=np.inf).max(initial=0.0)
                    wrong = int((~((error <= allowed) | (allowed == inf))).sum())
                    off += [f"{name} on rank {rank}"] if wrong else []
                    beyond = f"beyond what is allowed in {wrong} of {seen.size} elements"
                    print(f"rank {rank} {name:<3}  worst difference {worst:.3g}, {beyond}")
                    if name in RMS:
                        relative = (error**2).sum(-1) / (expected**2).sum(-1).clip(min=np.finfo(float).tiny)
                        squares[name].append(relative[RMS[name][1][at]])
    for name, (limit, _) in RMS.items():
        rms = np.sqrt(np.concatenate(squares[name]).mean()) / UNIT
        off += [] if rms <= limit else [f"{name} in the mean"]
        print(f"all ranks {name:<3}  root mean square error {rms:.3g} u, where at most {limit:.3g} u is allowed")
    print("wrong: " + ", ".join(off) if off else "nothing is wrong here")
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
'''

"""A ring on one device: its ranks are threads of this process, and what they compute, hold and send is shown.

python docs/examples/one_device.py
python docs/examples/one_device.py --sharding zigzag --budget 100000 --dtype bfloat16
python docs/examples/one_device.py --ranks 8 --method allgather
"""

import argparse

import torch
from torch.nn.functional import scaled_dot_product_attention

from ringverify.ring import ring_attention, shard, unshard_from
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.watch.memory import measured


def inputs(options, dtype):
    """q, k, v and a cotangent of out, whole: `(1, length, heads, 32)`."""
    torch.manual_seed(0)
    heads = (options.heads, options.key_heads, options.key_heads, options.heads)
    return [torch.randn(1, options.length, h, 32).to(getattr(torch, options.dtype)).to(dtype) for h in heads]


def one_rank(options):
    """This rank's out, lse, and gradient of q."""
    q, k, v, dout = (shard(x, sharding=options.sharding) for x in inputs(options, getattr(torch, options.dtype)))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with measured():
        out, lse = ring_attention(
            q,
            k,
            v,
            sharding=options.sharding,
            causal=options.causal,
            query_length=options.length,
            key_length=options.length,
            return_lse=True,
            method=options.method,
            kernel=options.kernel,
            memory_budget=options.budget,
            explain=True,
        )
        out.backward(dout)
    return out.detach(), lse.dtype, q.grad


def one_call(options):
    """The same in float64, by one call of torch's own attention."""
    q, k, v, dout = (x.transpose(1, 2) for x in inputs(options, torch.float64))
    q.requires_grad_()
    out = scaled_dot_product_attention(q, k, v, is_causal=options.causal, enable_gqa=True)
    out.backward(dout)
    return out.detach().transpose(1, 2), q.grad.transpose(1, 2)


def main(options):
    """Run the ring, compare, and show each rank."""
    run = SimulatedWorld().run(one_rank, options, world_size=options.ranks, seed=0, deadline=300, watch="memory")
    if run.failure is not None:
        raise SystemExit(run.failure.detail)
    outs, lse_dtypes, dqs = zip(*run.results, strict=True)
    for name, shards, exact in zip(("out", "dq"), (outs, dqs), one_call(options), strict=True):
        whole = unshard_from(shards, sharding=options.sharding)
        error = ((whole.double() - exact).norm() / exact.norm()).item()
        eps = torch.finfo(whole.dtype).eps
        print(f"{name:4} {whole.dtype}, relative error {error:.1e}, {error / eps:.2f} eps")
    print(f"lse  {lse_dtypes[0]}")
    for rank, out in enumerate(outs):
        sent, hops = run.traffic.sent(rank), len(run.traffic.hops(rank))
        peak = run.memory[rank].peak_bytes
        print(f"rank {rank}: {out.size(1)} tokens, {sent} bytes sent in {hops} hops, {peak} bytes at the peak")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--length", type=int, default=1021, help="tokens over all ranks")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16", "float16"])
    parser.add_argument("--sharding", default="contiguous", choices=["contiguous", "zigzag", "striped"])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--method", default="ring", choices=["ring", "allgather"])
    parser.add_argument("--kernel", default="auto", help="what computes a tile")
    parser.add_argument("--budget", type=int, help="bytes that a rank may use beside its inputs and outputs")
    main(parser.parse_args())

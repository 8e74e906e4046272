"""Gradients through `torch.distributed.nn.functional.all_gather` on gloo, of cotangents transposed in memory."""

import os
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.multiprocessing

WORLD = 2


def run_rank(rank, folder):
    """Gathers a matrix of zeros from each rank and weighs both, once with transposed weights and once with a copy."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    weights = [torch.arange(6.0).reshape(3, 2) + 10 * r for r in range(WORLD)]  # the same on both ranks
    for name, layout in (("copied", lambda w: w.T.contiguous()), ("transposed", lambda w: w.T)):
        x = torch.zeros(2, 3, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # deprecated it is
            gathered = dist.nn.functional.all_gather(x)
        torch.autograd.backward(gathered, [layout(w) for w in weights])
        seen, right = x.grad.tolist(), (WORLD * weights[rank].T).tolist()
        if rank == 1:
            print(f"cotangents {name:<11} {seen} {'right' if seen == right else f'WRONG, should be {right}'}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(f"torch {torch.__version__}, gloo, 2 ranks")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder,), nprocs=WORLD)

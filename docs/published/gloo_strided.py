"""Collectives of torch's gloo backend on a tensor that is not contiguous: what arrives, and what should."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 2


def every_other(values):
    """A view of every other element of a tensor; what lies between is −1."""
    base = torch.full((2 * len(values),), -1.0)
    base[::2] = torch.tensor(values)
    return base[::2]


def all_reduce(rank):
    """Sums to 11, 22, 33."""
    x = every_other([1.0, 2.0, 3.0] if rank == 0 else [10.0, 20.0, 30.0])
    dist.all_reduce(x)
    return x, [11.0, 22.0, 33.0]


def broadcast(rank):
    """Rank 0's on both."""
    x = every_other([1.0, 2.0, 3.0] if rank == 0 else [0.0, 0.0, 0.0])
    dist.broadcast(x, src=0)
    return x, [1.0, 2.0, 3.0]


def reduce(rank):
    """The sum on rank 0."""
    x = every_other([1.0, 2.0, 3.0] if rank == 0 else [10.0, 20.0, 30.0])
    dist.reduce(x, dst=0)
    return x, [11.0, 22.0, 33.0] if rank == 0 else x.tolist()


def scatter(rank):
    """Rank 0 hands out a column each."""
    table = torch.arange(6.0).reshape(3, 2)
    x = torch.empty(3)
    dist.scatter(x, list(table.unbind(dim=1)) if rank == 0 else None, src=0)
    return x, table[:, rank].tolist()


def reduce_scatter(rank):
    """Each rank's column, summed over ranks that have the same table."""
    table = torch.arange(6.0).reshape(3, 2)
    x = torch.empty(3)
    dist.reduce_scatter(x, list(table.unbind(dim=1)))
    return x, (WORLD * table[:, rank]).tolist()


def all_gather(rank):
    """Both ranks' on both."""
    x = every_other([1.0, 2.0, 3.0] if rank == 0 else [10.0, 20.0, 30.0])
    found = [torch.empty(3) for _ in range(WORLD)]
    dist.all_gather(found, x)
    return torch.cat(found), [1.0, 2.0, 3.0, 10.0, 20.0, 30.0]


def run_rank(rank, folder):
    """One process; rank 1 speaks of what it sees, but of `reduce`, whose result is rank 0's."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    for collective in (all_reduce, broadcast, reduce, scatter, reduce_scatter, all_gather):
        try:
            seen, right = collective(rank)
            verdict = "right" if seen.tolist() == right else f"WRONG, should be {right}"
            told = f"{seen.tolist()} {verdict}"
        except (RuntimeError, ValueError) as error:
            told = f"refused: {str(error).splitlines()[0]}"
        if rank == (0 if collective is reduce else 1):
            print(f"{collective.__name__:<15}{told}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(f"torch {torch.__version__}, gloo, 2 ranks, tensors that are not contiguous")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder,), nprocs=WORLD)

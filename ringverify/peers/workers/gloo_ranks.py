"""Ranks for workers in torch: processes over gloo, forked for each case. Each has all inputs, and uses its own rows."""

import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes


def results_of(attend):
    """Return the `results_of` of a worker whose ranks call `attend`.

    `attend(case, number, q, k, v)` is given whole tensors and returns the positions whose rows this rank computes, and
    those rows. Gradients of whole tensors are summed over ranks: each is of rows that one rank alone has used.
    """

    def results(case, inputs):
        """Return the results of a case by name."""
        size, out = case["world_size"], inputs["q"].shape[:3] + inputs["v"].shape[3:]
        shapes = {"out": out} | (
            {f"d{name}": (size, *inputs[name].shape) for name in "qkv"} if "dout" in inputs else {}
        )
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        found = {name: torch.zeros(shape, dtype=tensors["q"].dtype).share_memory_() for name, shape in shapes.items()}
        with tempfile.TemporaryDirectory() as folder:
            start_processes(_rank, (attend, case, folder, tensors, found), nprocs=size, start_method="fork")
        return {name: (array if name == "out" else array.sum(0)).numpy() for name, array in found.items()}

    return results


def _rank(number, attend, case, folder, tensors, found):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=case["world_size"])
    dist.barrier()  # a rank that has nothing to exchange may be through, and gone, while another still connects to it
    with torch.set_grad_enabled("dq" in found):
        q, k, v = (tensors[name].clone().requires_grad_("dq" in found) for name in "qkv")
        rows, out = attend(case, number, q, k, v)
    found["out"][:, rows] = out.detach()
    if "dq" in found:
        torch.autograd.backward([out], [tensors["dout"][:, rows]])
        for name, tensor in zip("qkv", (q, k, v), strict=True):
            found[f"d{name}"][number] = 0 if tensor.grad is None else tensor.grad
    dist.destroy_process_group()

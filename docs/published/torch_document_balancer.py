"""Which queries torch's `_PerDocumentHeadTailLoadBalancer` gives to each rank, beside what its documentation says."""

import torch
from torch.distributed.tensor.experimental._attention import _PerDocumentHeadTailLoadBalancer

documented = [[0, 3, 4, 5, 10, 11, 12, 15], [1, 2, 6, 7, 8, 9, 13, 14]]  # of the docstring's example
(indices,) = _PerDocumentHeadTailLoadBalancer([[4, 8, 4]], 2, "cpu")._generate_indices()
print(f"torch {torch.__version__.partition('+')[0]}, documents of 4, 8 and 4 positions, 2 ranks")
for rank, shard in enumerate(indices.chunk(2)):
    print(f"rank {rank} holds {shard.tolist()}, documented are {documented[rank]}")

lengths = [4096, *[64] * 64]
(indices,) = _PerDocumentHeadTailLoadBalancer([lengths], 4, "cpu")._generate_indices()
attended = torch.cat([torch.arange(1, length + 1) for length in lengths])[indices]
print("one document of 4096 positions and 64 of 64, 4 ranks, keys attended under a causal mask:")
for rank, shard in enumerate(attended.chunk(4)):
    print(f"rank {rank}: {shard.sum().item() / attended.sum().item():.1%}")

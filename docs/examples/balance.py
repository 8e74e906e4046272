"""How evenly shardings share causal work: 64 documents on 8 ranks, the busiest rank over the mean of all ranks.

python balance.py [DRAWS]; by default 1,000 draws of each kind of lengths. Written are the median and the largest.
"""

import itertools
import sys

import numpy as np

from ringref.sharding import balancer, key_positions

RANKS, DOCUMENTS = 8, 64


def head_and_tail(start, end, ranks):
    """The two pieces of a document that each rank gets; 2P divides its length."""
    cut = np.arange(start, end).reshape(2 * ranks, -1)
    return [np.concatenate([cut[rank], cut[-1 - rank]]) for rank in range(ranks)]


@balancer
def per_document(documents, world_size):
    """Head and tail of every document for each rank."""
    cut = [head_and_tail(start, end, world_size) for start, end in itertools.pairwise(documents)]
    return [np.concatenate([of[rank] for of in cut]) for rank in range(world_size)]


@balancer
def document_major(documents, world_size):
    """The same pieces, document after document, and then cut in P: the order in which torch 2.13 lists them."""
    cut = [head_and_tail(start, end, world_size) for start, end in itertools.pairwise(documents)]
    return np.concatenate([part for of in cut for part in of]).reshape(world_size, -1)


LENGTHS = {
    "uniform, 1 to 512": lambda rng: rng.integers(1, 513, DOCUMENTS),
    "geometric, mean 256": lambda rng: rng.geometric(1 / 256, DOCUMENTS),
    "power law, 16 to 16,384": lambda rng: np.minimum(16 * rng.random(DOCUMENTS) ** -0.8, 16384).astype(int),
    "three of four have one token": lambda rng: np.where(
        rng.random(DOCUMENTS) < 0.75, 1, rng.integers(1, 513, DOCUMENTS)
    ),
    "one of 8,192 among 1 to 64": lambda rng: np.concatenate([[8192], rng.integers(1, 65, DOCUMENTS - 1)]),
}
SHARDINGS = {
    "`zigzag_documents`": ("zigzag_documents", False),
    "`zigzag`": ("zigzag", False),
    "head and tail per document": (per_document, True),
    "as torch 2.13 orders these": (document_major, True),
}
"""Shardings, and whether documents are first padded to what 2P divides."""


def ratio(sharding, lengths):
    """Work of the busiest rank over the mean, in pairs of a query and a key."""
    documents = (0, *np.cumsum(lengths).tolist())
    keys = np.concatenate([np.arange(1, length + 1) for length in lengths])
    work = [keys[held].sum() for held in key_positions(sharding, documents[-1], RANKS, documents)]
    return max(work) / np.mean(work)


def main(draws):
    """Print the table."""
    print("| lengths |", " | ".join(SHARDINGS), "| tokens of padding |")
    print("|" + "---|" * (len(SHARDINGS) + 2))
    for name, lengths_of in LENGTHS.items():
        rng, found, added = np.random.default_rng(0), {one: [] for one in SHARDINGS}, []
        for _ in range(draws):
            lengths = lengths_of(rng)
            padded = -(-lengths // (2 * RANKS)) * 2 * RANKS
            added.append(padded.sum() / lengths.sum() - 1)
            for one, (sharding, pads) in SHARDINGS.items():
                found[one].append(ratio(sharding, padded if pads else lengths))
        numbers = " | ".join(f"{np.median(of):.3f}, {max(of):.3f}" for of in found.values())
        print(f"| {name} | {numbers} | {np.median(added) * 100:.0f} % |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1000)

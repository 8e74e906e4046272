"""What regions and tiles cover, counted pair by pair, beside what the oracle's pattern says."""

import math
from itertools import product

import numpy as np
import torch

from ringref.pattern import multiplicity
from ringref.sharding import key_positions, query_positions
from ringverify.ring.masks import position_bias
from ringverify.ring.plan.geometry import settled
from ringverify.ring.plan.regions import regions
from ringverify.ring.plan.runs import RowRun, apart, runs_of_ranks
from ringverify.ring.plan.tiles import tiles


def indices(span):
    """Of what a span takes: from the span's numbers, not from its slice."""
    return [span.start + span.step * x for x in range(span.size)]


def runs_of(problem, sharding, world_size):
    """Every rank's queries and every rank's keys, as a plan has them."""
    of_queries, of_keys = apart(sharding)
    keys = runs_of_ranks(of_keys, problem.nk, world_size, problem.documents, settled(problem))
    if of_queries is None:
        return [(RowRun(0, 1, problem.nq, 0),) if problem.nq else ()] * world_size, keys
    return runs_of_ranks(of_queries, problem.nq, world_size, problem.documents), keys


def mismatch(problem, sharding, world_size, buckets):
    """A sentence on the first pair of ranks whose tiles are not the pattern; `None` if all are."""
    expected = multiplicity(problem)
    queries_at = query_positions(sharding, problem.nq, world_size, problem.documents)
    keys_at = key_positions(sharding, problem.nk, world_size, problem.documents)
    query_runs, key_runs = runs_of(problem, sharding, world_size)
    met = [regions(problem, queries, key_runs) for queries in query_runs]
    for rank, owner in product(range(world_size), repeat=2):
        right = expected[:, :, queries_at[rank]][..., keys_at[owner]]
        got = np.zeros(right.shape, dtype=np.int64)
        for region in met[rank][owner]:
            heads, key_heads = indices(region.heads), indices(region.key_heads)
            each = len(heads) // len(key_heads)
            if [head // problem.group_size for head in heads] != [key for key in key_heads for _ in range(each)]:
                return f"{region}: these heads read others"
            if region.by_position:
                why = add_looked_up(problem, got, region, queries_at[rank], keys_at[owner], buckets)
            else:
                why = add_region(got, region, buckets)
            if why is not None:
                return f"rank {rank} and the keys of {owner}: {why}"
        if not np.array_equal(right, got):
            b, h, i, j = (int(x) for x in np.argwhere(right != got)[0])
            return (
                f"rank {rank} and the keys of {owner}: row {i} and key {j} of head {h}, batch {b}, meet "
                f"{got[b, h, i, j]} times instead of {right[b, h, i, j]}"
            )
    return None


def add_region(got, region, buckets):
    """Add to `got (B, H, S, T)` how often a region's tiles let each pair meet; a sentence if they break a promise."""
    rows, keys = indices(region.queries), indices(region.keys)
    i, j = np.arange(len(rows))[:, None], np.arange(len(keys))[None]
    inside = np.ones((len(rows), len(keys)), dtype=bool)
    for bound, side in ((region.low, j - i >= (region.low or 0)), (region.high, j - i <= (region.high or 0))):
        if bound is not None:
            inside &= side
            if side.all():
                return f"{region}: a side that does not bind"
    if not (inside.any(axis=1).all() and inside.any(axis=0).all()):
        return f"{region}: a row or a key without a pair"
    tiled = np.zeros(inside.shape, dtype=np.int64)
    for tile in tiles(region, *buckets):
        pairs = pairs_of(tile)
        if not pairs.any() or pairs.shape[0] > buckets[0] or pairs.shape[1] > buckets[1]:
            return f"{tile}: empty, or larger than {buckets}"
        if tile.kind == "causal" and pairs.shape[0] != pairs.shape[1]:
            return f"{tile}: not square"
        tiled[slice(*tile.rows), slice(*tile.keys)] += pairs
    if not np.array_equal(tiled, inside):
        return f"{region}: its tiles are not its pairs"
    got[np.ix_(range(*region.batch), indices(region.heads), rows, keys)] += tiled
    return None


def pairs_of(tile):
    """Which pairs a tile's kind lets through, `(rows, keys)`."""
    i, j = np.arange(tile.rows[1] - tile.rows[0])[:, None], np.arange(tile.keys[1] - tile.keys[0])[None]
    match tile.kind:
        case "full":
            return np.ones((len(i), j.size), dtype=bool)
        case "causal":
            return j <= i
        case "band":
            return (j - i >= (-math.inf if tile.low is None else tile.low)) & (
                j - i <= (math.inf if tile.high is None else tile.high)
            )
    raise AssertionError(tile)


def add_looked_up(problem, got, region, queries, keys, buckets):
    """The same where the mask is looked up: of a whole block for some heads, every tile by its positions."""
    if (region.batch, region.queries, region.keys.step) != ((0, problem.batch), (0, len(queries), 1), 1):
        return f"{region}: not all queries"
    heads = indices(region.heads)
    for tile in tiles(region, *buckets):
        i, j = slice(*tile.rows), slice(*tile.keys)
        if tile.kind != "positions" or i.stop - i.start > buckets[0] or j.stop - j.start > buckets[1]:
            return f"{tile}: by position, and no larger than {buckets}"
        j = region.keys.slice(*tile.keys)
        bias = position_bias(problem, torch.as_tensor(queries[i]), torch.as_tensor(keys[j]), torch.float64)
        times = np.array(1) if bias is None else np.rint(bias.exp().numpy()).astype(np.int64)
        got[:, heads, i, j] += np.broadcast_to(times, got[:, :, i, j].shape)[:, heads]
    return None

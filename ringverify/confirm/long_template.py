"""The source of the stand-alone script of a long case; `ringverify.confirm.long_script` fills it in."""

from ringverify.confirm.shared_template import HEAD, IMPORTED, MAIN, RANKS

SETTINGS = r"""
PIECE = 2048  # keys that the rows are computed with at a time
WORLD = <<world>>
RING = tuple(range(WORLD))
SHARDING, LAYOUT = <<sharding>>, <<layout>>
DTYPE, LSE_DTYPE = getattr(torch, <<dtype>>), getattr(torch, <<lse_dtype>>)
RETURNS_LSE, COTANGENT = <<returns_lse>>, <<cotangent>>
WAYS = <<ways>>  # torch's mode, and which of q, k and v require gradients
PROBLEM = Fields(**<<problem>>)
QUERIES = <<queries>>  # positions of each rank's queries
KEYS = <<keys>>  # and of its keys
SEED = <<seed>>
SINKS = <<sinks>>  # learned sinks of the query heads, or None
SINKS_IN_PARTS = <<sinks_in_parts>>  # whether a rank returns the gradient of its own queries to them, not of all
BOOKS = <<books>>  # vectors of classes of queries and of keys, and which class is whose; None: all vectors differ
ROWS = <<rows>>  # positions of the queries that are computed again; if not None, all other cotangents are zero
BESIDE = <<beside>>  # of queries whose dq has to be zero
CHOSEN = <<chosen>>  # of keys of which dk and dv are computed again
M = <<multiplicity>>  # how often these queries attend each key: (batch, heads, queries, keys)
RMS, UNIT = <<rms>>, <<unit>>  # largest root mean square error, in units, and the rows (batch, sequence, heads) of it
ALLOWED = <<allowed>>  # errors: (batch, queries or chosen keys, heads, dim); lse (batch, heads, queries)
SUM = <<sum>>  # where sums over all rows are compared: which, batch element, key head, dimension, and the error allowed
WITH_KEYS = <<with_keys>>  # then, which queries have keys: (heads, queries)


"""

RESULTS = r'''
def words(name, positions, width):
    """Random bytes, a row for each position: SplitMix64 on a counter."""
    start = np.uint64((SEED * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode()) * 0xD1B54A32D192ED03) % 2**64)
    count = -(-width // 8)
    x = positions.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(1, count + 1, dtype=np.uint64)
    x = x * np.uint64(0x9E3779B97F4A7C15) + start
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).astype("<u8").view(np.uint8)[:, :width]


def query_classes(b, h, at):
    """The class of each query."""
    return words(f"a {b} {h}", at, 1)[:, 0].astype(np.int64) % BOOKS["seekers"]


def key_classes(b, h, at):
    """The class of each key."""
    return np.searchsorted(BOOKS["limits"], words(f"c {b} {h}", at, 8).view("<u8")[:, 0] / 2.0**64, side="right")


def make_q(b, h, at):
    """Queries."""
    if BOOKS:
        return BOOKS["queries"][query_classes(b, h, at)]
    return (words(f"q {b} {h}", at, PROBLEM.head_dim).astype(float) * 2 - 255) / 128


def make_k(b, h, at):
    """Keys."""
    if BOOKS:
        return BOOKS["keys"][key_classes(b, h, at)]
    return (words(f"k {b} {h}", at, PROBLEM.head_dim).astype(float) * 2 - 255) / 128


def make_v(b, h, at):
    """Values: half of one goes with the key, a quarter with its place, and a quarter is its own."""
    own = words(f"v {b} {h}", at, PROBLEM.dv) // 4 * 2.0 - 63
    if BOOKS:
        levels = words(f"v of classes {b} {h}", key_classes(b, h, at), 1)
    else:
        line = np.where(words("line", np.arange(1), PROBLEM.head_dim)[0] % 2, 1, -1) / np.sqrt(PROBLEM.head_dim)
        levels = np.clip(make_k(b, h, at) @ line[:, None] * 64 + 128, 0, 255).astype(np.uint8)
    signs = np.where(words("signs", np.arange(1), PROBLEM.dv)[0] % 2, 1, -1)
    place = 2 * (at * 63 // max(PROBLEM.nk, 1)) - 62
    return (own + levels // 2 * 2.0 - 126 + place[:, None] * signs) / 256


def make_dout(b, h, at):
    """Cotangents of out, before those of other rows are zero."""
    return (words(f"dout {b} {h}", at, PROBLEM.dv) // 2 * 2.0 + 1) / 256


def make_dlse(b, h, at):
    """Cotangents of lse, likewise."""
    if COTANGENT != "both":
        return np.zeros((len(at), 1))
    return (words(f"dlse {b} {h}", at, 1) * 2.0 - 255) / 256


def stacked(make, heads, at):
    """What is made of every element and head, (batch, n, heads, dim)."""
    return np.stack([np.stack([make(b, h, at) for h in range(heads)], axis=1) for b in range(PROBLEM.batch)])


def shard(make, heads, width, at, dtype):
    """A rank's tensor."""
    found = torch.empty((PROBLEM.batch, len(at), heads, width), dtype=dtype)
    for start in range(0, len(at), PIECE):
        found[:, start : start + PIECE] = torch.from_numpy(stacked(make, heads, at[start : start + PIECE]))
    return found


def results_of(function, rank, group, requiring):
    """What the implementation gives on one rank, as far as it is compared."""
    p, at, key_at, swap = PROBLEM, QUERIES[rank], KEYS[rank], LAYOUT == "bhsd"
    q, k = shard(make_q, p.heads, p.head_dim, at, DTYPE), shard(make_k, p.hk, p.head_dim, key_at, DTYPE)
    v, dout = shard(make_v, p.hk, p.dv, key_at, DTYPE), shard(make_dout, p.heads, p.dv, at, DTYPE)
    dlse = shard(make_dlse, p.heads, 1, at, LSE_DTYPE)
    if ROWS is not None:
        others = torch.from_numpy(~np.isin(at, ROWS))
        dout[:, others], dlse[:, others] = 0.0, 0.0
    dlse = dlse[..., 0].transpose(1, 2).contiguous()
    if swap:
        q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    sinks = () if SINKS is None else (torch.tensor(SINKS, dtype=torch.float32),)
    for x in (q, k, v, *sinks) if requiring else ():
        x.requires_grad_()
    call = SimpleNamespace(
        sinks=sinks[0] if sinks else None,
        group=group,
        rank=rank,
        world_size=WORLD,
        problem=p,
        sharding=SHARDING,
        page_table=None,
        offset=p.diagonal,
        positions=torch.from_numpy(at.copy()),
        key_positions=torch.from_numpy(key_at.copy()),
        scale=p.scale_value,
        **{n: getattr(p, n) for n in ("causal", "window", "dilation", "documents", "key_lengths", "softcap")},
    )
    returned = function(q, k, v, call)
    if RETURNS_LSE and not (isinstance(returned, tuple) and len(returned) == 2):
        raise ContractError(f"returned a {type(returned).__name__}: (out, lse) is expected")
    out, lse = returned if RETURNS_LSE else (returned, None)
    if not isinstance(out, torch.Tensor) or out.shape != dout.shape or out.dtype != DTYPE:
        raise ContractError(f"returned another out than {DTYPE} {tuple(dout.shape)}")
    found = {"out": out}
    if requiring:
        pairs = [(out, dout)] + ([(lse, dlse.to(lse.dtype))] if COTANGENT == "both" and lse.requires_grad else [])
        results_, cotangents = zip(*pairs)
        leaves = (q, k, v, *sinks)
        gradients = torch.autograd.grad(results_, leaves, cotangents, allow_unused=True)
        for name, leaf, x in zip(("dq", "dk", "dv", "dsinks"), leaves, gradients):
            found[name] = torch.zeros_like(leaf) if x is None else x
    dsinks = found.pop("dsinks", None)
    found = {name: (x.transpose(1, 2) if swap else x).detach() for name, x in found.items()}
    if lse is not None:
        found["lse"] = lse.detach().transpose(1, 2)[..., None]
    if dsinks is not None:
        found["dsinks"] = dsinks.to(torch.float64)
    return sums_of(found, rank) if SUM is not None else rows_of(found, rank)


def rows_of(found, rank):
    """The rows that are compared, with what is made of the same."""
    arrays = {}
    for name, x in found.items():
        if name == "dsinks":
            arrays[name] = x.numpy()
            continue
        wanted, own = (CHOSEN, KEYS[rank]) if name in ("dk", "dv") else (ROWS, QUERIES[rank])
        arrays[name] = x[:, torch.from_numpy(np.flatnonzero(np.isin(own, wanted)))].to(torch.float64).numpy()
        if name == "dq":
            here = np.flatnonzero(np.isin(own, BESIDE))
            arrays["beside"] = x[:, torch.from_numpy(here)].to(torch.float64).numpy()
    return arrays


def to_sink(found, b, h, at):
    """The weight of the sink in rows of a head, and what they give to its gradient, by the out and lse of the ring."""
    if SINKS is None or SINKS[h] == -inf:
        return np.zeros(len(at)), np.zeros(len(at))
    out, lse = (found[name][b, : len(at), h].to(torch.float64).numpy() for name in ("out", "lse"))
    weight = np.exp(SINKS[h] - lse[:, 0])
    return weight, weight * (make_dlse(b, h, at)[:, 0] - (make_dout(b, h, at) * out).sum(axis=-1))


def sums_of(found, rank):
    """This rank's part of two sums over all rows that have to be the same."""
    which, b, kh, d, _ = SUM
    left = right = np.zeros(1)
    if which == 4:
        at = QUERIES[rank] if rank == 0 or not SHARDING.startswith("replicated") else QUERIES[rank][:0]
        right = right + (float(found["dsinks"][d]) if rank == 0 or SINKS_IN_PARTS else 0.0)
        return {"left": left + sum(to_sink(found, b, d, at)[1].sum() for b in range(PROBLEM.batch)), "right": right}
    for h in range(kh * PROBLEM.group_size, (kh + 1) * PROBLEM.group_size):
        at = QUERIES[rank] if rank == 0 or not SHARDING.startswith("replicated") else QUERIES[rank][:0]
        if which in (0, 2):
            name, make = (("out", make_dout), None, ("dq", make_q))[which]
            terms = make(b, h, at)[:, d] * found[name][b, : len(at), h, d].to(torch.float64).numpy()
        else:
            (weight, lost), dlse = to_sink(found, b, h, at), make_dlse(b, h, at)[:, 0]
            of_rows = (1 - weight) * make_dout(b, h, at)[:, d] if which == 1 else (dlse - lost) * make_q(b, h, at)[:, d]
            terms = of_rows * WITH_KEYS[h][at] * (1 if which == 1 else PROBLEM.scale_value)
        left = left + terms.sum()
    name, make = (("dv", make_v), ("dv", None), ("dk", make_k), ("dk", None))[which]
    terms = found[name][b, :, kh, d].to(torch.float64).numpy()
    right = right + (terms if make is None else terms * make(b, kh, KEYS[rank])[:, d]).sum()
    return {"left": left, "right": right}


'''

COMPARE = r'''
def dense():
    """out, lse, dq of the rows, and dk and dv of the chosen keys, in float64 by the formulas of attention."""
    p, at = PROBLEM, ROWS
    q, dout = (stacked(make, p.heads, at).swapaxes(1, 2) for make in (make_q, make_dout))
    dlse = stacked(make_dlse, p.heads, at).swapaxes(1, 2)[..., 0]

    def of_keys(keys):
        k, v = (stacked(m, p.hk, keys).repeat(p.group_size, axis=2).swapaxes(1, 2) for m in (make_k, make_v))
        s, slope = q @ k.swapaxes(2, 3) * p.scale_value, 1.0
        if p.softcap is not None:
            slope = 1 / np.cosh(s / p.softcap) ** 2
            s = p.softcap * np.tanh(s / p.softcap)
        m = M[..., keys].astype(np.float64)
        return k, v, np.where(m > 0, s + np.log(np.maximum(m, 1)), -inf), slope

    pieces = [np.arange(start, min(start + PIECE, p.nk)) for start in range(0, p.nk, PIECE)]
    top, total, out = np.full(dlse.shape, -inf), np.zeros(dlse.shape), np.zeros(dout.shape)
    for keys in pieces:
        _, v, s, _ = of_keys(keys)
        new = np.maximum(top, s.max(axis=-1, initial=-inf))
        shift = np.where(new == -inf, 0.0, new)
        weights, kept = np.exp(s - shift[..., None]), np.exp(top - shift)
        total, out, top = kept * total + weights.sum(-1), kept[..., None] * out + weights @ v, new
    if SINKS is not None:  # one more key, of this score and value 0
        sink = np.broadcast_to(SINKS[:, None], top.shape)
        new = np.maximum(top, sink)
        shift = np.where(new == -inf, 0.0, new)
        kept = np.exp(top - shift)
        total, out, top = kept * total + np.exp(sink - shift), kept[..., None] * out, new
    some = total > 0
    lse = np.where(some, np.log(np.where(some, total, 1.0)) + np.where(some, top, 0.0), -inf)
    out = out / np.where(some, total, 1.0)[..., None]
    towards = np.where(some, dlse - (dout * out).sum(-1), 0.0)[..., None]

    def differentiated(keys):
        k, v, s, slope = of_keys(keys)
        weights = np.exp(s - np.where(some, lse, 0.0)[..., None])
        return k, weights, weights * (dout @ v.swapaxes(2, 3) + towards) * slope * p.scale_value

    dq = np.zeros(q.shape)
    for keys in pieces:
        k, _, ds = differentiated(keys)
        dq += ds @ k
    _, weights, ds = differentiated(CHOSEN)
    of_heads = (ds.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dout)
    dk, dv = (x.reshape(p.batch, p.hk, p.group_size, *x.shape[2:]).sum(axis=2) for x in of_heads)
    found = {"out": out, "lse": lse[..., None], "dq": dq, "dk": dk, "dv": dv}
    found = {name: x.swapaxes(1, 2) for name, x in found.items()}
    if SINKS is not None:
        weights = np.where(some, np.exp(SINKS[:, None] - np.where(some, lse, 0.0)), 0.0)
        found["dsinks"] = (weights * towards[..., 0]).sum(axis=0)  # by query
    return found


def compare(folder):
    """Compare, say by how much results are off, and give back which are, and what was said of them."""
    returned = []
    for rank in range(WORLD):
        with np.load(f"{folder}/{rank}-0.npz") as results:
            returned.append(dict(results))
    if SUM is not None:
        which, b, kh, d, allowed = SUM
        left, right = (sum(float(one[side][0]) for one in returned) for side in ("left", "right"))
        name = ("dv", "dv", "dk", "dk", "dsinks")[which]
        line = f"sum over all rows of {name}, key head {kh}, dimension {d}: {right:.9g}, expected {left:.9g}"
        print(line)
        wrong = not abs(left - right) <= allowed
        return ([f"the sum of {name}"], [line]) if wrong else ([], [])
    right, off, said, squares = dense(), [], [], {name: [] for name in RMS}
    for rank, results in enumerate(returned):
        for name, seen in results.items():
            own = KEYS[rank] if name in ("dk", "dv") else QUERIES[rank]
            positions = {"dk": CHOSEN, "dv": CHOSEN, "beside": BESIDE}.get(name, ROWS)
            place = np.searchsorted(positions, own[np.isin(own, positions)])
            expected, allowed = np.zeros(seen.shape), np.zeros(seen.shape)
            if name == "dsinks":
                expected = right[name][:, place if SINKS_IN_PARTS else slice(None)].sum(axis=1)
                allowed = ALLOWED[name]
            elif name != "beside":
                expected, allowed = right[name][:, place], ALLOWED[name][:, place]
            with np.errstate(invalid="ignore"):
                error = np.where(seen == expected, 0.0, np.abs(seen - expected))
            wrong = ~(error <= allowed)
            named = "dq" if name == "beside" else name
            worst = np.nan_to_num(error, nan=inf).max(initial=0.0)
            line = f"rank {rank} {named:<3}  largest difference {worst:.3g}; "
            line += f"{int(wrong.sum())} of {seen.size} elements of these rows differ by more than allowed"
            print(line)
            if wrong.any():
                off.append(f"{named} on rank {rank}")
                said.append(line)
            if name in RMS:
                relative = (error**2).sum(-1) / (expected**2).sum(-1).clip(min=np.finfo(float).tiny)
                squares[name].append(relative[RMS[name][1][:, place]])
    for name, (limit, _) in RMS.items():
        rms = np.sqrt(np.concatenate(squares[name]).mean()) / UNIT
        line = f"all ranks {name:<3}  root mean square error {rms:.3g} u, where at most {limit:.3g} u is allowed"
        print(line)
        if not rms <= limit:
            off.append(f"{name} in the mean")
            said.append(line)
    return list(dict.fromkeys(off)), said


'''

TEMPLATE = HEAD + SETTINGS.lstrip() + IMPORTED + RESULTS.lstrip() + RANKS + COMPARE.lstrip() + MAIN

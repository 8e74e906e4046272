"""The source of the stand-alone script of a case of the ordinary suites; `ringverify.confirm.script` fills it in."""

from ringverify.confirm.shared_template import HEAD, IMPORTED, MAIN, RANKS

SETTINGS = r"""WORLD, RING = <<world>>, <<ring>>  # processes, and those of them that are the ring
SHARDING, LAYOUT, MEMORY = <<sharding>>, <<layout>>, <<memory>>
DTYPE = getattr(torch, <<dtype>>)
RETURNS_LSE, COTANGENT = <<returns_lse>>, <<cotangent>>
SINKS = <<sinks>>  # whether a rank's gradient of sinks is the whole one (True) or that of its own queries ("partial")
WAYS = <<ways>>  # of each call: torch's mode, and which of q, k and v require gradients
PROBLEM = Fields(**<<problem>>)
CALLS = <<calls>>  # of each: the problem, queries before it, positions of each rank's queries and of its keys
PAGES = <<pages>>  # the page table of a cache
QUERIES = <<queries>>  # positions of each rank's queries
KEYS = <<keys>>  # and of its keys
INPUTS = <<inputs>>  # (batch, sequence, heads, dim); dlse (batch, heads, sequence)
M = <<multiplicity>>  # how often query i attends key j: (batch, heads, queries, keys)
ALLOWED = <<allowed>>
RMS, UNIT = <<rms>>, <<unit>>  # largest root mean square error, in units, and the rows (batch, sequence, heads) of it


"""

RESULTS = r'''def lay_out(array, dtype):
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


def sharding():
    """The sharding in force: a name, or a cache's of queries and of keys."""
    queries, slash, keys = SHARDING.partition("/")
    return QueryKeySharding(queries=queries, keys=PAGES or keys) if slash else SHARDING


def dense():
    """out, lse, dq, dk, dv and, by query, dsinks of dense attention in float64, by autograd."""
    q, k, v = (torch.tensor(INPUTS[name]).nan_to_num().requires_grad_() for name in "qkv")
    m = torch.tensor(M)
    group = PROBLEM.group_size
    kh, vh = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, kh) * PROBLEM.scale_value
    if PROBLEM.softcap is not None:
        s = PROBLEM.softcap * torch.tanh(s / PROBLEM.softcap)
    empty = (m == 0).all(dim=-1)
    s = torch.where(m > 0, s + torch.log(m.clamp(min=1)), -torch.inf)
    sinks = torch.tensor(INPUTS.get("sinks", np.zeros(0)))[:, None].repeat(1, s.shape[2]).requires_grad_()
    if PROBLEM.sinks:  # one more key, of this score and value 0
        s = torch.cat([s, sinks[None, :, :, None].expand(*s.shape[:3], 1)], dim=-1)
        vh = torch.cat([vh, vh.new_zeros(vh.shape[0], 1, *vh.shape[2:])], dim=1)
        empty = (s == -torch.inf).all(dim=-1)
    s = torch.where(empty[..., None], 0.0, s)  # a row without keys: any finite number, for its gradient is 0
    lse = torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    p = torch.where(empty[..., None], 0.0, torch.exp(s - lse[..., None]))
    out = torch.einsum("bhqk,bkhd->bqhd", p, vh)
    loss = (out * torch.tensor(INPUTS["dout"])).sum()
    loss = loss + (torch.where(empty, 0.0, lse) * torch.tensor(INPUTS["dlse"])).sum()
    found = torch.autograd.grad(loss, (q, k, v, sinks), allow_unused=True)
    lse = torch.where(empty, -torch.inf, lse)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip((q, k, v, sinks), found)]
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    return {name: x.detach().numpy() for name, x in zip(names, (out, lse, *gradients))}


def results_of(function, rank, group, requiring):
    """What the implementation gives on one rank of the ring, as arrays: the rows of all calls."""
    parts = [results_of_call(function, rank, group, requiring, *call) for call in CALLS]
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts], 2 if name == "lse" else 1) for name in parts[0]}


def results_of_call(function, rank, group, requiring, problem, before, queries, keys):
    """The same of one call."""
    swap = LAYOUT == "bhsd"
    asked = [before + position for position in queries[rank]]
    rows = {"q": asked, "dout": asked, "k": keys[rank], "v": keys[rank]}
    local = {name: INPUTS[name][:, np.array(at, dtype=np.int64)] for name, at in rows.items()}
    q, k, v, dout = (lay_out(local[n].swapaxes(1, 2) if swap else local[n], DTYPE) for n in ("q", "k", "v", "dout"))
    leaves = {name: x.requires_grad_() for name, x in zip("qkv", (q, k, v)) if name in requiring}
    sinks = torch.tensor(INPUTS["sinks"], dtype=torch.float32) if PROBLEM.sinks else None
    if PROBLEM.sinks and "q" in requiring:
        leaves["sinks"] = sinks.requires_grad_()
    call = SimpleNamespace(
        sinks=sinks,
        group=group,
        rank=rank,
        world_size=len(RING),
        problem=problem,
        sharding=sharding(),
        page_table=PAGES,
        offset=problem.diagonal,
        positions=torch.tensor(queries[rank], dtype=torch.int64),
        key_positions=torch.tensor(keys[rank], dtype=torch.int64),
        scale=problem.scale_value,
        **{n: getattr(problem, n) for n in ("causal", "window", "dilation", "documents", "key_lengths", "softcap")},
    )
    returned = function(q, k, v, call)
    if RETURNS_LSE and not (isinstance(returned, tuple) and len(returned) == 2):
        raise ContractError(f"returned a {type(returned).__name__}: (out, lse) is expected")
    out, lse = returned if RETURNS_LSE else (returned, None)
    results = {"out": out}
    if RETURNS_LSE:
        results["lse"] = lse
    for name, x in results.items():
        if not isinstance(x, torch.Tensor):
            raise ContractError(f"returned a {type(x).__name__} for {name}: a tensor is expected")
    if out.shape != dout.shape or out.dtype != DTYPE:
        raise ContractError(f"returned out as {out.dtype} {tuple(out.shape)}: {DTYPE} {tuple(dout.shape)} is expected")
    if requiring:
        pairs = []
        if COTANGENT != "lse":
            pairs.append((out, dout))
        if COTANGENT != "out" and lse is not None and (requiring != "v" or lse.requires_grad):
            dlse = INPUTS["dlse"][:, :, np.array(asked, dtype=np.int64)]
            pairs.append((lse, lay_out(dlse, torch.promote_types(DTYPE, torch.float32)).to(lse.dtype)))
        attached = [(result, cotangent) for result, cotangent in pairs if result.requires_grad]
        if len(attached) < len(pairs) and any(x.numel() for x in leaves.values() if x is not sinks):
            raise ContractError("returned a result that is not attached to q, k and v by autograd")
        found = [None] * len(leaves)
        if attached:
            results_, cotangents = zip(*attached)
            found = torch.autograd.grad(results_, tuple(leaves.values()), cotangents, allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), found):
            results["d" + name] = torch.zeros_like(leaf) if gradient is None else gradient
    arrays = {}
    for name, x in results.items():
        x = x.detach().to(torch.float64)
        arrays[name] = (x.transpose(1, 2) if swap and name not in ("lse", "dsinks") else x).numpy()
    return arrays


'''

COMPARE = r'''def compare(folder):
    """Compare, say by how much results are off, and give back which are, and what was said of them."""
    right, off, said, squares = dense(), [], [], {name: [] for name in RMS}
    for rank, number in [(rank, number) for rank in range(len(RING)) for number in range(len(WAYS))]:
        way = f" ({WAYS[number][0]}, gradients of {WAYS[number][1] or 'nothing'})" if len(WAYS) > 1 else ""
        with np.load(f"{folder}/{rank}-{number}.npz") as results:
            for name in results:
                rows = np.array(KEYS[rank] if name in ("dk", "dv") else QUERIES[rank], dtype=np.int64)
                at = (slice(None), slice(None), rows) if name == "lse" else (slice(None), rows)
                if name == "dsinks":  # by query: a sum over the rank's own, or over all
                    mine = rows if SINKS == "partial" and not SHARDING.startswith("replicated") else slice(None)
                    expected, allowed = (x[name][:, mine].sum(axis=1) for x in (right, ALLOWED))
                    seen = results[name]
                else:
                    seen, expected, allowed = results[name], right[name][at], ALLOWED[name][at]
                if seen.shape != expected.shape:
                    off.append(f"{name} on rank {rank}")
                    said.append(f"rank {rank} {name:<3}  has shape {seen.shape}: {expected.shape} is expected")
                    print(said[-1])
                    continue
                with np.errstate(invalid="ignore"):
                    error = np.where(seen == expected, 0.0, np.abs(seen - expected))
                worst = np.nan_to_num(error, nan=np.inf).max(initial=0.0)
                wrong = int((~((error <= allowed) | (allowed == inf))).sum())
                beyond = f"{wrong} of {seen.size} elements differ by more than allowed"
                line = f"rank {rank} {name:<3}  largest difference {worst:.3g}; {beyond}{way}"
                print(line)
                if wrong:
                    off.append(f"{name} on rank {rank}")
                    said.append(line)
                if name in RMS:
                    relative = (error**2).sum(-1) / (expected**2).sum(-1).clip(min=np.finfo(float).tiny)
                    squares[name].append(relative[RMS[name][1][at]])
    for name, (limit, _) in RMS.items():
        rms = np.sqrt(np.concatenate(squares[name]).mean()) / UNIT
        most = f"{limit:.3g} u is allowed (u = {UNIT:g})"
        line = f"all ranks {name:<3}  root mean square error {rms:.3g} u, where at most {most}"
        print(line)
        if not rms <= limit:
            off.append(f"{name} in the mean")
            said.append(line)
    return list(dict.fromkeys(off)), said


'''

TEMPLATE = HEAD + SETTINGS + IMPORTED + RESULTS + RANKS + COMPARE + MAIN

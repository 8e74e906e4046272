"""Events of runs that never were: every kind of verdict, of counterexample and of picture."""

import hashlib
import json

from ringverify.events import KINDS, from_json

HEADER = {
    "event": "header", "schema": 1, "started": "2026-01-02T03:04:05+00:00", "ringverify": "1.2.3", "torch": "2.11.0",
    "python": "3.11.0", "platform": "Linux x86_64", "device": "cpu", "suite": "quick", "seed": 0,
}  # fmt: skip
CODES = {"conformant": 0, "violations": 1, "inconclusive": 3}
PROPERTIES = (
    "forward", "lse", "gradients", "lse_gradient", "masked_rows", "overflow", "dtypes", "precision", "chunk_boundaries",
    "world_size_invariance", "exact_selection", "invariants", "isolation", "inputs_untouched", "strided_inputs",
    "uninitialised", "reentrancy", "subgroups", "hazards", "progress", "traffic", "memory", "determinism",
)  # fmt: skip


def row(name, property, verdict, **fields):
    """The event of a property."""
    plain = {"meaning": f"what {property} means", "examples": 20, "seconds": 0.5, "margin": 0.25}
    if verdict in ("unsupported", "inconclusive"):
        plain |= {"examples": 0, "seconds": 0.0, "margin": None}
    if verdict == "fail":
        plain |= {"examples": 3, "margin": 310000.0}
    return {"event": "property", "implementation": name, "property": property, "verdict": verdict, **plain, **fields}


def shards(*sizes):
    """The pieces of an axis on which the ranks hold so many positions each, one after another."""
    owners = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    return [[rank, position, position] for position, rank in enumerate(owners)]


def counterexample(name, property, **fields):
    """The event of a counterexample: two queries and two keys on two ranks, wrong at hop 1."""
    file = f".ringverify/{property}-0a1b2c3d.json"
    plain = {
        "case": {
            "problem": {"query_length": 2, "causal": True}, "sharding": "contiguous", "world_size": 2,
            "values": "normal", "memory": "contiguous", "cotangent": "out", "group": "world", "transport": "buffered",
            "delayed": [], "seed": 0, "schedule": 0,
        },
        "case_text": "2 ranks n=2 batch=1 heads=1 dim=8 float32 contiguous causal values=normal seed=0 schedule=0",
        "rank": 1, "hop": 1, "tensor": "out", "index": [0, 0, 0, 2], "position": 1, "actual": 0.25, "expected": 0.125,
        "error": 0.125, "allowed": 2.5e-6, "margin": 50000.0, "wrong": {"1": 4}, "of": 8,
        "summary": "out is wrong on rank 1: 4 of 8 elements",
        "diagnosis": "the block of the last hop is never merged (residual 3e-07)",
        "where": {
            "tensor": "out", "rows": {"1": [1]}, "heads": [0],
            "pairs": [{"rank": 1, "owner": 0, "hop": 1, "keys": [0], "what": "missing"}],
            "text": ["out, rank 1 query 0 (position 1)", "rank 1 does not attend key 0 of rank 0 (hop 1)"],
        },
        "region": {
            "tensor": "out", "queries": shards(1, 1), "keys": shards(1, 1), "pattern": ["10", "11"],
            "pairs": ["00", "53"], "rows": ["0", "5"],
        },
        "detail": "", "after": [], "tried": 17, "smallest": True, "repeats": True, "file": file,
        "shrunk_from": "7 ranks n=21 batch=2 heads=4/2 dim=16 float32 zigzag causal values=normal seed=9 schedule=5",
        "replay": f"ringverify replay {file}",
    }  # fmt: skip
    head = {"event": "counterexample", "implementation": name, "property": property}
    return {**head, **plain, **fields}


def tried(name):
    """The event of what was tried: 40 examples, and no window on a single rank."""
    return {
        "event": "tried", "implementation": name,
        "features": {
            "world size": {"1": 10, "2": 30}, "causal": {"no": 16, "yes": 24}, "window": {"left": 8, "no": 32},
            "property": {"forward": 20, "gradients": 20},
        },
        "pairs": [
            "", "", "4 12", "6 18", "0 8 2 6", "10 22 14 18", "5 15 8 12 3 17", "5 15 8 12 5 15",
        ],
    }  # fmt: skip


NO_VALUES = {
    "tensor": None,
    "index": None,
    "error": None,
    "allowed": None,
    "diagnosis": None,
    "where": None,
    "hop": None,
}
IN_BLOCKS = {
    "tensor": "dq", "rank": 0, "hop": None, "index": [0, 1, 1, 0], "position": 1,
    "diagnosis": None, "needs": {"requires": ["at least 3 ranks"], "irrelevant": ["length", "masks"], "complete": True},
    "summary": "dq is wrong on ranks 0, 2: 7 of 96 elements",
    "where": {
        "tensor": "dq", "rows": {"0": [0, 1], "2": [5]}, "heads": [0, 1],
        "pairs": [
            {"rank": 0, "owner": 2, "hop": 1, "keys": [4, 5], "what": "missing"},
            {"rank": 2, "owner": 1, "hop": 1, "keys": [2, 3], "what": "missing"},
        ],
        "text": ["dq, rank 0 queries 0–1; rank 2 query 1", "on rank 0 the part of rank 2's keys (hop 1) is missing"],
    },
    "region": {
        "tensor": "dq", "queries": shards(2, 2, 2), "keys": shards(2, 2, 2), "pattern": ["111111"] * 6, "pairs": None,
        "rows": ["11", "46", "00", "00", "00", "90"],
    },
}  # fmt: skip
OF_KEYS = {
    "tensor": "dv", "rank": 0, "hop": 2, "index": [0, 1, 0, 0], "position": 3, "summary": "dv is wrong on rank 0",
    "where": {
        "tensor": "dv", "rows": {"0": [0, 3]}, "heads": [0],
        "pairs": [{"rank": 2, "owner": 0, "hop": 2, "keys": [0, 3], "what": "forbidden"}],
        "text": ["dv, rank 0 keys 0–1", "on rank 0 the part of rank 2's queries (hop 2) is not 0 as it should be"],
    },
    "region": {
        "tensor": "dv", "queries": [[0, 0, 0], [0, 3, 3], [1, 1, 1], [1, 4, 4], [2, 2, 2], [2, 5, 5]],
        "keys": [[0, 0, 0], [0, 3, 3], [1, 1, 1], [1, 4, 4], [2, 2, 2], [2, 5, 5]],
        "pattern": ["100000", "111010", "101000", "111110", "101010", "111111"],
        "pairs": ["000000", "000000", "000000", "000000", "020000", "000000"], "rows": ["0", "2", "0", "0", "0", "0"],
    },
}  # fmt: skip
DEADLOCK = NO_VALUES | {
    "rank": None,
    "summary": "deadlock: rank 0 waits for a receive from rank 1, tag 0; rank 1 has returned",
    "detail": "rank 0 waits for a receive from rank 1, tag 0\nrank 0 at\n  my_package/ring.py:41 in attend",
    "region": {
        "tensor": None, "queries": shards(1, 1), "keys": shards(1, 1), "pattern": ["11", "11"], "pairs": None,
        "rows": None,
    },
}  # fmt: skip
HOSTILE = NO_VALUES | {
    "rank": 1,
    "summary": 'rank 1 raised ValueError: <script>alert("1")</script> & "quotes" | pipes ``` \x00\x1b[31m \ud800',
    "detail": "\n".join(f'  File "ring.py", line {n}, in step_{n}' for n in range(400)) + "\n]]> <b>bold</b>",
    "region": None,
    "repeats": False,
    "after": ["2 ranks n=2"],
}
KNOWN = {"reason": "dk and dv are unpacked from the wrong pair", "link": "https://example.org/issues/12"}


def run(implementations, **header):
    """A whole run: `{name: (verdict, events)}`."""
    events, verdicts = [HEADER | header], []
    for name, (verdict, told) in implementations.items():
        kinds = [event["verdict"] for event in told if event["event"] == "property"]
        events += told
        verdicts.append(verdict)
        events.append(
            {
                "event": "implementation", "implementation": name, "verdict": verdict, "world": "simulated",
                "not_run_in": ["gloo"], "undeclared": ["documents", "dilation"],
                "untried": ["world size 3-4", "softcap"] if verdict == "conformant" else [],
                "properties": {kind: kinds.count(kind) for kind in ("pass", "fail", "unsupported", "inconclusive")},
                "not_run": 0, "examples": 20 * kinds.count("pass"), "runs": 99, "seconds": 12.5, "seconds_inside": 5.0,
            }
        )  # fmt: skip
    verdict = next((v for v in ("violations", "inconclusive") if v in verdicts), "conformant")
    unexpected = [event["unexpected"] for event in events if "unexpected" in event]
    footer = {"event": "footer", "verdict": verdict, "exit_code": CODES[verdict]}
    return [*events, footer | ({"known": 1, "unexpected": unexpected} if unexpected else {})]


RIGHT = {"my_package.ring.attend": ("conformant", [row("my_package.ring.attend", "forward", "pass")])}


def everything():
    """Four implementations: all kinds of verdicts, of counterexamples and of pictures, and text that means harm."""
    wrong, odd, none = "wrong_ring.attend", "odd <b>name</b> & |pipe|", "nothing applies"
    right = "my_package.ring.attend"
    return run(
        {
            right: (
                "conformant",
                [
                    row(right, "forward", "pass"),
                    row(right, "lse", "unsupported", reason="lse=True is not declared"),
                    row(right, "gradients", "pass", margin=0.998, reason="the time budget ended after 20 of 200"),
                    tried(right),
                ],
            ),
            wrong: (
                "violations",
                [
                    row(wrong, "forward", "fail"),
                    counterexample(wrong, "forward"),
                    row(
                        wrong,
                        "lse",
                        "inconclusive",
                        reason="the time budget ended before the first example: raise --time-budget",
                    ),
                    row(wrong, "gradients", "fail", known=KNOWN),
                    counterexample(wrong, "gradients", **IN_BLOCKS),
                    row(wrong, "isolation", "fail"),
                    counterexample(wrong, "isolation", **OF_KEYS),
                ],
            ),
            odd: (
                "violations",
                [
                    row(odd, "forward", "fail", margin=None),
                    counterexample(odd, "forward", **HOSTILE),
                    row(odd, "progress", "fail", margin=None),
                    counterexample(odd, "progress", **DEADLOCK),
                    row(odd, "determinism", "pass", unexpected="baseline known.toml: determinism passes"),
                ],
            ),
            none: ("inconclusive", [row(none, "forward", "unsupported", reason="device cuda is not declared")]),
        }
    )  # fmt: skip


def crowd(count=10):
    """So many implementations that fail every property, with the largest picture and the longest text there can be."""
    found = {}
    for number in range(count):
        name = f"organisation.package_{number}.attention.ring_attention_with_a_long_name"
        digits = ["".join(str((3 * y + 7 * x + number) % 10) for x in range(24)) for y in range(24)]
        region = {
            "tensor": "out", "queries": shards(*[6] * 4), "keys": shards(*[6] * 4),
            "pattern": ["01" * 12, "10" * 12] * 12, "pairs": digits, "rows": [line[:16] for line in digits],
        }  # fmt: skip
        told = []
        for property in PROPERTIES:
            told.append(row(name, property, "fail"))
            detail = "\n".join(f'  File "/some/where/package/ring.py", line {n}, in step_{n} <&>' for n in range(60))
            told.append(counterexample(name, property, region=region, detail=detail))
        found[name] = ("violations", told)
    return run(found)


def typed(told):
    """Events of these JSON values."""
    return [from_json(KINDS[one["event"]], one) for one in told]


def lines(events):
    """As a report has them, without a seal."""
    return "".join(json.dumps(event) + "\n" for event in events)


def sealed(events):
    """A report of these events, whose seal is that which docs and schema tell of."""
    seal = hashlib.sha256(lines(events).encode()).hexdigest()
    return lines([*events[:-1], {**events[-1], "seal": seal}])

"""What `ringverify bench` shows, from a report that is made up."""

import io

from rich.console import Console
from test_terminal import assert_as_recorded

from ringverify.bench.markdown import page
from ringverify.bench.memory import COMPONENTS
from ringverify.bench.table import Tables


def spread(median):
    """A spread about a median."""
    return {"median": median, "low": 0.9 * median, "high": 1.25 * median}


def row(side, forward, **ratios):
    """A side whose backward takes twice as long as its forward."""
    passes = {}
    for name, times in (("forward", 1), ("backward", 2), ("both", 3)):
        passes[name] = {"seconds": spread(times * forward), "rounds": [times * forward]}
        passes[name] |= {key: spread(value) for key, value in ratios.items()}
    return {"side": side, **passes}


PHASES = [{"compute": 0.9, "communication": 0.02, "merge": 0.05, "other": 0.03, "total": 1.0}] * 2
BYTES = {name: (number + 1) << 18 for number, name in enumerate(COMPONENTS)}
REPORT = {
    "bench": 1,
    "ringverify": "1.2.3",
    "torch": "2.11.0",
    "python": "3.11.0",
    "platform": "Linux x86_64",
    "machine": {"cpu": "A Processor", "processors": 2, "load_before": 0.25, "load_after": 1.5, "cuda": None},
    "options": {"rounds": 5, "sides": ["plain", "ring", "floor", "peer:a-package"]},
    "remarks": ["left out: peer:another needs the package another==1.0: pip install 'ringverify[peers]'"],
    "speed": [
        {
            "pattern": "dense",
            "title": "dense, not causal, n=8192, 2 ranks contiguous, 8 × 64 float32",
            "length": 8192,
            "ranks": 2,
            "rows": [
                row("plain", 0.5, to_plain=1.0), row("ring", 0.505, to_plain=1.01, to_floor=1.02), row("floor", 2e-3),
            ],
            "left_out": [{"side": "peer:a-package", "reason": "window is not declared"}],
            "phases": {"forward": PHASES, "backward": PHASES},
            "sinks": {"ring": {"forward": spread(1.01), "both": spread(1.005)}},
        }
    ],
    "memory": [
        {
            "pattern": "dense",
            "target": "ring",
            "entries": [
                {"length": 4096, "ranks": ranks, "positions": 4096 / ranks, "peak": sum(BYTES.values()) // ranks,
                 "measured": BYTES, "predicted": BYTES, "to_predicted": 1.05}
                for ranks in (1, 2)
            ],
            "exponents": {"1": 1.0, "2": None, "3 and more": 0.9876},
        }
    ],
    "cuda": {"device": None, "reason": "no CUDA device here", "speed": []},
}  # fmt: skip


def shown(report):
    """What the terminal shows of a report, where it is no terminal."""
    file = io.StringIO()
    Tables(Console(file=file, force_terminal=False, color_system=None)).everything(report)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def test_a_benchmark_looks_as_recorded():
    """Every kind of table."""
    assert_as_recorded("bench", shown(REPORT))


def test_a_busy_machine_is_named():
    """Its numbers tell as much about others."""
    busy = {**REPORT, "machine": {**REPORT["machine"], "load_before": 7.0}}
    assert "load average 7.0 on 2 processors: other programs are running" in shown(busy)
    assert "other programs were running" in page(busy)


def test_the_page_of_a_benchmark_looks_as_recorded():
    """The same numbers."""
    assert_as_recorded("bench_page", page(REPORT))


def test_a_device_has_rows():
    """Instead of the line that there is none."""
    cuda = {"device": "A GPU", "reason": None, "speed": [{"title": "dense", "rows": [row("flash", 0.1, to_plain=1.0)]}]}
    text = shown({**REPORT, "cuda": cuda})
    assert "A GPU: dense" in text
    assert "× flash" in text
    assert "no CUDA device" not in text
    assert "### A GPU: dense" in page({**REPORT, "cuda": cuda})

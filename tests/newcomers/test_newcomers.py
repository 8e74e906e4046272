"""Right rings, written by somebody who had read only the README: none is accused, and of none is nothing learned.

Their files are as their authors wrote them, with the declarations that the README asks for by now; docs/first-ten-minutes.md
tells what came of them at first. A few cases of each are tried here; `check` on this folder's files tries more.
"""

import sys
from pathlib import Path

import pytest
from report_lines import report_lines

from ringverify.cli.main import main

HERE = Path(__file__).parent
TRIED = "forward,gradients,isolation,inputs_untouched,reentrancy"
"""Properties that were once hard on code like this, or could be."""
RINGS = [
    "allgather_sdpa.py:attend",
    "allgather_sdpa.py:attend_bf16_sums",
    "causal_ring.py:attend",
    "decode_merge.py:attend",
    "dilated_split.py:attend",
    "gqa_mesh_ring.py:attend",
    "megatron_module.py:attend",
    "megatron_module.py:attend_cached",
    "packed_window.py:attend",
    "striped_ring.py:attend",
    "ulysses.py:attend",
    "ulysses.py:attend_padded",
    "zigzag_ring.py:attend",
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.by_day(4)
def test_a_right_ring_of_a_newcomer_is_conformant(ring, tmp_path, monkeypatch, capsys):
    """In the world that suits it: one keeps its module for the life of the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code = main(["check", str(HERE / ring), "--only", TRIED, "--max-examples", "3", "--report", "report.jsonl", "-q"])
    told = capsys.readouterr()
    assert code == 0, told.out + told.err
    verdicts = {event["verdict"] for event in report_lines(Path("report.jsonl")) if event["event"] == "property"}
    assert verdicts == {"pass"}

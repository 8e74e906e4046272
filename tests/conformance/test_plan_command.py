"""`ringverify plan` as its users meet it."""

import pytest

from ringverify.cli.main import main


def test_it_draws_ranks_by_hops_and_says_how_the_work_is_balanced(capsys, monkeypatch):
    """Zigzag halves: every rank computes the same, and no pair is computed in vain."""
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["plan", "--length", "4096", "--ranks", "4", "--causal", "--sharding", "zigzag"]) == 0
    out = capsys.readouterr().out
    assert "hop 3" in out
    assert out.count(" 1.00 ") == 4
    assert out.splitlines()[-1].endswith("= 1.000")


def test_where_there_is_no_room_a_step_is_one_sign(capsys, monkeypatch):
    """As many as fit; bytes are in the balance."""
    command = ["plan", "--length", "1920", "--ranks", "30", "--sharding", "striped", "--bucket", "64"]
    shown = {30: "  29  " + "█" * 23 + "…", 36: "  29  " + "█" * 30, 2000: "hop 29"}
    for columns, words in shown.items():
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(command) == 0
        drawn = capsys.readouterr().out.split("balance")[0].splitlines()
        assert any(words in line for line in drawn)
        assert max(map(len, drawn)) <= columns


def test_a_block_that_is_passed_on_only_is_a_dot(capsys, monkeypatch):
    """Neighbours share a segment at their edge, so that rank 1 has from rank 2 what rank 0 has no use for."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--length", "64", "--ranks", "3", "--dilation", "8:1"]) == 0
    assert "\n   0  ███  · " in capsys.readouterr().out


def test_segments_within_a_rank_move_nothing(capsys):
    """There is no hop at all."""
    assert main(["plan", "--length", "4096", "--ranks", "4", "--dilation", "512:1,1024:4"]) == 0
    out = capsys.readouterr().out
    assert "hop 1" not in out
    assert out.count("0 B") == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks: '0': expected a whole number of at least 1"),
        (["--ranks", "2", "--dilation", "4-2"], "--dilation: '4-2': expected W:R"),
        (["--ranks", "2", "--window", "3"], "window=(3,): expected (left, right)"),
        (["--ranks", "2", "--documents", "0,x"], "--documents 0,x: expected whole numbers"),
        (["--ranks", "2", "--bucket", "0"], "--bucket: '0': expected a whole number of at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(options, message, capsys):
    """The value, what was expected, and nothing else."""
    assert main(["plan", "--length", "64", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1

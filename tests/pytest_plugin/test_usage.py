"""What is mistyped: one line that names it and the way out, exit status 4, and nothing run or written."""

import pytest

pytestmark = pytest.mark.timeout(240)

USAGE = 4
RIGHT = ("--ringverify", "right.py:attend")

# What is typed, and what the line has to name.
MISTAKES = {
    "unknown target": (["--ringverify", "rng"], ["'rng'", "did you mean 'ring'?"]),
    "file that is not there": (["--ringverify", "no.py:attend"], ["'no.py'", "the whole path"]),
    "plain function": (["--ringverify", "right.py:attention"], ["is a function", "@ringverify.implementation(...)"]),
    "unknown property": ([*RIGHT, "--ringverify-only", "forwad"], ["'forwad'", "did you mean 'forward'?"]),
    "nothing left": ([*RIGHT, "--ringverify-skip", "lse", "--ringverify-only", "lse"], ["--ringverify-skip names"]),
    "one target twice": ([*RIGHT, *RIGHT], ["'right' is named twice"]),
    "unknown suite": (["--ringverify-suite", "slow"], ["--ringverify-suite 'slow'", "quick, full, nightly"]),
    "unknown world": ([*RIGHT, "--ringverify-world", "mars"], ["--ringverify-world 'mars'", "gloo"]),
    "world size 0": ([*RIGHT, "--ringverify-world-sizes", "2,0"], ["--ringverify-world-sizes '2,0'", "at least 1"]),
    "no examples": ([*RIGHT, "--ringverify-max-examples", "0"], ["--ringverify-max-examples '0'", "at least 1"]),
    "no jobs": ([*RIGHT, "--ringverify-jobs", "0"], ["--ringverify-jobs '0'", "at least 1, or auto"]),
    "jobs of processes": (
        ["--ringverify", "right.py:attend_in_processes", "--ringverify-jobs", "2"],
        ["--ringverify-jobs 2", "gloo", "leave --ringverify-jobs out"],
    ),
    "processes as threads": (
        ["--ringverify", "right.py:attend_in_processes", "--ringverify-world", "simulated"],
        ["processes=True", "use --ringverify-world gloo"],
    ),
    "world sizes not declared": (
        ["--ringverify", "right.py:attend_in_processes", "--ringverify-world-sizes", "5"],
        ["(1, 2)", "--ringverify-world-sizes 5"],
    ),
    "report in no folder": ([*RIGHT, "--ringverify-report", "a/b.jsonl"], ["a/b.jsonl", "name another file"]),
    "baseline that is not there": (["--ringverify-baseline", "no.toml"], ["no.toml", "name another file"]),
    "id with too many parts": (["ringverify::ring::forward::2"], ["ringverify::TARGET::PROPERTY"]),
    "id of an unknown property": (["ringverify::right.py:attend::forwad"], ["'forwad'", "did you mean 'forward'?"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.by_day(3)
def test_wrong_usage_is_one_line_and_exit_status_4(mistake, project):
    """pytest prints it after "ERROR: "."""
    arguments, words = MISTAKES[mistake]
    before = [path.name for path in project.folder.iterdir()]
    ran = project.pytest(*arguments, "-p", "no:cacheprovider")
    assert ran.code == USAGE, ran.out + ran.err
    (line,) = ran.err.strip().splitlines()
    assert line.startswith("ERROR: ringverify: ")
    for word in words:
        assert word in line
    assert ran.out.strip() == ""
    assert {path.name for path in project.folder.iterdir()} <= {*before, "__pycache__"}


@pytest.mark.nightly
def test_a_target_that_ends_its_process_when_it_is_imported_does_not_end_pytest(project):
    """With exit status 0 nothing would have been checked, and nobody would know."""
    project.write(gone="import os\n\nos._exit(0)\n")
    ran = project.pytest_apart("--ringverify", "gone.py:attend", *RIGHT)
    assert ran.code == USAGE
    assert ran.err.strip() == "ERROR: ringverify: gone.py:attend ends its process while it is imported (exit code 0)"


def test_a_mistake_in_the_project_file_is_named_with_that_file(project):
    """It is not on the command line."""
    (project.folder / "pytest.ini").write_text("[pytest]\nringverify_seed = -3\n")
    ran = project.pytest()
    assert ran.code == USAGE
    assert ran.err.strip() == (
        "ERROR: ringverify: pytest.ini: ringverify_seed '-3': expected a whole number of at least 0"
    )


def test_under_torchrun_the_command_is_named_that_knows_it(project):
    """Every process would run every test."""
    ran = project.pytest(*RIGHT, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert ran.code == USAGE
    assert "torchrun … -m ringverify check TARGET" in ran.err

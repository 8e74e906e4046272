"""The steps of a workflow or an action as a runner takes them: expressions filled in, then bash. No runner needed."""

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
NAME = re.compile(r"'[^']*'|[A-Za-z_][\w-]*(?:\.[\w-]+)*(\(\))?")


def document(path):
    """A YAML file of the project; `on` is a key there, and no truth value."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return {"on" if key is True else key: value for key, value in yaml.safe_load(text).items()}


def workflows():
    """The project's workflows."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github" / "workflows").iterdir())


def steps_of(path):
    """Every step of a workflow or an action, with the name of its job."""
    content = document(path)
    jobs = content["jobs"] if "jobs" in content else {"action": content["runs"]}
    return [(job, step) for job, told in jobs.items() for step in told["steps"]]


def evaluated(expression, known):
    """The value of an expression: names, texts, `||`, `&&`, `==`, `!=` and calls such as `always()`.

    Raises:
        KeyError: a name is not known.
    """

    def python(match):
        word = match.group()
        if word.startswith("'"):
            return repr(word[1:-1])
        return "True" if match.group(1) else repr(known[word])

    words = NAME.sub(python, expression)
    return eval(words.replace("&&", " and ").replace("||", " or "), {"__builtins__": {}})


def filled(text, known):
    """A text with the values of its expressions."""
    return EXPRESSION.sub(lambda match: str(evaluated(match.group(1), known)), str(text))


@dataclasses.dataclass
class Ran:
    """What came of steps.

    Attributes:
        codes: exit codes of those that ran, by name; one without a name is called as its commands.
        used: what other actions were used, with their inputs.
        out: all that they printed.
        summary: what they wrote for the summary of the job.
        outputs: what they wrote as outputs.
    """

    codes: dict[str, int]
    used: list[tuple[str, dict[str, str]]]
    out: str
    summary: str
    outputs: dict[str, str]


def run(steps, known, folder, *, environment=None, timeout=100):
    """Take the steps in a folder as a runner does; after one that fails, only those with `always()`.

    Args:
        steps: steps of one job.
        known: values of names such as `inputs.target` and `github.action_path`.
        folder: where they run.
        environment: variables of the job.
        timeout: seconds for each.
    """
    files = {name: folder / f".runner-{name}" for name in ("summary", "output")}
    for path in files.values():
        path.write_text("")
    ran, failed = Ran({}, [], "", "", {}), False
    for step in steps:
        condition = str(step.get("if", "success()"))
        if failed and not re.search(r"always\(\)|failure\(\)", condition):
            continue
        if not evaluated(condition, known):
            continue
        if "uses" in step:
            ran.used.append((step["uses"], {key: filled(value, known) for key, value in step.get("with", {}).items()}))
            continue
        variables = {key: filled(value, known) for key, value in step.get("env", {}).items()}
        process = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
                **variables,
                "GITHUB_STEP_SUMMARY": str(files["summary"]),
                "GITHUB_OUTPUT": str(files["output"]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        ran.codes[step.get("name", step["run"])] = process.returncode
        ran.out += process.stdout
        failed = failed or process.returncode != 0
    ran.summary = files["summary"].read_text(encoding="utf-8")
    ran.outputs = dict(line.split("=", 1) for line in files["output"].read_text(encoding="utf-8").splitlines())
    return ran

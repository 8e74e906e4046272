"""The walls and floors of the design. Each is held by a test, and each test is shown a tree that breaks it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from imports import Import, cycle, imports, is_below, modules, reachable
from pickles import WITHIN_A_WORLD, pickles
from private_torch import EXPLAINED, explained, private_torch
from tolerances import literal_tolerances
from wordings import HOME, decisions

ROOT = Path(__file__).resolve().parent.parent.parent

FLOORS = {
    "ringverify.__main__": 8,
    "ringverify.cli": 7,
    "ringverify.pytest_plugin": 7,
    "ringverify.testing": 6,
    "ringverify.confirm": 6,
    "ringverify.vectors": 6,
    "ringverify.bench": 6,
    "ringverify.scale": 6,
    "ringverify.reach": 6,
    "ringverify.merging": 6,
    "ringverify.lab": 6,
    "ringverify.check": 5,
    "ringverify.properties": 4,
    "ringverify.diagnosis": 4,
    "ringverify.cases": 3,
    "ringverify.faults": 3,
    "ringverify.peers": 3,
    "ringverify.strategies": 3,
    "ringverify": 2,
    "ringverify.describing": 2,
    "ringverify.implementation": 2,
    "ringverify.merge_contract": 2,
    "ringverify.programs": 2,
    "ringverify.targets": 2,
    "ringverify.ring": 2,
    "ringverify.worlds": 1,
    "ringverify.reports": 1,
    "ringverify.events": 1,
    "ringref": 1,
    "ringverify.environments": 0,
    "ringverify.errors": 0,
    "ringverify.files": 0,
    "ringverify.interrupts": 0,
    "ringverify.option_types": 0,
    "ringverify.words": 0,
}
GROUND = 1
"""The floor whose rooms know nothing of one another."""

KNOWN_ON_THE_GROUND = {("ringverify.reports", "ringverify.events")}
"""But presenters know the events that they present."""

FACE = ("ringverify", "types")
"""The package's own `__init__` names for type checkers what it hands out on demand, from whichever floor."""

SHARED_WITH_THE_RING = {"ringref.problem", "ringref.sharding"}


def room_of(module):
    """The room that a module is in; the package itself holds only its own `__init__`."""
    rooms = [room for room in FLOORS if is_below(module, room) and (room != "ringverify" or module == room)]
    return max(rooms, key=len, default=None)


def tree(root, **files):
    """A tree of small files: `ringverify__ring__fast="import x"` is ringverify/ring/fast.py."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


# -- 1. the reference knows nothing of the suite -----------------------------------------------------------------------


def breaches_of_wall_1(root):
    """Imports of ringverify in ringref."""
    return [str(i) for i in imports(root) if is_below(i.importer, "ringref") and is_below(i.imported, "ringverify")]


def test_ringref_imports_nothing_from_ringverify():
    """Wall 1: in no form, at no time, not even for types."""
    assert breaches_of_wall_1(ROOT) == []


@pytest.mark.parametrize(
    "text",
    [
        "import ringverify.ring.mask",
        "from ringverify import targets",
        "from ringverify.ring.mask import Mask",
        "def f():\n    from ringverify.ring import mask",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ringverify",
        "import importlib\nimportlib.import_module('ringverify.ring')",
        "try:\n    pass\nfinally:\n    import ringverify",
    ],
)
def test_wall_1_can_fall(text, tmp_path):
    """Every form of import is seen."""
    assert len(breaches_of_wall_1(tree(tmp_path, ringref__attention=text))) == 1


# -- 2. what is shared cannot catch itself -----------------------------------------------------------------------------


def breaches_of_wall_2(root):
    """What the ring takes from the reference beyond the problem and the sharding, itself or through others."""
    edges = imports(root)
    direct = {
        edge.imported
        for edge in edges
        if is_below(edge.importer, "ringverify.ring") and is_below(edge.imported, "ringref")
    }
    through_others = {module for module in reachable("ringverify.ring", edges) if is_below(module, "ringref")}
    return sorted((direct | through_others) - SHARED_WITH_THE_RING)


def test_the_ring_takes_only_the_problem_and_the_sharding_from_ringref():
    """Wall 2: nothing that computes a pattern or attention, not even through another module."""
    assert breaches_of_wall_2(ROOT) == []
    assert any(is_below(edge.importer, "ringverify.ring") for edge in imports(ROOT))


@pytest.mark.parametrize(
    "files",
    [
        {"ringverify__ring__mask": "from ringref.pattern import multiplicity"},
        {"ringverify__ring__mask": "from ringref import pattern", "ringref__pattern": ""},
        {"ringverify__ring__mask": "def f():\n    import ringref.attention"},
        {"ringverify__ring__mask": "from ringref import Problem"},
        {
            "ringverify__ring__mask": "from ringverify.implementation import x",
            "ringverify__implementation": "def f():\n    from ringref.attention import attention",
            "ringref__attention": "",
        },
    ],
)
def test_wall_2_can_fall(files, tmp_path):
    """Directly, by way of the package, in a function, and through a module in between."""
    assert len(breaches_of_wall_2(tree(tmp_path, **files))) == 1


# -- 3. light to import ------------------------------------------------------------------------------------------------


def modules_after(code, root):
    """The modules that are loaded when a fresh interpreter has run some code."""
    process = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('', *sys.modules, sep='\\n')"],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(process.stdout.split())


def loaded_by(code, root):
    """The top-level modules that are loaded when a fresh interpreter has run some code."""
    return {module.split(".")[0] for module in modules_after(code, root)}


HELP = "import ringverify.cli.main\ntry:\n    ringverify.cli.main.main(['--help'])\nexcept SystemExit:\n    pass"
LIGHT = {
    "the package": "import ringverify",
    "the plug-in contract": "from ringverify import implementation\nimplementation()(lambda q, k, v, call: q)",
    "the ring's package": "import ringverify.ring",
    "the command line": "import ringverify.cli.main",
    "its help": HELP,
    "its lists": "from ringverify.cli.main import main\nmain(['list', 'implementations'])\nmain(['list', 'peers'])",
    "a mistyped target": "from ringverify.cli.main import main\nmain(['check', 'rng'])",
    "the reports": "import ringverify.reports.jsonl, ringverify.reports.terminal",
    "the pytest plugin": "import ringverify.pytest_plugin",
    "its session": "import ringverify.testing.session",
    "what a test file takes": "from ringverify import ConformanceError, conformance, run_conformance",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", LIGHT)
def test_torch_is_not_imported_by(what):
    """Wall 3: `pytest --help` and every typing error stay fast."""
    loaded = loaded_by(LIGHT[what], ROOT)
    assert "ringverify" in loaded
    assert "torch" not in loaded


@pytest.mark.timeout(60)
def test_the_reference_package_imports_neither_numpy_nor_torch():
    """Its modules import what they compute with."""
    assert not {"numpy", "torch"} & loaded_by("import ringref, ringref.problem", ROOT)


@pytest.mark.timeout(60)
def test_wall_3_can_fall(tmp_path):
    """A package that imports torch three modules down."""
    root = tree(
        tmp_path,
        torch="",
        ringverify____init__="import ringverify.first",
        ringverify__first="from ringverify import second",
        ringverify__second="import torch",
    )
    (root / "ringverify" / "__init__.py").write_text("import ringverify.first")
    assert "torch" in loaded_by("import ringverify", root)


# -- 4. tolerances have one home ---------------------------------------------------------------------------------------


def test_no_tolerance_is_written_outside_rounding():
    """Wall 4: a tolerance is a claim about arithmetic, and `ringref/rounding.py` derives it."""
    assert literal_tolerances(ROOT) == []


@pytest.mark.parametrize(
    "text",
    [
        "torch.allclose(a, b, atol=1e-5, rtol=limit)",
        "torch.allclose(a, b, limit, 1e-5)",
        "np.allclose(a, b)",
        "torch.testing.assert_close(a, b)",
        "assert a == pytest.approx(b)",
        "assert a == approx(b, abs=1e-3)",
        "assert a == pytest.approx(b, 2**-20)",
        "math.isclose(a, b, rel_tol=0.001)",
        "compare(a, b, atol=2e-2)",
        "assert abs(a - b) < 1e-6",
        "assert abs(a - b) <= 0.005",
        "assert 1e-1 > error",
        "assert error < 2**-10",
        "assert -1e-5 < a - b",
        "ATOL = 1e-5",
        "tolerance: float = 0.1",
        "def close(a, b, tol=0.1): ...",
        "def close(a, b, *, rtol=1e-2): ...",
    ],
)
@pytest.mark.parametrize("place", ["ringref__attention", "ringverify__cases__comparing", "tests__unit__test_it"])
def test_wall_4_can_fall(text, place, tmp_path):
    """In the packages and in the tests, whatever form it takes."""
    assert len(literal_tolerances(tree(tmp_path, **{place: text}))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "torch.allclose(a, b, atol=limit, rtol=0)",
        "assert error <= allowed",
        "assert margin <= 1",
        "assert seconds < 0.5",
        "assert (a == b).all()",
        "seconds = max(seconds, 1e-9)",
        "total = 5",
    ],
)
def test_wall_4_lets_pass_what_is_no_tolerance(text, tmp_path):
    """Derived limits, exact comparisons, and numbers that are something else."""
    assert literal_tolerances(tree(tmp_path, tests__test_it=text)) == []


def test_rounding_may_write_tolerances(tmp_path):
    """It is their home."""
    assert literal_tolerances(tree(tmp_path, ringref__rounding="ATOL = 1e-5\nx < 1e-9")) == []


# -- 5. no pickle between people ---------------------------------------------------------------------------------------


def test_nothing_is_pickled_but_inside_a_world():
    """Wall 5: vectors are safetensors, cases and reports are JSON. Every exception has its reason, and is needed."""
    files = {place.split(":")[0] for place in pickles(ROOT)}
    assert files == set(WITHIN_A_WORLD)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import dumps",
        "def f():\n    import cloudpickle",
        "import joblib.memory",
        "torch.save(case, path)",
        "case = torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "import shelve",
    ],
)
def test_wall_5_can_fall(text, tmp_path):
    """Pickle under any of its names."""
    assert len(pickles(tree(tmp_path, ringverify__check__casefile=text))) == 1


# -- 6. no wording decides anything ------------------------------------------------------------------------------------


def test_no_wording_of_a_failure_decides_anything():
    """Wall 6: what code needs to know of a failure is a field."""
    assert decisions(ROOT) == []
    assert (ROOT / HOME).is_file()


@pytest.mark.parametrize(
    "text",
    [
        "def f(failure):\n    return failure.message.startswith('rank 0')",
        "def f(failure):\n    return failure.message.split(':')[0]",
        "def f(violation):\n    return 'wrong' in violation.summary",
        "def f(violation):\n    return violation.summary == 'dk is wrong'",
        "def f(event):\n    return event['reason'].partition(':')",
        "def f(event):\n    return 'refused' in event.get('reason', '')",
        "import re\ndef f(failure):\n    return re.search('rank', failure.detail)",
        "import re\nP = re.compile('rank')\ndef f(failure):\n    return P.match(failure.detail)",
        "def f():\n    try:\n        pass\n    except OSError as error:\n        return 'memory' in str(error)",
        "def f():\n    try:\n        pass\n    except OSError as error:\n        return error.args[0] == 'memory'",
        "def f(error: BaseException):\n    return str(error).lower().endswith('memory')",
        "def f(error: Exception):\n    told = one_line(error)\n    return any(a in told for a in 'ab')",
        "def f(error: Exception):\n    for line in str(error).splitlines():\n        line.find('x')",
        "def f(failure):\n    match failure:\n        case F(message=told):\n            told.removeprefix('rank')",
        "def f(failure):\n    match failure.message:\n        case 'rank 0 died':\n            return 1",
        "class A:\n    def f(self, failure):\n        told = f'{failure.message}.'\n        told.replace('rank', '')",
        "def f(reasons: Sequence[str]):\n    return [one.split(' is ') for one in reasons]",
        "def f(sentence: str, earlier):\n    return sentence.startswith(earlier)",
        "def f(case, capabilities):\n    return 'sharding' in str(why_unsupported(case, capabilities))",
    ],
)
def test_wall_6_can_fall(text, tmp_path):
    """Every form of a look at the words, at what was made of them, and in the text of an exception."""
    assert len(decisions(tree(tmp_path, ringverify__check__hunting=text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def f(failure):\n    return f'rank 0: {failure.message}'",
        "def f(failure):\n    return failure.message is None or not failure.detail",
        "def f(failure):\n    return failure.detail.strip().splitlines()[:3]",
        "def f(failure):\n    return ' '.join(failure.detail.split())",
        "def f(failure):\n    return failure.kind == 'died' and 'reason' in failure.fields",
        "def f(reason: tuple[str, ...]):\n    return reason[0] == 'deadline'",
        "def f(case, capabilities):\n    return why_unsupported(case, capabilities) is None",
        "def f(error: Exception):\n    return isinstance(error, OSError) and error.errno == 12",
    ],
)
def test_wall_6_lets_texts_be_shown_and_fields_decide(text, tmp_path):
    """What is joined, cut and handed on is not read."""
    assert decisions(tree(tmp_path, ringverify__check__hunting=text)) == []


def test_what_others_say_only_in_words_has_one_file(tmp_path):
    """The text of torch's and gloo's errors is looked at there and nowhere else."""
    text = "def f(error: Exception):\n    return 'closed by peer' in str(error)"
    assert decisions(tree(tmp_path, ringverify__worlds__foreign_text=text)) == []
    assert len(decisions(tree(tmp_path, ringverify__worlds__limits=text))) == 1


# -- 7. private interfaces of torch ------------------------------------------------------------------------------------


def test_private_interfaces_of_torch_sit_in_one_file_a_room():
    """Wall 7: the file is called torch_private.py. Every exception has its reason, and is needed."""
    assert private_torch(ROOT) == []
    assert explained(ROOT) == set(EXPLAINED)


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "import torch.distributed._functional_collectives as collectives",
        "from torch._C import _push_on_torch_dispatch_stack",
        "from torch._compile import _disable_dynamo",
        "from torch.distributed import _functional_collectives",
        "import torch\ntorch._C.x()",
        "import torch as t\nt.ops.aten._softmax(x)",
        "from torch.distributed import distributed_c10d as c10d\nworld = c10d._world",
        "import torch\nworld = getattr(torch.distributed.distributed_c10d, '_world', None)",
        "import importlib\nimportlib.import_module('torch.distributed.tensor._api')",
        "def f(group):\n    return group._get_sequence_number_for_group()",
        "def f(operation):\n    return getattr(operation, '_schema', None)",
    ],
)
def test_wall_7_can_fall(text, tmp_path):
    """Every form of import and attribute is seen, at home and with users as elsewhere; there it is let pass."""
    places = ("ringverify__ring__attention", "ringverify__ring__torch_private", "ringverify__peers__torch_ring")
    found = private_torch(tree(tmp_path, **dict.fromkeys(places, text)))
    assert [place.split(":")[0] for place in found] == ["ringverify/ring/attention.py"]


@pytest.mark.parametrize("text", ["import torch\ntorch.__version__", "self._world = 1", "from ours import _private"])
def test_wall_7_lets_pass_what_is_not_torchs(text, tmp_path):
    """Public names, and private ones of our own."""
    assert private_torch(tree(tmp_path, ringverify__ring__attention=text)) == []


# -- the lab -----------------------------------------------------------------------------------------------------------

LAB = "ringverify.lab"
MAINTAINERS_COMMAND = ("ringverify.cli.mutants", "call")
"""The one import of the lab from outside it: what `ringverify mutants` loads when it runs."""


def breaches_of_the_lab(root):
    """Imports of the lab from outside it, but for those of the maintainers' own command."""
    return [
        str(edge)
        for edge in imports(root)
        if is_below(edge.imported, LAB)
        and not is_below(edge.importer, LAB)
        and (edge.importer, edge.when) != MAINTAINERS_COMMAND
    ]


def test_only_the_maintainers_command_imports_the_lab():
    """Kill scores, false alarms and the survey are for maintainers: nobody who checks a ring loads them."""
    assert breaches_of_the_lab(ROOT) == []
    assert any(is_below(edge.imported, LAB) and edge.importer == MAINTAINERS_COMMAND[0] for edge in imports(ROOT))


@pytest.mark.parametrize(
    "files",
    [
        {"ringverify__check__run": "from ringverify.lab import killing"},
        {"ringverify__testing__session": "def f():\n    import ringverify.lab.killing"},
        {"ringverify__pytest_plugin": "import importlib\nimportlib.import_module('ringverify.lab.killing')"},
        {"ringverify__implementation": "from typing import TYPE_CHECKING as T\nif T: import ringverify.lab.killing"},
        {"ringverify__cli__mutants": "import ringverify.lab.killing"},
        {"ringverify__cli__main": "def f():\n    import ringverify.lab.killing"},
    ],
)
def test_the_walls_of_the_lab_can_fall(files, tmp_path):
    """At once, in a call, by name, for types; and in the command itself, before it runs."""
    assert len(breaches_of_the_lab(tree(tmp_path, ringverify__lab__killing="", **files))) == 1


CHECKS = """
import ringverify, ringverify.pytest_plugin, ringverify.testing.session, ringverify.testing.checks
from ringverify.cli.main import main
assert main(["check", "ring", "--only", "forward", "--max-examples", "1", "--world-sizes", "1", "-q"]) == 0
"""


@pytest.mark.timeout(60)
def test_the_package_the_plugin_and_a_check_do_not_load_the_lab(tmp_path):
    """Shown by a run to its verdict."""
    loaded = modules_after(f"import os; os.chdir({str(tmp_path)!r})\n{CHECKS}", ROOT)
    assert "ringverify.check.run" in loaded
    assert not [module for module in loaded if is_below(module, LAB)]


def test_what_a_fresh_interpreter_loads_of_the_lab_is_seen(tmp_path):
    """The proof that the test above can fail."""
    root = tree(tmp_path, ringverify__lab__killing="")
    (root / "ringverify" / "__init__.py").write_text("import ringverify.lab.killing")
    assert [module for module in modules_after("import ringverify", root) if is_below(module, LAB)]


# -- floors ------------------------------------------------------------------------------------------------------------


def breaches_of_the_floors(root):
    """Imports upwards, between the grounds, and round."""
    edges = imports(root)
    found = [f"{module} is on no floor" for module in modules(root) if room_of(module) is None]
    rooms = set()
    for edge in edges:
        here, there = room_of(edge.importer), room_of(edge.imported)
        if (edge.importer, edge.when) == FACE:
            continue
        if None in (here, there) or here == there:
            continue
        rooms.add((here, there))
        if FLOORS[there] > FLOORS[here]:
            found.append(f"{edge}: up from floor {FLOORS[here]} to floor {FLOORS[there]}")
        elif FLOORS[there] == FLOORS[here] == GROUND and (here, there) not in KNOWN_ON_THE_GROUND:
            found.append(f"{edge}: grounds know nothing of one another")
    round_rooms = cycle({pair for pair in rooms if FLOORS[pair[0]] == FLOORS[pair[1]]})
    round_modules = cycle({(edge.importer, edge.imported) for edge in edges if edge.when != "types"})
    return found + [f"round: {' → '.join(way)}" for way in (round_rooms, round_modules) if way]


def test_imports_run_downwards_over_their_floors():
    """Never back up, never round, and no module without a floor."""
    assert breaches_of_the_floors(ROOT) == []
    assert len(imports(ROOT)) > 100


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"ringverify__cases__case": "import ringverify.check.run"}, "up from floor 3 to floor 5"),
        ({"ringverify__errors": "from ringverify.implementation import x"}, "up from floor 0 to floor 2"),
        ({"ringverify__implementation": "def f():\n    import ringverify.cases.case"}, "up from floor 2 to floor 3"),
        (
            {"ringverify__properties__p": "from typing import TYPE_CHECKING as T\nif T: import ringverify.cli.main"},
            "up from floor 4 to floor 7",
        ),
        ({"ringverify__worlds__world": "import ringref.problem"}, "grounds know nothing"),
        ({"ringverify__reports__html": "from ..worlds import world"}, "grounds know nothing"),
        ({"ringverify__worlds__world": "import ringverify.events"}, "grounds know nothing"),
        ({"ringverify__events": "import ringverify.reports.page"}, "grounds know nothing"),
        ({"ringverify__fast": ""}, "ringverify.fast is on no floor"),
        (
            {
                "ringverify__targets": "import ringverify.ring.declared",
                "ringverify__ring__declared": "from .. import targets",
            },
            "round: ringverify.ring → ringverify.targets → ringverify.ring",
        ),
        (
            {"ringverify__cases__a": "from . import b", "ringverify__cases__b": "def f():\n    from . import a"},
            "round: ringverify.cases.a → ringverify.cases.b → ringverify.cases.a",
        ),
    ],
)
def test_the_floors_can_break(files, words, tmp_path):
    """Up, across the ground, off the plan, round the rooms and round the modules."""
    breaches = breaches_of_the_floors(tree(tmp_path, **files))
    assert [breach for breach in breaches if words in breach], breaches


def test_imports_for_types_do_not_make_a_circle(tmp_path):
    """They do not run; they do count for the floors."""
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ringverify.cases import a"
    root = tree(tmp_path, ringverify__cases__a="from ringverify.cases import b", ringverify__cases__b=types)
    assert breaches_of_the_floors(root) == []
    assert [edge.when for edge in imports(root)] == ["load", "types"]


def test_the_package_names_what_it_hands_out_for_type_checkers_only(tmp_path):
    """What lives on upper floors is named there, and imported when it is asked for."""
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ringverify.check.run import check"
    root = tree(tmp_path, ringverify__check__run="")
    (root / "ringverify" / "__init__.py").write_text(types)
    assert breaches_of_the_floors(root) == []
    (root / "ringverify" / "__init__.py").write_text("def f():\n    from ringverify.check.run import check")
    assert [words for words in breaches_of_the_floors(root) if "up from floor 2 to floor 5" in words]


def test_an_import_knows_when_it_runs(tmp_path):
    """While loading, in a call, or never."""
    text = (
        "from typing import TYPE_CHECKING\n"
        "import ringref.problem\n"
        "if TYPE_CHECKING:\n"
        "    import ringref.pattern\n"
        "class A:\n"
        "    import ringref.sharding\n"
        "    def f(self):\n"
        "        import ringref.attention\n"
    )
    assert imports(tree(tmp_path, ringverify__cases__x=text)) == [
        Import("ringverify.cases.x", 2, "ringref.problem", "load"),
        Import("ringverify.cases.x", 4, "ringref.pattern", "types"),
        Import("ringverify.cases.x", 6, "ringref.sharding", "load"),
        Import("ringverify.cases.x", 8, "ringref.attention", "call"),
    ]

"""What a case file says enters a script as literals: whatever it says, the script is the same program."""

import ast
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.check.casefile import CaseFile
from ringverify.confirm.script import snippet
from ringverify.implementation import Capabilities

PLAIN = CaseFile(
    target="mine.py:attend", property="gradients", world="simulated", device="cpu", after=(), digest="", summary="",
    made_with="", case=Case(problem=Problem(query_length=1)),
)  # fmt: skip
TEXTS = [field.name for field in dataclasses.fields(CaseFile) if field.type == "str"]
HARMLESS = ("C:\\users", '"""', "\0", "\udc80", "one\ntwo", "\r", "\u2028", "\\", "\x1a", "\u202e", "\ufeff", "\x1b[2J")
FORGED = (
    '"""\nimport os\nos.system("touch forged")\n"""',
    "'; import os #",
    "<<problem>>",
    "<<about>>",
    "# coding: latin-1",
    "a.py:b\nimport os",
    "mutant:A1; import os",
    ":",
)
PIECES = st.sampled_from([*HARMLESS, *FORGED])
ANYTHING = st.one_of(
    st.text(), st.text(st.characters()), st.lists(st.one_of(PIECES, st.text()), max_size=4).map("".join)
)


def script(**texts):
    """The script of a case file with such texts."""
    return snippet(dataclasses.replace(PLAIN, **texts), Capabilities()).text


def shape(text):
    """A program but for its literals."""
    tree = ast.parse(text.encode("ascii"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value, node.kind = None, None
    return ast.dump(tree)


SHAPE = shape(script())


def test_these_are_the_texts_of_a_case_file():
    """A new one is tried as well."""
    assert TEXTS == ["target", "property", "world", "device", "digest", "summary", "made_with"]


@settings(max_examples=60)
@given(texts=st.fixed_dictionaries(dict.fromkeys(TEXTS, ANYTHING)))
def test_whatever_the_texts_of_a_case_say_its_script_is_the_same_program(texts):
    """It compiles, and its syntax tree is the same but for literals."""
    assert shape(script(**texts)) == SHAPE


@pytest.mark.parametrize("text", [*HARMLESS, *FORGED])
def test_a_text_that_looks_like_code_is_a_literal(text):
    """Each by itself, in every field; and it stands there as it was."""
    written = script(**dict.fromkeys(TEXTS, text))
    assert shape(written) == SHAPE
    (about,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(written).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ABOUT"
    )
    assert (about["wrong"], about["target"], about["recorded by"]) == (text, text, text)


def test_scripts_that_differ_in_their_title_are_one_program():
    """So that confirm runs it once."""
    capabilities = Capabilities()
    first = snippet(PLAIN, capabilities)
    second = snippet(dataclasses.replace(PLAIN, summary="another"), capabilities)
    assert first.program == second.program
    assert first.text != second.text
    assert snippet(dataclasses.replace(PLAIN, target="a:b"), capabilities).program != first.program

"""Tables of docs/options.md and of the README, made from the code that they are about."""

import dataclasses
from collections.abc import Iterable

from ringverify.check.option_table import OPTIONS, Option
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.property import Property


def options_table(options: tuple[Option, ...] = OPTIONS) -> str:
    """What can be asked for, and how it is said in each place."""
    rows = [
        "| `check` | says | default | `[tool.ringverify]` | pytest | `run_conformance` |",
        "|---|---|---|---|---|---|",
    ]
    for option in options:
        flags = ", ".join(f"`{flag}`" for flag in (option.short, f"--{option.key}") if flag)
        pytest = [f"`--ringverify-{option.key}`"] if option.pytest else []
        pytest += [f"`ringverify_{option.name}`"] if option.argument else []
        argument = f"`{option.name}`" if option.argument else ""
        cells = (flags, _choices(option), option.default, f"`{option.key}`", ", ".join(pytest), argument)
        rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(rows)


def _choices(option: Option) -> str:
    known = f": {', '.join(f'`{one}`' for one in option.choices)}" if option.choices else ""
    there = f" (in pytest: {option.in_pytest})" if option.in_pytest else ""
    return f"{option.meaning}{known}{there}"


def capabilities_table(declared: type = Capabilities) -> str:
    """What can be declared, and what is taken for declared where nothing is said."""
    rows = ["| keyword | default | says |", "|---|---|---|"]
    for field in dataclasses.fields(declared):
        rows.append(f"| `{field.name}` | `{written(field.default)}` | {field.metadata['meaning']} |")
    return "\n".join(rows)


def properties_table(properties: Iterable[Property] = PROPERTIES.values()) -> str:
    """What must hold, as `ringverify list properties` says it."""
    return "\n".join(["| property | |", "|---|---|", *(f"| `{one.id}` | {one.meaning} |" for one in properties)])


def written(value: object) -> str:
    """A default as it is written in code."""
    return repr(value).replace("'", '"')

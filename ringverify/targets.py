"""Find the implementation that a target names: a built-in name, `module:attribute`, a file's attribute or a program."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ringverify import environments
from ringverify.errors import Inconclusive, UsageError
from ringverify.implementation import Implementation
from ringverify.merge_contract import MergeImplementation
from ringverify.worlds.exceptions import exit_call, one_line, trace_of
from ringverify.worlds.external.process import PROGRAM, command_of
from ringverify.worlds.limits import limit_of, sentence

_loading: list[str] = []
"""Files and modules that are being loaded as targets, the innermost last."""

BUILT_IN: dict[str, str] = {
    "ring": "ringverify.ring.declared:ring",
    "allgather": "ringverify.ring.declared:allgather",
    "peer:ring-attention-pytorch": "ringverify.peers.ring_attention_pytorch:attend",
    "peer:ring-attention-pytorch-tree-decode": "ringverify.peers.tree_attention:attend",
    "peer:ring-flash-attn-ring": "ringverify.peers.ring_flash_attn:ring",
    "peer:ring-flash-attn-zigzag": "ringverify.peers.ring_flash_attn:zigzag",
    "peer:ring-flash-attn-stripe": "ringverify.peers.ring_flash_attn:stripe",
    "peer:ring-flash-attn-ring-varlen": "ringverify.peers.ring_flash_attn:ring_varlen",
    "peer:ring-flash-attn-zigzag-varlen": "ringverify.peers.ring_flash_attn:zigzag_varlen",
    "peer:ring-flash-attn-llama3": "ringverify.peers.ring_flash_attn:llama3",
    "peer:yunchang-ring": "ringverify.peers.yunchang:ring",
    "peer:yunchang-zigzag": "ringverify.peers.yunchang:zigzag",
    "peer:yunchang-stripe": "ringverify.peers.yunchang:stripe",
    "peer:yunchang-ulysses": "ringverify.peers.yunchang:ulysses",
    "peer:yunchang-hybrid": "ringverify.peers.yunchang:hybrid",
    "peer:yunchang-hybrid-zigzag": "ringverify.peers.yunchang:hybrid_zigzag",
    "peer:yunchang-hybrid-stripe": "ringverify.peers.yunchang:hybrid_stripe",
    "peer:yunchang-hybrid-packed": "ringverify.peers.yunchang:hybrid_packed",
    "peer:yunchang-torch-math": "ringverify.peers.yunchang:torch_math",
    "peer:yunchang-torch-math-zigzag": "ringverify.peers.yunchang:torch_math_zigzag",
    "peer:yunchang-torch-math-stripe": "ringverify.peers.yunchang:torch_math_stripe",
    "peer:yunchang-torch-flash": "ringverify.peers.yunchang:torch_flash",
    "peer:yunchang-torch-flash-zigzag": "ringverify.peers.yunchang:torch_flash_zigzag",
    "peer:yunchang-torch-flash-stripe": "ringverify.peers.yunchang:torch_flash_stripe",
    "peer:yunchang-torch-ring": "ringverify.peers.yunchang:torch_ring",
    "peer:yunchang-torch-ulysses": "ringverify.peers.yunchang:torch_ulysses",
    "peer:torch-cp-allgather": "ringverify.peers.torch_context_parallel:allgather",
    "peer:torch-cp-alltoall": "ringverify.peers.torch_context_parallel:alltoall",
    "peer:torch-cp-allgather-balanced": "ringverify.peers.torch_context_parallel:allgather_balanced",
    "peer:torch-cp-alltoall-balanced": "ringverify.peers.torch_context_parallel:alltoall_balanced",
    "peer:torch-cp-flex": "ringverify.peers.torch_context_parallel:flex",
    "peer:torch-cp-flex-documents": "ringverify.peers.torch_context_parallel:flex_documents",
    "peer:torch-cp-flex-documents-balanced": "ringverify.peers.torch_context_parallel:flex_documents_balanced",
    "peer:dilated-attention-pytorch": "ringverify.peers.dilated_attention_pytorch:attend",
    "peer:deepspeed-ulysses": "ringverify.peers.deepspeed_ulysses:batch_first",
    "peer:deepspeed-ulysses-sequence-first": "ringverify.peers.deepspeed_ulysses:sequence_first",
    "peer:deepspeed-ulysses-hf": "ringverify.peers.deepspeed_ulysses:hf",
    "peer:diffusers-ring": "ringverify.peers.diffusers_context_parallel:ring",
    "peer:diffusers-ring-anything": "ringverify.peers.diffusers_context_parallel:ring_anything",
    "peer:diffusers-ulysses": "ringverify.peers.diffusers_context_parallel:ulysses",
    "peer:diffusers-ulysses-anything": "ringverify.peers.diffusers_context_parallel:ulysses_anything",
    "peer:diffusers-unified": "ringverify.peers.diffusers_context_parallel:unified",
}
"""Built-in names and where they are defined, as data: listing them imports nothing."""

MERGES = {
    "merge:ring": "ringverify.ring.declared_merge:merge_in_place",
    "merge:ring-flash-attn": "ringverify.peers.ring_flash_attn:merged",
    "merge:yunchang": "ringverify.peers.yunchang:merged",
    "merge:torch-cp": "ringverify.peers.torch_context_parallel:merged",
    "merge:natten": "ringverify.peers.natten_merge:merged",
}
"""Built-in merges, likewise."""

_NOT_THE_USERS = (
    str(Path(__file__).parent / "targets.py"),
    str(Path(__file__).parent / "implementation.py"),
    str(Path(__file__).parent / "merge_contract.py"),
    str(Path(__file__).parent / "reach" / "declared.py"),
    str(Path(importlib.__file__).parent),
)


ONLY_CHECK = "ringverify check is the command that takes it, see docs/merge.md"
"""What to do with a merge."""

MUTANT = "mutant:"
"""Prefix of the names of mutants, as in `mutant:A1`; `ringverify.faults.catalogue` holds them."""


def located(target: str) -> tuple[str, str | None]:
    """Split a target into its module or file and the attribute there, without importing anything.

    Returns:
        The module or file, and the attribute, `None` where the target names none; of a program, its command.

    Raises:
        UsageError: the target has no such form, or there is no such file, package or program.
    """
    if target in environments.ELSEWHERE:
        return target, None
    if is_program(target):
        try:
            return " ".join(command_of(target)), None
        except ValueError as error:
            raise UsageError(f"target {target!r}: {error}") from None
    location = location_of(target)
    module_name, separator, attribute = location.rpartition(":")
    if not separator and _is_module(location):
        module_name = location
    elif not separator or not module_name or not attribute or location.startswith(environments.PEER):
        module, dot, name = location.rpartition(".")
        dotted = [f"{module}:{name}"] if dot and name and _is_module(module) else []
        close = difflib.get_close_matches(target, (*BUILT_IN, *MERGES, *environments.ELSEWHERE), n=1) or dotted
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(
            f"unknown target {target!r}: expected a built-in name (ringverify list implementations), "
            f"module:attribute, path/to/file.py:attribute or 'program: COMMAND'{hint}"
        )
    if module_name.endswith(".py"):
        if not Path(module_name).is_file():
            raise UsageError(f"no file {module_name!r} in {Path.cwd()}: give the path from there, or the whole path")
    elif not _is_there(package := module_name.partition(".")[0]):
        raise UsageError(f"no module named {package!r}: is it installed, or on PYTHONPATH?")
    return module_name, attribute if separator else None


def from_anywhere(target: str) -> str:
    """Return a target with its file, if any, as an absolute path, so that it works from any working directory."""
    return with_file(target, lambda file: str(Path(file).resolve()))


def with_file(target: str, place: Callable[[str], str]) -> str:
    """Return a target with `place` applied to the path of its file; a target without a file is returned as it is."""
    file, _, attribute = target.rpartition(":")
    return f"{place(file)}:{attribute}" if file.endswith(".py") and not is_program(target) else target


def is_ours(module: str) -> bool:
    """Whether a module is part of the tool and no peer adapter, which would import another package."""
    return module.startswith("ringverify.") and not module.startswith("ringverify.peers.")


def load(target: str) -> Implementation:
    """Import the implementation that `target` names into this process: a rank's, or a disposable one.

    The tool's own process calls `ringverify.describing.describe` instead.

    Raises:
        UsageError: the target has no such form, cannot be imported, or is not an implementation.
        Inconclusive: the target is a peer whose package is not installed.
    """
    found = load_any(target)
    if isinstance(found, MergeImplementation):
        raise UsageError(f"target {target!r} is a merge, not an implementation of attention: {ONLY_CHECK}")
    return found


def load_merge(target: str) -> MergeImplementation:
    """Import the merge that `target` names, as `load` does an implementation."""
    found = load_any(target)
    if not isinstance(found, MergeImplementation):
        raise UsageError(f"target {target!r} is an implementation of attention, not a merge")
    return found


def load_any(target: str) -> Implementation | MergeImplementation:
    """Import the implementation or the merge that `target` names, as `load` does."""
    found = attribute_of(target)
    if not isinstance(found, (Implementation, MergeImplementation)):
        kind = type(found)
        if kind.__module__ == "ringverify.reach.declared":  # a room above this one
            raise UsageError(
                f"target {target!r} is a model, not an implementation: ringverify reach {target} is for it"
            )
        article = "an" if kind.__name__[0] in "aeiouAEIOU" else "a"
        raise UsageError(
            f"target {target!r} is {article} {kind.__name__}, not an implementation: decorate the function with "
            "@ringverify.implementation(...), or with @ringverify.merge(...) if it merges partial results"
            f"{_offer(_module(located(target)[0]))}"
        )
    return found


def attribute_of(target: str) -> Any:
    """Import what `target` names, whatever it is.

    Raises:
        UsageError: the target has no such form, or cannot be imported.
        Inconclusive: the target is a peer whose package is not installed.
    """
    module_name, attribute = located(target)
    if is_program(target):
        raise UsageError(f"target {target!r} is a program: it runs in a process of its own only")
    if attribute is None:
        raise UsageError(_which(module_name, _module(module_name)))
    try:
        module = _module(module_name)
    except Inconclusive as error:
        raise Inconclusive(f"{target} cannot be checked here: {error}") from error
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise UsageError(f"target {target!r}: {module_name} has no attribute {part!r}{_offer(module)}") from None
    return found


def _module(name: str) -> ModuleType:
    """Import the module of a dotted name or of a file."""
    _loading.append(name)
    try:
        return _load_file(name) if name.endswith(".py") else _load_module(name)
    finally:
        _loading.pop()


def _is_module(name: str) -> bool:
    """Whether a target without an attribute names a file, or a module that can be found."""
    if name.endswith(".py"):
        return True
    if name in BUILT_IN or not all(part.isidentifier() for part in name.split(".")):
        return False
    with _looking_here():
        return _origin(name) is not None


def _is_there(package: str) -> bool:
    """Whether a top-level module or package of this name can be found; imports nothing."""
    with _looking_here():
        try:
            return importlib.util.find_spec(package) is not None
        except ValueError:  # it is imported already, and its `__spec__` is None
            return True


KINDS = (Implementation, MergeImplementation)
"""Of what a target may be."""


def _which(name: str, module: ModuleType) -> str:
    """Return the message for a target without an attribute: the implementations in its module, as targets to type."""
    found = [f"{name}:{attribute}" for attribute, value in vars(module).items() if isinstance(value, KINDS)]
    match found:
        case []:
            return (
                f"{name} holds no implementation: decorate a function in it with @ringverify.implementation(...), or "
                "begin with ringverify init"
            )
        case [one]:
            return f"{name} holds one implementation: use {one} as the target"
    return f"{name} holds {len(found)} implementations: use one or several of {' '.join(found)} as targets"


def is_program(target: str) -> bool:
    """Whether a target is spoken to through a worker: a command, or a package in an environment of its own."""
    return target.startswith(PROGRAM) or target in environments.ELSEWHERE


def is_built_in(target: str) -> bool:
    """Whether a target is the tool's own: a built-in name or a mutant."""
    return target in BUILT_IN or target in MERGES or target in environments.ELSEWHERE or target.startswith(MUTANT)


def whence(target: str) -> str:
    """Say what loading a target would import, and from where, without importing anything."""
    if is_program(target):
        return f"the program {target.removeprefix(PROGRAM).strip()}"
    location = location_of(target)
    module, _, attribute = location.rpartition(":") if ":" in location else (location, "", "no attribute")
    if module.endswith(".py"):
        file = Path(module)
        return f"{attribute} of {file.resolve() if file.is_file() else f'{module}, which is no file here'}"
    if not all(part.isidentifier() for part in module.split(".")):
        return f"{target}, which is no target"
    with _looking_here():
        return f"{attribute} of {module} ({_origin(module) or 'which is not found'})"


def location_of(target: str) -> str:
    """Return where a target is defined, as `module:attribute` or `path/to/file.py:attribute`."""
    if target.startswith(MUTANT):
        return f"ringverify.faults.catalogue:{target.removeprefix(MUTANT)}"
    return BUILT_IN.get(target, MERGES.get(target, target))


def being_loaded() -> str | None:
    """Return the file or module that is being loaded as a target at this moment, or `None`."""
    return _loading[-1] if _loading else None


def address_of(implementation: Implementation) -> str:
    """Return the target of an implementation object: the inverse of `load`.

    A module outside any package is named by its file if that lies below the working directory: another process might
    not find it by name, since its folder is not always on the module path.

    Raises:
        UsageError: no module that was imported from a file has it as an attribute.
    """
    modules = [sys.modules.get(implementation.function.__module__), *sys.modules.values()]
    for module in modules:
        if module is None or not getattr(module, "__file__", None):
            continue
        for attribute, value in list(vars(module).items()):
            if value is implementation:
                return _address(module, attribute)
    raise UsageError(
        f"{implementation.name} is no attribute of a module, so no rank could import it: decorate it at the top level "
        "of a file, outside functions"
    )


def _address(module: ModuleType, attribute: str) -> str:
    name, file = module.__name__, Path(str(module.__file__)).resolve()
    built_in = [built for built, location in BUILT_IN.items() if location == f"{name}:{attribute}"]
    if built_in:
        return built_in[0]
    below = file.is_relative_to(Path.cwd())
    if _origin(name) == file and (module.__package__ or not below):
        return f"{name}:{attribute}"
    return f"{(file.relative_to(Path.cwd()) if below else file).as_posix()}:{attribute}"


def _origin(name: str) -> Path | None:
    """Return the file that another process would import under this name, whatever is loaded under it here."""
    where: Sequence[str] | None = None
    spec = None
    for end in [*(match.start() for match in re.finditer(r"\.", name)), len(name)]:
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        spec = next((found for find in finders if find is not None and (found := find(name[:end], where))), None)
        if spec is None:
            return None
        where = spec.submodule_search_locations
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _offer(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, KINDS)]
    return f"; implementations there: {', '.join(names)}" if names else ""


def _look_here() -> None:
    """Put the working directory on the module path, as `python -m` does and a console script does not."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


@contextlib.contextmanager
def _looking_here() -> Iterator[None]:
    """Have the working directory on the module path for a moment: later imports must not come from it."""
    before = list(sys.path)
    _look_here()
    try:
        yield
    finally:
        sys.path[:] = before


def _load_module(name: str) -> ModuleType:
    _look_here()
    try:
        return importlib.import_module(name)
    except Inconclusive:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"no module named {error.name!r}: is it installed, or on PYTHONPATH?") from None
        raise _not_importable(name, error) from error
    except BaseException as error:
        raise _not_importable(name, error) from error


def _load_file(path: str) -> ModuleType:
    resolved = Path(path).resolve()
    # Python puts the directory of a script on the module path; a target's file may rely on the same.
    if str(resolved.parent) not in sys.path:
        sys.path.insert(0, str(resolved.parent))
    # Files of one name in two folders are two modules; messages leave out this prefix, `implementation.FROM_FILE`.
    name = f"_ringverify_file_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}.{resolved.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path!r} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _not_importable(path, error) from error
    return module


def _not_importable(name: str, error: BaseException) -> BaseException:
    kind = type(error)  # not `isinstance`, which believes the exception's own `__class__`
    if issubclass(kind, KeyboardInterrupt):
        return error
    if issubclass(kind, SystemExit):
        return UsageError(
            f"{name} does not import: it calls {exit_call(cast(SystemExit, error))}{_place(error)}; "
            'keep that under if __name__ == "__main__"'
        )
    if (limit := limit_of(error)) is not None:
        return Inconclusive(f"{name} was not imported, {sentence(limit)}: {one_line(error)}{_place(error)}")
    hint = "; is it installed, or on PYTHONPATH?" if issubclass(kind, ModuleNotFoundError) else ""
    return UsageError(f"{name} does not import: {one_line(error)}{_place(error)}{hint}")


def _place(error: BaseException) -> str:
    """Return where an import failed, as text: the innermost line outside importlib and ringverify."""
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(trace_of(error))
        if not frame.filename.startswith(("<", *_NOT_THE_USERS))
    ]
    return f" (at {frames[-1]})" if frames else ""

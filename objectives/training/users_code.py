"""`code_of`: the user's code that a study runs: the files of a function and what they import, or the source of Python objects."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from bo_tuner.objectives.training.sources import own_folders
from bo_tuner.source_code import fingerprint, plain_tree

__all__ = ["code_of"]

_OURS = "bo_tuner"
_LIBRARIES = ("site-packages", "dist-packages")


def code_of(given: Sequence[Any]) -> dict[str, str]:
    """Fingerprints of the code behind models, functions and dimensions, without running it.

    Args:
        given: `FILE.py:FUNCTION`, functions and modules; anything else has no code of the user's.

    Returns:
        By whole path of a file, or by module and name of a class or function. What lies in site-packages or the standard library is left
        out: its versions tell it.
    """
    found: dict[str, str] = {}
    for one in given:
        if isinstance(one, str | Path):
            if ".py:" in str(one):
                found |= _of_files(Path(str(one).rpartition(":")[0]).expanduser().resolve())
        else:
            found |= _of_object(one)
    return dict(sorted(found.items()))


# -- files ---------------------------------------------------------------------------------------------------------


def _of_files(entry: Path) -> dict[str, str]:
    """A file, and those of the user's that it imports, wherever in it."""
    folders = [entry.parent, *(Path(folder) for folder in own_folders())]
    found: dict[str, str] = {}
    to_read = [entry]
    while to_read:
        file = to_read.pop()
        if str(file) in found or not file.is_file():
            continue
        source = file.read_text(encoding="utf-8", errors="surrogateescape")
        found[str(file)] = fingerprint(source)
        tree = plain_tree(source)
        for folder, name in _imports(tree, file, folders) if tree else ():
            to_read += _modules_of(folder, name)
    return found


def _imports(tree: ast.Module, file: Path, folders: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """What a file imports: the folder to look in, and the dotted name; of `from a import b` both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((folder, alias.name) for folder in folders)
        elif isinstance(node, ast.ImportFrom):
            within = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else folders
            for alias in node.names:
                name = ".".join(part for part in (node.module, alias.name) if part)
                yield from ((folder, name) for folder in within)


def _modules_of(folder: Path, name: str) -> list[Path]:
    """The files of a dotted name and of the packages that it lies in."""
    found: list[Path] = []
    path = folder
    for part in name.split("."):
        if path == folder and part == _OURS:
            break
        path /= part
        found += [path / "__init__.py", path.with_name(f"{part}.py")]
    return [file.resolve() for file in found if file.is_file()]


# -- objects -------------------------------------------------------------------------------------------------------


def _of_object(value: Any) -> dict[str, str]:
    """The source of an object's classes and functions, and of the user's classes, functions and modules that these use."""
    found: dict[str, str] = {}
    to_read = list(_parts(value))
    while to_read:
        part = to_read.pop()
        if isinstance(part, ModuleType):
            file = getattr(part, "__file__", None)
            if file and str(file) not in found and not _is_library(part.__name__):
                found |= _of_files(Path(file))
            continue
        name = f"{part.__module__}.{part.__qualname__}"
        if name in found or _is_library(part.__module__):
            continue
        source = _source_of(part)
        if source is not None:
            found[name] = source
            to_read += _used_by(part)
    return found


def _parts(value: Any) -> Iterator[Any]:
    """Classes, functions and modules that an object is made of."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        yield from {type(module) for module in value.modules()}
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _parts(part)
    elif isinstance(value, ModuleType | FunctionType | type):
        yield value
    elif inspect.ismethod(value):
        yield value.__func__
        yield type(value.__self__)
    elif callable(value) and hasattr(type(value), "__module__"):
        yield type(value)


def _source_of(part: Any) -> str | None:
    if isinstance(part, FunctionType) and part.__name__ == "<lambda>":  # its line may hold much else
        return f":{hashlib.sha256(repr(list(_bytes_of(part.__code__))).encode()).hexdigest()[:16]}"
    try:
        return fingerprint(textwrap.dedent(inspect.getsource(part)))
    except (OSError, TypeError):
        return None  # typed into an interpreter


def _bytes_of(code: CodeType) -> Iterator[Any]:
    yield from (code.co_code, code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _bytes_of(constant)
        else:
            yield constant


def _used_by(part: Any) -> Iterator[Any]:
    """What the code of a class or function names in its module, and what it closes over."""
    if isinstance(part, type):
        yield from part.__bases__
        for member in vars(part).values():
            member = getattr(member, "__func__", getattr(member, "fget", member))  # methods of the class, properties
            if isinstance(member, FunctionType):
                yield from _used_by(member)
        return
    for name in _names_in(part.__code__):
        yield from _kept(part.__globals__.get(name))
    for cell in part.__closure__ or ():
        try:
            yield from _kept(cell.cell_contents)
        except ValueError:
            continue  # not filled yet


def _kept(value: Any) -> Iterator[Any]:
    if isinstance(value, ModuleType | FunctionType | type):
        yield value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


@functools.cache
def _is_library(module: str) -> bool:
    """It comes with Python, is installed, or is ours."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if top in ("builtins", _OURS) or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    if file is None:
        return False
    path = Path(file)
    return any(part in _LIBRARIES for part in path.parts) or path.is_relative_to(sysconfig.get_path("stdlib"))

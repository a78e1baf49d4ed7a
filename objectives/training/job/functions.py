"""Functions that a user names as `FILE.py:FUNCTION`, or hands over from Python in a pickled file."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import JobError

__all__ = ["call_offering", "find_function", "load_file", "load_function", "load_object", "one_line", "takes"]


def find_function(reference: str) -> tuple[Path, str]:
    """The file, absolute, and the function's name of `FILE.py:FUNCTION`, without running the file.

    Raises:
        JobError: There is no such file, it is not Python, or it defines no such name.
    """
    file, _, name = reference.rpartition(":") if ".py:" in reference else (reference, "", "")
    path = Path(file).expanduser()
    if not path.is_file():
        raise JobError(f"{file} must be a Python file, and there is none")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (OSError, ValueError, SyntaxError) as error:
        raise JobError(f"{file} must be Python code: {one_line(error)}") from error
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    known = set(functions) | _names_bound(tree)
    if name not in known:
        near = difflib.get_close_matches(name, functions, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        there = f"it has {', '.join(functions)}" if functions else "it has none"
        raise JobError(f"{file} must define the function {name!r}: {there}{hint}")
    return path.resolve(), name


def _names_bound(tree: ast.Module) -> set[str]:
    """Names that a module's top level assigns or imports."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def load_file(path: Path) -> ModuleType:
    """Run a Python file once, as a module that classes in it can be found in again, with its folder on the search path.

    Raises:
        JobError: It raises.
    """
    name = f"user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # loading processes and pickles look their classes up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt | MemoryError):
            raise
        raise JobError(f"{path} must run, and raises {type(error).__name__}: {one_line(error)}") from error
    return module


def load_object(file: str) -> Any:
    """What was pickled in another process: first the folders that it found modules in, then the object."""
    with open(file, "rb") as pickled:
        folders: list[str] = pickle.load(pickled)
        sys.path += [folder for folder in folders if folder not in sys.path]
        return pickle.load(pickled)


def load_function(reference: str) -> Callable[..., Any]:
    """The function that a reference names.

    Args:
        reference: `FILE.py:FUNCTION`, or the path of a pickled function.

    Raises:
        JobError: The file does not run, or holds no such function.
    """
    if ".py:" not in reference:
        function = load_object(reference)
    else:
        path, name = find_function(reference)
        function = getattr(load_file(path), name, None)
    if not callable(function):
        raise JobError(f"{reference} must be a function; it is {type(function).__name__}")
    found: Callable[..., Any] = function
    return found


def call_offering(function: Callable[..., Any], what: str, hint: str = "", /, **offered: Any) -> Any:
    """Call a user's function with those of the offered arguments that it names.

    Args:
        function: The user's.
        what: What it is called in messages.
        hint: Said where it needs more than is offered.
        offered: Arguments by name.

    Raises:
        JobError: It needs other arguments, or raises.
    """
    parameters = _parameters(function)
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in offered
    ]
    if needed:
        can = f"only {', '.join(offered)}" if offered else "no arguments"
        raise JobError(f"{what} must take {can}; it needs {', '.join(needed)}{hint}")
    arguments = {name: value for name, value in offered.items() if takes(function, name)}
    try:
        return function(**arguments)
    except JobError:
        raise
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        if "DefaultCPUAllocator" in str(error):
            raise  # memory, which the trial's judge knows better
        raise JobError(f"{what} must not raise, and raises {type(error).__name__}: {one_line(error)}") from error


def takes(function: Callable[..., Any], name: str) -> bool:
    """It has a parameter that this can be passed to by name."""
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        or (parameter.name == name and parameter.kind is not parameter.POSITIONAL_ONLY)
        for parameter in _parameters(function)
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []  # a builtin that does not tell


def one_line(error: BaseException, longest: int = 300) -> str:
    """An error's text on one line, cut to a length."""
    text = " ".join(str(error).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"

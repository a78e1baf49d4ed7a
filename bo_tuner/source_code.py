"""What the user's code was: fingerprints of source that comments and layout do not change, and how two of them differ."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["changes", "fingerprint", "plain_tree"]

_LENGTH = 16


def fingerprint(source: str) -> str:
    """Of Python source: one hash of its text, and one of what it does, which says the same where only comments, docstrings, layout or the part
    under `if __name__ == "__main__"` differ. Another Python may write the second differently, where the first still says the same.
    """
    tree = plain_tree(source)
    return f"{_hash(source)}:{_hash(ast.dump(tree)) if tree else ''}"


def plain_tree(source: str) -> ast.Module | None:
    """What the source does when it is imported; None where it is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    tree.body = [node for node in tree.body if not _is_main_guard(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return tree


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_LENGTH]


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> Sequence[str]:
    """What differs between two records of code, by file or name, for people.

    Args:
        before: Fingerprints of a stored study by whole path, or by module and name; empty where it kept none.
        after: Those of today.
    """
    if not before:
        return []
    changed = [f"{_shown(name)} changed" for name in before if name in after and not _same(before[name], after[name])]
    new = [f"{_shown(name)} is new" for name in after if name not in before]
    gone = [f"{_shown(name)} is not used any more" for name in before if name not in after]
    return [*changed, *new, *gone]


def _same(one: str, other: str) -> bool:
    """Either hash says so."""
    pairs = zip(one.split(":"), other.split(":"), strict=False)
    return any(mine and mine == theirs for mine, theirs in pairs)


def _shown(name: str) -> str:
    """A file below this folder by its path from here."""
    if not os.path.isabs(name):
        return name
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name

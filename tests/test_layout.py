"""The two top-level folders are packages of bo_tuner, seen alike by builds, editors and uninstalled runs."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("objectives", "storage")


@pytest.mark.parametrize("name", LINKED)
def test_the_folder_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "bo_tuner" / name
    assert link.is_symlink(), f"{link} must be a link to ../{name}; git config core.symlinks true, then check out again"
    assert link.resolve() == ROOT / name


def test_every_package_is_built() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {_package(file.parent) for top in ("bo_tuner", *LINKED) for file in _own_files(top, "__init__.py")}
    assert set(settings["packages"]) == found
    assert settings["package-dir"] == {
        "bo_tuner": "bo_tuner",
        "bo_tuner.objectives": "objectives",
        "bo_tuner.storage": "storage",
    }


def _own_files(top: str, pattern: str) -> list[Path]:
    """Files under a folder, not those that a link shows a second time."""
    return [file for file in (ROOT / top).rglob(pattern) if file.resolve() == file]


def _package(folder: Path) -> str:
    parts = folder.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "bo_tuner" else ("bo_tuner", *parts))


def test_no_module_has_the_name_of_a_standard_one() -> None:
    for top in LINKED:
        for file in _own_files(top, "*.py"):
            assert file.stem not in sys.stdlib_module_names, file


LAYERS = (
    # Each line may import from itself and the lines before it.
    {"errors", "text", "registry"},
    {"schedules"},
    {
        "config",
        "dimension",
        "outcome",
        "budget",
        "cluster",
        "hardware",
        "cuda",
        "launcher",
        "nvml",
        "origin",
        "partition",
        "launches",
        "pace",
        "precision",
        "quantiles",
        "profile",
        "stored",
        "fork",
        "source_code",
        "visible",
        "workload",
        "space",
        "trial",
        "deadlines",
        "goal",
        "presets",
    },
    {"models"},
    {"step_limit", "open_candidates", "confirmation"},
    {"samplers"},
    {"objectives"},
    {"storage"},
    {"doctor"},
    {"engine"},
    {"report"},
    {"opening"},
    {"plan"},
    {"tune"},
    {"cli"},
)


def test_imports_point_one_way() -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    seen = 0
    for file in _own_files("bo_tuner", "*.py"):
        seen += _check_file(file, file.relative_to(ROOT / "bo_tuner"), level)
    for top in LINKED:
        for file in _own_files(top, "*.py"):
            seen += _check_file(file, file.relative_to(ROOT), level)
    assert seen > 100


def _check_file(file: Path, path: Path, level: dict[str, int]) -> int:
    own = path.parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return 0
    imported: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported += [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("bo_tuner.")]
        elif isinstance(node, ast.ImportFrom) and node.module == "bo_tuner":
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bo_tuner."):
            imported.append((node.module or "").split(".")[1])
    for name in imported:
        assert level[name] <= level[own], f"{file} imports bo_tuner.{name}, which stands above it"
        # Samplers, objectives and storage know nothing of each other.
        if own in ("samplers", "objectives", "storage") and name in ("samplers", "objectives", "storage"):
            assert name == own, f"{file} imports bo_tuner.{name}"
    return len(imported)

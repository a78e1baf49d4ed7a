"""What is installed: Python, the packages, and what compiles DeepSpeed's small op."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from bo_tuner.cluster import DeviceKind
from bo_tuner.doctor.finding import Finding, fail, ok, warn

__all__ = ["compiler", "ninja", "packages", "python_version"]

_ALWAYS_SHOWN = ("torch", "deepspeed", "transformers", "optuna")
_NOT_INSTALLED = (
    "bo_tuner itself is not installed, so the versions it needs are not known",
    "run pip install --editable . in the checkout",
)


def python_version(required: str | None = None) -> Finding:
    """This interpreter against the versions that we support.

    Args:
        required: As in `requires-python`; None reads it from our metadata.
    """
    name, version = "python", platform.python_version()
    if required is None:
        try:
            required = metadata.metadata("bo_tuner")["Requires-Python"]
        except metadata.PackageNotFoundError:
            return warn(name, *_NOT_INSTALLED)
    if version in SpecifierSet(required):
        return ok(name, f"{version} in {sys.prefix}", version=version)
    mend = f"make an environment with a Python that is {required}, and install bo_tuner there"
    return fail(name, f"{version}; must be {required}", mend, version=version)


def packages(requirements: Sequence[str] | None = None) -> Finding:
    """What we depend on, each against its range.

    Args:
        requirements: As packages declare them; None reads ours, without extras.
    """
    name = "packages"
    if requirements is None:
        try:
            requirements = metadata.requires("bo_tuner") or []
        except metadata.PackageNotFoundError:
            return warn(name, *_NOT_INSTALLED)
    versions: dict[str, str | None] = {}
    wrong: list[Requirement] = []
    for wanted in map(Requirement, requirements):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = versions[wanted.name] = _version(wanted.name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            wrong.append(wanted)
    if wrong:
        found = ", ".join(
            f"{wanted.name} {versions[wanted.name] or 'is not installed'}; must be {wanted.specifier}"
            for wanted in wrong
        )
        mend = shlex.join(["pip", "install", *(f"{wanted.name}{wanted.specifier}" for wanted in wrong)])
        return fail(name, found, mend, **versions)
    shown = [package for package in _ALWAYS_SHOWN if package in versions] or sorted(versions)
    found = ", ".join(f"{package} {versions[package]}" for package in shown)
    rest = len(versions) - len(shown)
    return ok(name, found + (f" and {rest} more, as required" if rest else ""), **versions)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compiler(device: DeviceKind, *, is_op_cached: bool) -> Finding:
    """The C++ compiler; on a CPU DeepSpeed compiles a small op once.

    Args:
        device: What trials run on.
        is_op_cached: That op is compiled already, for these versions.
    """
    name, program = "compiler", os.environ.get("CXX", "c++")
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        mend = "apt-get install g++, or what brings a C++ compiler here; CXX names one that is not called c++"
        return _for_compiling(name, f"{program} does not run ({error})", mend, device, is_op_cached=is_op_cached)
    return ok(name, next(iter(told.stdout.splitlines()), program))


def ninja(device: DeviceKind, *, is_op_cached: bool) -> Finding:
    """What drives that compiler; looked for as training processes do."""
    name = "ninja"
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which(name, path=search_path)
    if program is None:
        mend = f"{sys.executable} -m pip install ninja"
        return _for_compiling(name, "the program is not there", mend, device, is_op_cached=is_op_cached)
    return ok(name, program)


def _for_compiling(name: str, found: str, mend: str, device: DeviceKind, *, is_op_cached: bool) -> Finding:
    if device == "cpu" and not is_op_cached:
        return fail(name, f"{found}, and DeepSpeed must compile a small op", mend)
    why = "the op is compiled already" if device == "cpu" else "trials on GPUs need none"
    return warn(name, f"{found}; {why}", mend)

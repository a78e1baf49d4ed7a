"""Python, packages and compiler: what is there against what must be."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import pytest

from bo_tuner.doctor.finding import Status
from bo_tuner.doctor.software import compiler, ninja, packages, python_version


def test_this_environment_is_as_it_must_be() -> None:
    assert python_version().status is Status.OK
    found = packages()
    assert found.status is Status.OK, found.found
    assert found.details["torch"] == metadata.version("torch")
    assert f"deepspeed {metadata.version('deepspeed')}" in found.found


def test_another_python_is_a_problem_with_its_mend() -> None:
    found = python_version("<3.9,>=3.8")
    assert found.status is Status.FAIL
    assert found.found == f"{platform.python_version()}; must be <3.9,>=3.8"
    assert "make an environment" in found.mend


def test_a_package_out_of_its_range_or_missing_is_installed_by_the_command_given() -> None:
    found = packages(["psutil<1,>=0.1", "no-such-package-here>=2", "optuna>=5"])
    assert found.status is Status.FAIL
    assert f"psutil {metadata.version('psutil')}; must be <1,>=0.1" in found.found
    assert "no-such-package-here is not installed; must be >=2" in found.found
    assert found.mend == "pip install 'psutil<1,>=0.1' 'no-such-package-here>=2'"
    assert "optuna" not in found.found


def test_what_only_an_extra_needs_is_not_asked_for() -> None:
    assert packages(["psutil>=6", 'no-such-package-here>=2; extra == "dev"']).status is Status.OK


def test_the_compiler_and_ninja_are_found() -> None:
    assert compiler("cpu", is_op_cached=False).status is Status.OK
    assert Path(ninja("cpu", is_op_cached=False).found).name == "ninja"


@pytest.mark.parametrize(
    ("device", "is_op_cached", "status"),
    [("cpu", False, Status.FAIL), ("cpu", True, Status.WARN), ("cuda", False, Status.WARN)],
)
def test_a_missing_compiler_stops_only_a_cpu_that_has_to_compile(
    monkeypatch: pytest.MonkeyPatch, device: str, is_op_cached: bool, status: Status
) -> None:
    monkeypatch.setenv("CXX", "/no/such/c++")
    found = compiler(device, is_op_cached=is_op_cached)  # type: ignore[arg-type]  # one of the two
    assert found.status is status
    assert "/no/such/c++ does not run" in found.found
    assert "g++" in found.mend


def test_a_compiler_that_fails_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert compiler("cpu", is_op_cached=False).status is Status.FAIL


def test_a_missing_ninja_has_its_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    found = ninja("cpu", is_op_cached=False)
    assert found.status is Status.FAIL
    assert found.mend == f"{tmp_path / 'python'} -m pip install ninja"

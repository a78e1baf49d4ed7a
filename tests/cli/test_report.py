"""`bo-tuner report`: one file, whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Run = Callable[..., CompletedProcess[str]]
pytestmark = pytest.mark.usefixtures("tuned")


def test_it_writes_one_file_and_prints_it(run: Run, study_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = run("report", "shared", "--out", str(file), cwd=study_folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}\n", "")
    page = file.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and page.endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_json_names_study_and_file(run: Run, study_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    done = run("report", "shared", "--out", str(file), "--json", cwd=study_folder)
    assert json.loads(done.stdout) == {"study": "shared", "file": str(file)}


def test_by_default_the_file_has_the_name_of_the_study_and_the_command_names_the_storage(
    run: Run, study_folder: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{study_folder}/bo_tuner_studies/studies.db"
    done = run("report", "shared", "--storage", url, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "shared.html\n")
    assert f"bo-tuner export shared --storage {url} --out job" in (tmp_path / "shared.html").read_text(encoding="utf-8")


def test_a_path_that_cannot_be_written_is_refused_in_one_line(run: Run, study_folder: Path, tmp_path: Path) -> None:
    done = run("report", "shared", "--out", str(tmp_path), cwd=study_folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: the report needs a file that can be written, and {tmp_path} cannot (it is a folder): "
        "choose another with --out\n"
    )


def test_a_full_disk_leaves_the_earlier_report_as_it_was(program: str, study_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("earlier", encoding="utf-8")
    done = subprocess.run(  # files may have 2 MiB, less than a report
        ["bash", "-c", 'ulimit -f 2048; exec "$@"', "bash", program, "report", "shared", "--out", str(file)],
        cwd=study_folder,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the report needs a file") and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert file.read_text(encoding="utf-8") == "earlier"


def test_an_unknown_study_is_refused_by_name(run: Run, study_folder: Path) -> None:
    done = run("report", "shred", cwd=study_folder)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no study 'shred'") and "did you mean shared?" in done.stderr

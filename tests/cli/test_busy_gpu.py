"""A GPU that somebody else uses, through the real command and a stand-in driver."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def test_a_gpu_that_others_use_is_refused_before_anything_is_written(
    program: str, driver_folder: Path, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [program, "tune", "bert-tiny", "--device", "cuda"],
        cwd=tmp_path,
        env={**os.environ, "LD_LIBRARY_PATH": str(driver_folder)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, ""), ended.stderr
    assert "GPU 1 must not be used by others" in ended.stderr
    assert "process 4242 (" in ended.stderr and "holds 12.00 GiB" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

"""The exported job runs as exported, at the rate that was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.errors import StoreError
from bo_tuner.objectives import ignore_events
from bo_tuner.objectives.launch import ForkServer
from bo_tuner.objectives.training import TrainingObjective, deepspeed_config
from bo_tuner.objectives.training.extensions import private_copy
from bo_tuner.outcome import Outcome, TrialLimits
from bo_tuner.report import write_job
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import ModelSpec, ModelStructure, Workload

UNTRIED = TrialRecord(number=0, config=TrainConfig())
OWN_DATA = """
import torch


class Own(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        open(f"{__file__}.read", "w").close()
        tokens = torch.arange(16) + index
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def dataset():
    return Own()
"""


@pytest.fixture(scope="module")
def record(
    workload: Workload, cluster: Cluster, server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> TrialRecord:
    """A real trial."""
    config = TrainConfig(zero_stage=1, micro_batch_size=2, grad_accum_steps=2)
    objective = TrainingObjective(workload, cluster, server, log_dir=tmp_path_factory.mktemp("logs"))
    result = objective(config, limits=TrialLimits(memory_bytes=4 * 2**30), on_event=ignore_events)
    assert result.outcome is Outcome.COMPLETE, result.reason
    return TrialRecord(number=0, config=config, result=result)


@pytest.fixture(scope="module")
def job(record: TrialRecord, workload: Workload, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its export."""
    folder = tmp_path_factory.mktemp("export") / "job"
    write_job(folder, record, workload, cluster, study_folder=folder)
    return folder


@pytest.fixture(scope="module")
def environment(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For launch.sh: this interpreter, its ninja, and compiled ops of its own."""
    assert server.is_started  # it has compiled what was missing
    return {
        **os.environ,
        "PYTHON": sys.executable,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "TORCH_EXTENSIONS_DIR": str(private_copy(tmp_path_factory.mktemp("ops"))),
    }


def launched(job: Path, environment: dict[str, str], *arguments: str, cwd: Path) -> CompletedProcess[str]:
    return subprocess.run(
        [str(job / "launch.sh"), *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def summary(ended: CompletedProcess[str]) -> dict[str, Any]:
    """The last line of stdout; DeepSpeed may print before it."""
    assert ended.returncode == 0, ended.stderr
    data: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return data


def test_the_exported_job_runs_at_the_rate_that_was_measured(
    job: Path, environment: dict[str, str], record: TrialRecord, tmp_path: Path
) -> None:
    told = summary(launched(job, environment, "--steps", "7", cwd=tmp_path))
    assert (told["steps"], told["world_size"]) == (7, 2)
    assert told["measured_samples_per_s"] == record.samples_per_s
    assert record.samples_per_s is not None
    assert record.samples_per_s / 3 < told["samples_per_s"] < record.samples_per_s * 3
    assert told["samples_per_s"] == pytest.approx(8 / told["step_time_s"])  # 2 x 2 x 2 ranks


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the user's data."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN_DATA, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def bare(job: Path, environment: dict[str, str], own_folder: Path) -> CompletedProcess[str]:
    """The job with the user's data, launched where nothing says which interpreter it is for."""
    bare = {name: value for name, value in environment.items() if name not in ("PYTHON", "VIRTUAL_ENV")}
    given = {**bare, "PATH": "/usr/bin:/bin"}
    return launched(job, given, "--steps", "2", "--data", "own.py:dataset", cwd=own_folder)


def test_launch_sh_finds_the_interpreter_that_measured_by_itself(bare: CompletedProcess[str]) -> None:
    assert summary(bare)["steps"] == 2


def test_an_interpreter_without_torch_is_told_in_one_line(
    job: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    ended = launched(job, {**environment, "PYTHON": python}, cwd=tmp_path)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "it lacks torch, deepspeed, transformers: set PYTHON" in line


def test_own_data_named_from_the_callers_folder_is_what_it_trains_on(
    bare: CompletedProcess[str], own_folder: Path
) -> None:
    told = summary(bare)
    assert told["steps"] == 2
    assert told["loss"] > 0
    assert (own_folder / "own.py.read").exists()


def test_data_that_is_not_there_gives_one_line(job: Path, environment: dict[str, str], tmp_path: Path) -> None:
    ended = launched(job, environment, "--data", "nowhere.py:dataset", cwd=tmp_path)
    assert ended.returncode != 0
    assert ended.stderr.splitlines() == ["--data must be FILE.py:FUNCTION; there is no Python file 'nowhere.py'"]


def test_launch_sh_sets_what_the_user_had_set_when_the_study_began(
    record: TrialRecord, workload: Workload, cluster: Cluster, tmp_path: Path
) -> None:
    recorded = {"NCCL_ALGO": "Ring", "PYTORCH_CUDA_ALLOC_CONF": "a:b c"}
    write_job(tmp_path, record, workload, cluster, study_folder=tmp_path, environment=recorded)
    launch = (tmp_path / "launch.sh").read_text(encoding="utf-8")
    assert "exec env NCCL_ALGO=Ring PYTORCH_CUDA_ALLOC_CONF='a:b c' DS_ACCELERATOR=cpu OMP_NUM_THREADS=" in launch


def test_the_job_package_is_the_code_that_was_measured(job: Path) -> None:
    measured = resources.files("bo_tuner.objectives.training.job")
    names = {entry.name for entry in measured.iterdir() if entry.name.endswith(".py")}
    assert {file.name for file in (job / "job").iterdir() if file.suffix == ".py"} == names >= {"engine.py", "split.py"}
    for name in names:
        assert (job / "job" / name).read_bytes() == measured.joinpath(name).read_bytes()


def test_the_exported_files_need_no_bo_tuner(job: Path) -> None:
    for file in (*(job / "job").glob("*.py"), job / "train.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if line.lstrip().startswith(("import bo_tuner", "from bo_tuner"))] == []


def test_ds_config_is_the_one_that_was_measured(
    job: Path, record: TrialRecord, workload: Workload, cluster: Cluster
) -> None:
    written = json.loads((job / "ds_config.json").read_text(encoding="utf-8"))
    assert written == deepspeed_config(record.config, workload, n_ranks=cluster.n_ranks)
    assert written["train_batch_size"] == 8


def test_model_json_says_what_was_measured_and_where(job: Path, record: TrialRecord, cluster: Cluster) -> None:
    facts = json.loads((job / "model.json").read_text(encoding="utf-8"))
    assert facts["measured"]["config"] == "z1_gas2_mbs2"
    assert facts["measured"]["samples_per_s"] == record.samples_per_s
    assert facts["measured"]["on"] == str(cluster)
    assert (facts["device"], facts["job"]["seq_len"]) == ("cpu", 16)


def test_exporting_again_replaces_the_files_and_keeps_others(
    record: TrialRecord, workload: Workload, cluster: Cluster, tmp_path: Path
) -> None:
    files = write_job(tmp_path, record, workload, cluster, study_folder=tmp_path)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "ds_config.json").write_text("old", encoding="utf-8")
    assert write_job(tmp_path, record, workload, cluster, study_folder=tmp_path) == files
    assert json.loads((tmp_path / "ds_config.json").read_text(encoding="utf-8"))["train_batch_size"] == 8
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


OBJECT = ModelSpec(name="Net", architecture={}, source="object", digest="f")
FUNCTION = ModelSpec(name="own-build", architecture={}, source="function", function="/home/me/own.py:build", digest="f")


def test_an_object_without_its_pickles_is_not_exported_and_nothing_is_written(cluster: Cluster, tmp_path: Path) -> None:
    workload = Workload(model=OBJECT, n_parameters=1, seq_len=1, data="data-lambda")
    (tmp_path / "model.pkl").write_bytes(b"a structure")
    with pytest.raises(StoreError) as caught:
        write_job(tmp_path / "job", UNTRIED, workload, cluster, study_folder=tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/data-lambda.pkl must hold what this study was given in Python, and is not there: "
        "run tune once more where it ran, or export from its result"
    )
    assert not (tmp_path / "job").exists()


def test_objects_are_exported_by_copies_that_are_named_without_a_folder(cluster: Cluster, tmp_path: Path) -> None:
    workload = Workload(model=OBJECT, n_parameters=1, seq_len=1, data="data-lambda", optimizer="optimizer-sgd")
    for name in ("model.pkl", "data-lambda.pkl", "optimizer-sgd.pkl"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    files = write_job(tmp_path / "job", UNTRIED, workload, cluster, study_folder=tmp_path)
    job = json.loads((tmp_path / "job" / "model.json").read_text(encoding="utf-8"))["job"]
    assert job["model"]["structure"] == "model.pkl"
    assert (job["data"], job["optimizer"], job["seq_len"]) == ("data-lambda.pkl", "optimizer-sgd.pkl", None)
    for name in ("model.pkl", "data-lambda.pkl", "optimizer-sgd.pkl"):
        assert (tmp_path / "job" / name).read_text(encoding="utf-8") == name
        assert tmp_path / "job" / name in files
    assert str(tmp_path) not in (tmp_path / "job" / "model.json").read_text(encoding="utf-8")


def test_functions_in_files_are_exported_by_their_place_and_the_model_without_a_structure(
    cluster: Cluster, tmp_path: Path
) -> None:
    workload = Workload(model=FUNCTION, n_parameters=1, seq_len=3, data="/home/me/own.py:data", data_seq_len=5)
    files = write_job(tmp_path / "job", UNTRIED, workload, cluster, study_folder=tmp_path)
    job = json.loads((tmp_path / "job" / "model.json").read_text(encoding="utf-8"))["job"]
    assert job["model"] == {"function": "/home/me/own.py:build"}
    assert (job["data"], job["optimizer"], job["seq_len"]) == ("/home/me/own.py:data", None, 5)
    assert [file for file in files if file.suffix == ".pkl"] == []


def test_a_pipeline_is_exported_with_its_cuts_and_recomputation(cluster: Cluster, tmp_path: Path) -> None:
    structure = ModelStructure(layer_costs=(1.0, 1.0, 3.0), cost_unit="seconds")
    workload = Workload(model=FUNCTION, n_parameters=1, seq_len=3, data="/home/me/own.py:data", structure=structure)
    record = TrialRecord(number=0, config=TrainConfig(pipeline_depth=2, grad_accum_steps=2, recompute=True))
    write_job(tmp_path / "job", record, workload, cluster, study_folder=tmp_path)
    job = json.loads((tmp_path / "job" / "model.json").read_text(encoding="utf-8"))["job"]
    assert (job["stages"], job["recompute"]) == ([0, 2, 3], True)
    assert json.loads((tmp_path / "job" / "ds_config.json").read_text(encoding="utf-8"))["train_batch_size"] == 2


def test_a_folder_below_a_file_cannot_be_written_and_says_so(
    record: TrialRecord, workload: Workload, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(StoreError, match=r"--out must be a folder that can be written, and .*file.*is not"):
        write_job(tmp_path / "file" / "job", record, workload, cluster, study_folder=tmp_path)

"""`bo-tuner plan`: what is predicted, told to people and programs; nothing runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from bo_tuner import plan
from bo_tuner.cli.main import main
from bo_tuner.models.cost import TIME_PARTS
from bo_tuner.models.memory import MEMORY_PARTS

Run = Callable[..., CompletedProcess[str]]
SMALL = ("bert-tiny", "--cluster", "2x2xV100-16GB@25Gb/s", "--global-batch", "8", "--seq-len", "16")


@pytest.fixture(scope="module")
def told(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `plan --json` printed."""
    done = run("plan", *SMALL, "--allow-2bw", "--json", cwd=tmp_path_factory.mktemp("plan"))
    assert (done.returncode, done.stderr) == (0, "")
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def test_json_has_exactly_the_keys_of_the_schema(told: dict[str, Any]) -> None:
    assert told.keys() == {
        "model", "n_parameters", "seq_len", "element_bytes", "device", "n_ranks", "n_nodes", "rates_from", "global_batch",
        "memory_limit_bytes", "unit", "is_predicted", "n_candidates", "n_fitting", "rejected", "candidates",
    }  # fmt: skip
    assert (told["model"], told["device"], told["n_ranks"], told["n_nodes"]) == ("bert-tiny", "V100-16GB", 4, 2)
    assert told["is_predicted"] is True
    assert told["n_candidates"] == len(told["candidates"]) > 20
    for candidate in told["candidates"]:
        assert candidate.keys() == {
            "name", "params", "samples_per_s", "step_time_s", "time_s", "memory_bytes", "fits",
        }  # fmt: skip
        assert candidate["time_s"].keys() == set(TIME_PARTS)
        assert candidate["memory_bytes"].keys() == {*MEMORY_PARTS, "total"}


def test_json_tells_what_python_gets_best_first(told: dict[str, Any]) -> None:
    found = plan("bert-tiny", cluster="2x2xV100-16GB@25Gb/s", global_batch=8, seq_len=16, allow_2bw=True)
    assert told["memory_limit_bytes"] == found.limit_bytes == int(0.92 * 16 * 2**30)
    planned = found.best()
    assert [candidate["name"] for candidate in told["candidates"]] == [one.config.name for one in planned]
    for candidate, one in zip(told["candidates"], planned, strict=True):
        assert candidate["params"] == one.config.params()
        assert candidate["samples_per_s"] == pytest.approx(one.samples_per_s, rel=1e-5)
        assert candidate["step_time_s"] == pytest.approx(one.step_time_s, rel=1e-5)
        assert candidate["time_s"] == pytest.approx(dict(one.times_s), rel=1e-5)
        assert candidate["memory_bytes"] == {**one.memory_bytes, "total": one.total_bytes}
        assert candidate["fits"] is one.fits is True
    rates = [candidate["samples_per_s"] for candidate in told["candidates"]]
    assert rates == sorted(rates, reverse=True)


def test_json_names_the_layouts_that_fell_and_why(told: dict[str, Any]) -> None:
    assert {row["layout"]: row["reason"] for row in told["rejected"]} == {}
    assert "pp2_2bw" in " ".join(candidate["name"] for candidate in told["candidates"])


@pytest.fixture
def run_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., CompletedProcess[str]]]:
    """`run_here(*arguments)` runs the command in this process, where torch, which takes seconds, is imported once."""
    for name, value in (("TRANSFORMERS_VERBOSITY", "error"), ("DS_ACCELERATOR", "cpu")):  # as the command sets them
        monkeypatch.setenv(name, value)
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> CompletedProcess[str]:
        code = main(list(arguments))
        printed = capsys.readouterr()
        return CompletedProcess(arguments, code, printed.out, printed.err)

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_the_table_shows_the_best_its_parts_and_what_fell(run_here: Run) -> None:
    done = run_here("plan", *SMALL, "--memory-limit", "810MB", "--top", "3")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("bert-tiny: 4.4 M parameters, 16 tokens a sample, 16 bits an element")
    assert lines[1] == (
        "on 2 nodes x 2 x V100-16GB, 16.00 GiB each; rates from data sheets: NVIDIA V100 data sheet (2020), SXM2; "
        "25 Gb/s a node, as given"
    )
    assert lines[2].startswith("predicted, not measured: ") and lines[2].endswith(" of them within 772 MiB a device")
    assert lines[4].split() == ["config", "samples/s", "step", "of", "772", "MiB", "a", "device"]
    assert [line.split()[0][0] for line in lines[5:8]] == ["z", "z", "z"]
    best = lines[5].split()[0]
    assert lines[9] == f"best: {best}, predicted"
    assert lines[10].startswith("  step ") and "compute" in lines[10]
    assert lines[11].startswith("  memory ") and "of 772 MiB: overhead" in lines[11]
    assert lines[13].startswith("fell, ")
    assert lines[14].startswith("  memory: ") and lines[14].endswith(" a device, and 772 MiB may be used")
    assert len(lines) <= 24


def test_where_nothing_fits_the_least_is_shown_and_the_command_fails(run_here: Run) -> None:
    done = run_here("plan", *SMALL, "--memory-limit", "100MiB", "--top", "1")
    assert done.returncode == 1
    assert "does not fit" in done.stdout and "best:" not in done.stdout
    least = next(line for line in done.stdout.splitlines() if line.startswith("z")).split()[0]
    assert done.stderr.startswith(
        f"error: at least one config must fit in 100 MiB a device, and {least}, which needs least,"
    )
    assert done.stderr.endswith("raise --memory-limit, lower --seq-len, or plan for more devices or larger ones\n")


def test_without_a_cluster_it_plans_for_this_machine_and_says_so(run: Run, tmp_path: Path) -> None:
    done = run("plan", "bert-tiny", "--global-batch", "4", "--seq-len", "16", "--json", "--top", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "planned for this machine (--cluster plans for another)\n")
    assert len(json.loads(done.stdout)["candidates"]) == 2


def test_the_page_is_written_beside_the_table(run_here: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    done = run_here("plan", *SMALL, "--out", str(file), "--timeline", "z0_pp2_gas4_mbs1")
    assert (done.returncode, done.stderr) == (0, f"wrote {file}\n")
    assert "One step of z0_pp2_gas4_mbs1" in file.read_text(encoding="utf-8")


def test_without_a_global_batch_one_is_supposed_and_told(run_here: Run) -> None:
    done = run_here("plan", "bert-tiny", "--cluster", "2xV100-16GB", "--seq-len", "16", "--json")
    assert done.returncode == 0
    assert "planned for steps of 32 samples, 16 a device (--global-batch plans for others)\n" in done.stderr
    assert json.loads(done.stdout)["global_batch"] == 32


def test_a_quantization_that_is_left_aside_is_told_first(run_here: Run, tmp_path: Path) -> None:
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
    own = {**small, "quantization_config": {"bits": 4, "quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(own), encoding="utf-8")
    done = run_here("plan", str(tmp_path), "--cluster", "2xV100-16GB", "--seq-len", "16")
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == (
        "note: the config's quantization (awq) is ignored: all weights are trained, in full precision"
    )


def test_a_config_whose_model_has_code_of_its_own_is_sent_the_way_of_functions(run_here: Run, tmp_path: Path) -> None:
    own = {
        "architectures": ["MyGLMForConditionalGeneration"],
        "model_type": "myglm",
        "hidden_size": 256,
        "num_layers": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(own), encoding="utf-8")
    done = run_here("plan", str(tmp_path), "--cluster", "2xV100-16GB", "--seq-len", "16")
    assert done.returncode == 2
    assert "a model with code of its own is given as FILE.py:FUNCTION, a function that builds it" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SMALL, "--cluster", "8xA100-80GB+4xA100-80GB"), "--cluster: all nodes must be alike, and have as many devices; got "),
        ((*SMALL, "--global-batch", "0"), "--global-batch must be at least 1; got 0"),
        ((*SMALL, "--max-tensor", "0"), "--max-tensor must be at least 1; got 0"),
        ((*SMALL, "--cluster", "8xV1000"), "--cluster must name devices whose figures are known; got '8xV1000': "),
        ((*SMALL, "--cluster", "0xV100"), "--cluster must be nodes x devices x name, as in 8x8xV100-16GB, "),
        ((*SMALL, "--precision", "bf16"), "--precision must be one that V100-16GB has units for; got bf16"),
        ((*SMALL, "--precision", "int8"), "--precision must be one of auto, fp32, bf16, fp16; got 'int8'"),
        ((*SMALL, "--seq-len", "513"), "--seq-len must be at least 1 and at most the 512 positions of bert-tiny; got 513"),
        ((*SMALL, "--memory-limit", "20GiB"), "--memory-limit must be at most the 16.00 GiB of one rank; got 20.00 GiB"),
        ((*SMALL, "--timeline", "z0"), "--timeline says what the page of --out shows; got 'z0' without --out"),
        ((*SMALL, "--out", "x.html", "--timeline", "z9"), "--timeline must name a config of this plan, as its table does; got 'z9'"),
        ((*SMALL, "--data", "x"), "--data must be FILE.py:FUNCTION or a Python function; got 'x'"),
        (("bert-tinny", *SMALL[1:]), "model 'bert-tinny' is neither a preset nor a path (did you mean bert-tiny?)"),
        ((*SMALL, "--top", "0"), "Invalid value for '--top': Input should be greater than or equal to 1; got '0'"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_wrong_use_is_one_line_and_exits_with_2(run_here: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run_here("plan", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1
    assert not Path("x.html").exists()


CODE = """
from torch import nn

def build():
    print("building")
    return [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)], nn.functional.mse_loss
"""


def test_a_model_from_code_is_planned_with_data_of_its_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    data = f"{Path(__file__).parents[1] / 'targets' / 'small_data.py'}:vectors"
    told = ("plan", "mine.py:build", "--cluster", "2xH100", "--global-batch", "4", "--json")
    done = run(*told, "--data", data, cwd=tmp_path)
    assert done.returncode == 0 and "building" in done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["n_parameters"]) == ("mine-build", 4 * 8 + 8 + 8 + 1)
    assert any(candidate["params"]["pipeline_depth"] == 2 for candidate in found["candidates"])
    assert run(*told, cwd=tmp_path).stderr == (
        "error: --seq-len must be given for a model from a function without --data; got mine-build\n"
    )


def test_the_help_says_what_2bw_does_to_training_and_that_nothing_is_measured(run: Run, tmp_path: Path) -> None:
    text = " ".join(run("plan", "--help", cwd=tmp_path).stdout.split())
    for words in (
        "Nothing is measured",
        "schedules that change training, as PipeDream-2BW, which never drains: its gradients are one optimizer step old.",
        "what trains here has none yet",
        "[default: (this machine)]",
        "8x8xV100-16GB",
    ):
        assert words in text

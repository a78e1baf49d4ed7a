"""The commands that answer, run as users run them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import optuna
import pytest

from bo_tuner.config import TrainConfig

Run = Callable[..., CompletedProcess[str]]

TOP_LEVEL = {"study", "origin", "objective", "direction", "unit", "budget", "spent", "best", "pareto", "trials"} | {
    "memory_limit_bytes",
    "memory_margin_bytes",
    "launches_differ_by",
    "excluded",
}
INTERVAL = r"\+-(?:[\d.]+ %|\?)"
FLAGS = {"--allow-shared-gpu", "--debug", "--help", "--insist", "--json", "--retry-failed", "--simulate"}
PER_TRIAL = {
    "number",
    "name",
    "outcome",
    "reason",
    "samples_per_s",
    "trial_samples_per_s",
    "value",
    "step_time_s",
    "median_step_time_s",
    "peak_memory_bytes",
    "power_w",
    "energy_j",
    "throttling",
    "wall_s",
    "params",
    "samples_per_s_interval",
    "n_steps",
    "n_skipped",
    "engine_samples_per_s",
    "bound_samples_per_s",
    "fits_today",
    "confirmed",
    "confirmation",
    "standing_samples_per_s",
    "standing_value",
}


@pytest.fixture(scope="module")
def told(tuned: CompletedProcess[str]) -> dict[str, Any]:
    """What `tune --json` printed."""
    data: dict[str, Any] = json.loads(tuned.stdout)
    return data


@pytest.fixture(scope="module")
def best_first(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The complete trials by samples/s; before the best of the confirmed only those that are ahead by more than their interval."""
    complete = [trial for trial in told["trials"] if trial["outcome"] == "complete"]
    assert len(complete) >= 2
    held = max(trial["standing_samples_per_s"] for trial in complete if trial["confirmation"])

    def place(trial: dict[str, Any]) -> tuple[float, bool]:
        rate = trial["standing_samples_per_s"]
        is_shown = trial["confirmation"] is not None or trial["samples_per_s_interval"][0] > held
        return (-rate if is_shown else -min(rate, held), not is_shown)

    return sorted(complete, key=place)


def shown(run: Run, folder: Path) -> dict[str, Any]:
    """What `show --json` prints."""
    ended = run("show", "shared", "--json", cwd=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    data: dict[str, Any] = json.loads(ended.stdout)
    return data


def test_tune_json_has_exactly_the_keys_of_the_schema(told: dict[str, Any]) -> None:
    assert set(told) == TOP_LEVEL
    assert (told["study"], told["direction"], told["unit"]) == ("shared", "maximize", "samples/s")
    assert (told["objective"], told["pareto"]) == ("throughput", None)
    assert told["budget"] == "3 trials"
    assert told["spent"]["trials"] == 3
    assert told["spent"]["seconds"] > 0


def test_every_trial_has_exactly_the_keys_of_the_schema_and_every_field_of_its_config(told: dict[str, Any]) -> None:
    assert [trial["number"] for trial in told["trials"]] == [0, 1, 2]
    for trial in told["trials"]:
        assert set(trial) == PER_TRIAL
        assert set(trial["params"]) == {field.name for field in fields(TrainConfig)}


def test_a_complete_trial_has_numbers_that_agree(told: dict[str, Any], study_folder: Path) -> None:
    study = optuna.load_study(
        study_name="shared", storage=f"sqlite:///{study_folder / 'bo_tuner_studies' / 'studies.db'}"
    )
    for trial in told["trials"]:
        params = trial["params"]
        global_batch = params["micro_batch_size"] * params["grad_accum_steps"] * 2
        assert trial["name"] == (
            f"z{params['zero_stage']}_gas{params['grad_accum_steps']}_mbs{params['micro_batch_size']}"
        )
        assert global_batch <= 8
        if trial["outcome"] == "complete":
            assert trial["samples_per_s"] == pytest.approx(global_batch / trial["step_time_s"])
            assert trial["peak_memory_bytes"] > 2**20
            assert trial["wall_s"] > 0
            has_settled = study.trials[trial["number"]].user_attrs["result"]["measurement"]["is_settled"]
            restless = [] if has_settled else ["step times had not settled at the last step"]
            assert trial["reason"] in ["", *restless], "a busy machine is restless, and only then has it to be said"
        else:
            assert trial["samples_per_s"] is None
            assert trial["reason"]


def test_best_is_the_fastest_that_is_confirmed_or_ahead_by_more_than_its_interval(
    told: dict[str, Any], best_first: list[dict[str, Any]]
) -> None:
    assert told["best"] == best_first[0]


def test_the_best_was_run_again(told: dict[str, Any]) -> None:
    best = told["best"]
    assert best["confirmed"] in (True, False), "the machine may have been busier then"
    assert best["confirmation"]["outcome"] == "complete"
    low, high = best["samples_per_s_interval"]
    assert low < best["samples_per_s"] < high
    assert best["confirmation"]["samples_per_s"] == best["samples_per_s"] == best["value"]
    assert told["memory_margin_bytes"] == told["memory_limit_bytes"] - best["peak_memory_bytes"]


def test_no_config_ran_twice(told: dict[str, Any]) -> None:
    names = [trial["name"] for trial in told["trials"]]
    assert len(set(names)) == len(names)


def test_tune_talks_on_stderr_about_model_machine_batch_and_budget(tuned: CompletedProcess[str]) -> None:
    for told in ("study shared", "bert-tiny", "sequence length 16", "fp32", "2 cpu ranks", "memory limit", "3 trials"):
        assert told in tuned.stderr
    assert "global batch at most 8 samples" in tuned.stderr
    assert "stopped: the budget is used up" in tuned.stderr


def expectation(ended: CompletedProcess[str]) -> str:
    """The line on what the models expect most of."""
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("the cost model expects "))
    return line


def test_the_machine_is_measured_once_and_what_is_expected_is_told_before_the_first_trial(
    run: Run, small: list[str], tmp_path: Path
) -> None:
    by_model = ["tune", "bert-tiny", *small, "--sampler", "bo", "--no-confirm"]
    first = run(*by_model, "--budget", "1 trials", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    told = re.fullmatch(
        r"the cost model expects most of (z[0-3]_(?:pp2_)?gas\d_mbs\d(?:_rc)?): [\d.]+ samples/s, \d+ MiB of memory a rank",
        expectation(first),
    )
    assert told
    before, _, after = first.stderr.partition(expectation(first))
    assert before.count("measuring how fast this machine is ...") == 1
    assert not re.search(r"^trial ", before, re.MULTILINE)
    assert re.search(rf"^trial +0  {told[1]} ", after, re.MULTILINE), "and it comes first"
    more = run(*by_model, "--budget", "2 trials", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "measuring how fast" not in more.stderr, "the study keeps it"
    assert expectation(more) == expectation(first)


def test_stderr_has_one_line_per_trial_with_name_result_and_budget_left(
    tuned: CompletedProcess[str], told: dict[str, Any]
) -> None:
    lines = re.findall(r"^trial +(\d+)  (\S+) +(.+?)   \[(.+)\]$", tuned.stderr, re.MULTILINE)
    assert [(int(number), name) for number, name, _, _ in lines] == [
        (trial["number"], trial["name"]) for trial in told["trials"]
    ]
    assert [left for *_, left in lines] == ["2 trials left", "1 trial left", "0 trials left"]
    for (_, _, ending, _), trial in zip(lines, told["trials"], strict=True):
        assert re.match(
            rf"[\d.]+/s {INTERVAL}, \d+ MiB" if trial["outcome"] == "complete" else trial["outcome"], ending
        )


def test_a_stream_that_is_no_terminal_gets_no_control_characters(tuned: CompletedProcess[str]) -> None:
    assert "\r" not in tuned.stderr
    assert "\033" not in tuned.stderr


def test_show_json_prints_what_tune_json_printed(run: Run, told: dict[str, Any], study_folder: Path) -> None:
    later = shown(run, study_folder)
    assert {**later, "spent": None} == {**told, "spent": None}
    assert set(later["spent"]) == set(told["spent"])
    assert later["spent"]["trials"] == 3
    assert later["spent"]["seconds"] == pytest.approx(told["spent"]["seconds"], abs=2.0)


def test_show_has_a_row_per_trial_and_the_summary(
    run: Run, told: dict[str, Any], best_first: list[dict[str, Any]], study_folder: Path
) -> None:
    ended = run("show", "shared", cwd=study_folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    for trial in told["trials"]:
        assert re.search(
            rf"^{trial['number']}( \*)? +{trial['name']} +\d+ +{trial['outcome']}", ended.stdout, re.MULTILINE
        )
    best = best_first[0]
    assert re.search(rf"^{best['number']} \* ", ended.stdout, re.MULTILINE)
    assert re.search(rf"^all +3 +[\d.]+ +{best['name']}$", ended.stdout, re.MULTILINE)
    assert f"best: {best['name']}" in ended.stdout
    assert "spent 3 trials" in ended.stdout


def test_export_prints_the_deepspeed_config_of_the_best(
    run: Run, best_first: list[dict[str, Any]], study_folder: Path
) -> None:
    ended = run("export", "shared", cwd=study_folder)
    assert ended.returncode == 0
    verdict = r"confirmed at|not confirmed: slower in (?:a|\d+) longer runs?, at"
    confirmed = rf"(?:{verdict}) [\d.]+/s, where its trial had [\d.]+/s"
    said = rf"{best_first[0]['name']}: [\d.]+/s {INTERVAL}, \d+ MiB, {confirmed}; peak \d+ MiB of .+ left\n"
    assert re.fullmatch(said, ended.stderr)
    config, params = json.loads(ended.stdout), best_first[0]["params"]
    assert config["train_micro_batch_size_per_gpu"] == params["micro_batch_size"]
    assert config["gradient_accumulation_steps"] == params["grad_accum_steps"]
    assert config["train_batch_size"] == params["micro_batch_size"] * params["grad_accum_steps"] * 2
    assert config["zero_optimization"]["stage"] == params["zero_stage"]


def test_export_rank_2_prints_the_second_best(run: Run, best_first: list[dict[str, Any]], study_folder: Path) -> None:
    config = json.loads(run("export", "shared", "--rank", "2", cwd=study_folder).stdout)
    params = best_first[1]["params"]
    assert config["train_micro_batch_size_per_gpu"] == params["micro_batch_size"]
    assert config["gradient_accumulation_steps"] == params["grad_accum_steps"]
    assert config["zero_optimization"]["stage"] == params["zero_stage"]


@pytest.mark.parametrize("rank", ["0", "99"])
def test_export_of_a_rank_that_is_not_there_says_how_many_there_are(
    run: Run, best_first: list[dict[str, Any]], study_folder: Path, rank: str
) -> None:
    ended = run("export", "shared", "--rank", rank, cwd=study_folder)
    assert ended.returncode == 2
    assert ended.stdout == ""
    expected = f"error: --rank must be from 1 to the {len(best_first)} complete trials; got {rank}\n"
    assert ended.stderr == expected


def test_export_out_writes_the_job_and_prints_its_files(
    run: Run, tuned: CompletedProcess[str], study_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "job"
    ended = run("export", "shared", "--out", str(out), "--json", cwd=study_folder)
    assert ended.returncode == 0
    answer = json.loads(ended.stdout)
    assert answer["study"] == "shared"
    assert answer["confirmed"] in (True, False)
    assert 0 < answer["peak_memory_bytes"] < answer["memory_limit_bytes"]
    written = [file.relative_to(out) for file in out.rglob("*") if file.is_file()]
    assert sorted(answer["files"]) == sorted(str(out / file) for file in written)
    assert {file.name for file in out.iterdir()} == {"ds_config.json", "model.json", "job", "train.py", "launch.sh"}
    assert os.access(out / "launch.sh", os.X_OK)
    for file in written:
        assert (out / file).read_bytes() == (study_folder / "job" / file).read_bytes()  # what tune --out wrote


def test_export_out_writes_what_export_prints(run: Run, tuned: CompletedProcess[str], study_folder: Path) -> None:
    printed = run("export", "shared", cwd=study_folder).stdout
    assert json.loads(printed) == json.loads((study_folder / "job" / "ds_config.json").read_text(encoding="utf-8"))


def test_list_names_the_study_its_trials_and_its_best(
    run: Run, best_first: list[dict[str, Any]], study_folder: Path
) -> None:
    ended = run("list", cwd=study_folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(rf"shared +3 trials +best [\d.]+/s {best_first[0]['name']}\n", ended.stdout)


def test_list_json_gives_the_best_of_every_study(
    run: Run, best_first: list[dict[str, Any]], study_folder: Path
) -> None:
    answer = json.loads(run("list", "--json", cwd=study_folder).stdout)
    assert answer["storage"] == f"sqlite:///{study_folder.resolve()}/bo_tuner_studies/studies.db"
    best = best_first[0]
    expected = {"study": "shared", "origin": "training", "trials": 3, "best_name": best["name"]}
    expected |= {"objective": "throughput", "value": best["standing_samples_per_s"]}
    expected["samples_per_s"] = best["standing_samples_per_s"]
    assert answer["studies"] == [expected]


def test_list_without_studies_says_how_to_start_one(run: Run, tmp_path: Path) -> None:
    ended = run("list", cwd=tmp_path)
    assert ended.returncode == 0
    assert "bo-tuner tune MODEL" in ended.stdout
    assert json.loads(run("list", "--json", cwd=tmp_path).stdout)["studies"] == []
    assert list(tmp_path.iterdir()) == []


def test_the_same_command_again_runs_nothing_new_and_prints_the_table(
    run: Run, told: dict[str, Any], tune_command: list[str], study_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(study_folder, tmp_path / "copy")
    ended = run(*tune_command, cwd=folder)
    assert ended.returncode == 0
    assert not re.search(r"^trial +\d", ended.stderr, re.MULTILINE)
    assert "stopped: the budget is used up" in ended.stderr
    assert ended.stdout.startswith("shared\n")
    assert len(re.findall(r"^\d+( \*)? +z\d_gas", ended.stdout, re.MULTILINE)) == 3
    assert shown(run, folder)["trials"] == told["trials"]


def test_a_larger_budget_goes_on_with_the_same_study_and_keeps_its_trials(
    run: Run,
    tuned: CompletedProcess[str],
    told: dict[str, Any],
    tune_command: list[str],
    study_folder: Path,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(study_folder, tmp_path / "copy")
    larger = [argument.replace("3 trials", "4 trials") for argument in tune_command]
    ended = run(*larger, "--json", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    later = json.loads(ended.stdout)
    assert later["budget"] == "4 trials"
    assert [as_measured(trial) for trial in later["trials"][:3]] == [as_measured(trial) for trial in told["trials"]]
    assert [trial["number"] for trial in later["trials"]] == [0, 1, 2, 3]
    assert later["spent"]["seconds"] > told["spent"]["seconds"]


def as_measured(trial: dict[str, Any]) -> dict[str, Any]:
    """What was measured in it, which no later trial or confirmation changes."""
    return {name: trial[name] for name in ("number", "name", "outcome", "trial_samples_per_s", "wall_s", "params")}


@pytest.mark.parametrize("command", ["tune", "show", "export", "dashboard", "list", "doctor"])
def test_help_shows_the_default_of_every_option(run: Run, tmp_path: Path, command: str) -> None:
    ended = run(command, "--help", cwd=tmp_path)
    assert ended.returncode == 0
    options = re.split(r"\n(?=  --)", ended.stdout.partition("Options:")[2])[1:]
    by_name = {text.split()[0]: " ".join(text.split()) for text in options}
    assert {"--storage", "--json", "--debug"} <= set(by_name)
    without = [name for name, text in by_name.items() if "[default:" not in text]
    assert set(without) <= FLAGS, "flags that are off"


def test_help_of_the_program_names_every_command(run: Run, tmp_path: Path) -> None:
    ended = run("--help", cwd=tmp_path)
    assert ended.returncode == 0
    for command in ("tune", "watch", "show", "export", "dashboard", "list", "doctor"):
        assert re.search(rf"^  {command} ", ended.stdout, re.MULTILINE)

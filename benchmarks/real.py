"""Studies of real trials against the measured best of their space: bert-tiny on two ranks of this machine, 60 configs.

    python -m benchmarks.real --measure 2         measures every config twice
    python -m benchmarks.real --study 10          runs ten studies
    python -m benchmarks.real [--json]            tells how near the best they came

The first two add to tables in `benchmarks/measured/here`, and go on where they stopped; nothing else may run on the machine. A study
calibrates the machine, chooses six real trials and confirms its best, as `bo-tuner tune` does. The measured configs only judge its choice.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.tables import MEASURED
from benchmarks.trials import Trials, trials_of
from bo_tuner.budget import Budget
from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Engine
from bo_tuner.models.choices import Problem
from bo_tuner.models.software import DEEPSPEED
from bo_tuner.objectives.calibration import calibrate
from bo_tuner.objectives.table import MeasuredTable, group_sizes
from bo_tuner.objectives.training import DeepSpeedBackEnd
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.opening.training import LONGEST_STEP_S
from bo_tuner.outcome import TrialResult
from bo_tuner.report import SilentProgress
from bo_tuner.samplers import make_sampler
from bo_tuner.space import BatchRule, SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.trial import TrialRecord, best_of

MODEL = "bert-tiny"
SEQ_LEN = 128
FOLDER = MEASURED / "here"
N_TRIALS = 6
NEAR = 0.95
"""Of the best rate: reached."""
_N_CONFIGS = 60
_BOUNDS = SearchSpace(
    max_micro_batch=8,
    max_grad_accum=4,
    batch_rule=BatchRule.of(max_global_batch=8),
    pipeline_depths=(1, 2),
    recompute=(False, True),
)
"""Steps of at most a second."""


def space(cluster: Cluster) -> SearchSpace:
    """The same 60 of all configs within the bounds, every time."""
    return SearchSpace.of_configs(random.Random(0).sample(_BOUNDS.candidates(cluster, DeepSpeedBackEnd()), _N_CONFIGS))


def rates(path: Path) -> dict[str, float]:
    """Samples/s of every config by its name: the geometric mean of its passes, each over the median of all configs of its pass, since the
    machine is not always as fast; times the mean of those medians."""
    logs: dict[str, list[float]] = {}
    levels: list[float] = []
    for table in (MeasuredTable.read(path, group) for group in group_sizes(path)):
        found = {
            run.config.name: math.log(rate) for run in table.runs if (rate := table.samples_per_s(run)) is not None
        }
        levels.append(statistics.median(found.values()))
        for name, log_rate in found.items():
            logs.setdefault(name, []).append(log_rate - levels[-1])
    return {name: math.exp(statistics.fmean(levels) + statistics.fmean(offs)) for name, offs in logs.items()}


def measure(trials: Trials, path: Path, *, n_pass: int) -> None:
    """Run every config that this pass lacks, each pass in a disorder of its own, and add a line as each ends."""
    group = f"{MODEL}-{trials.cluster.n_ranks}-cpu-ranks-{n_pass}"
    known = set[TrainConfig]()
    if path.is_file() and group in group_sizes(path):
        known = set(MeasuredTable.read(path, group).configs)
    configs = space(trials.cluster).listed
    for config in random.Random(n_pass).sample(configs, len(configs)):
        if config not in known:
            result, measured = trials.run(config, trials.limits)
            _append(path, [{"dataset": path.parent.name, "group": group, **_row(config, result, trials)}])
            print(
                f"pass {n_pass}: {config.name:22} {measured.samples_per_s:6.2f} samples/s", file=sys.stderr, flush=True
            )


def _row(config: TrainConfig, result: TrialResult, trials: Trials) -> dict[str, object]:
    """A trial that completed, in columns of the other tables, and three more."""
    measured, n_ranks = result.measurement, trials.cluster.n_ranks
    assert measured is not None
    low, high = measured.step_time_interval_s
    return {
        "model": MODEL,
        "params_b": trials.facts.n_parameters / 1e9,
        "gpu": "cpu",
        "num_gpus": n_ranks,
        "nodes": 1,
        "seq_len": SEQ_LEN,
        "gbs": measured.global_batch,
        "dp": config.data_parallel(n_ranks),
        "tp": 1,
        "pp": config.pipeline_depth,
        "mbs": config.micro_batch_size,
        "gas": config.grad_accum_steps,
        "zero": config.zero_stage,
        "recompute": "full" if config.recompute else "none",
        "status": "ok",
        "step_time_s": f"{measured.step_time_s:.5f}",
        "tokens_per_s": f"{measured.tokens_per_s:.1f}",
        "samples_per_s": f"{measured.samples_per_s:.3f}",
        "mem_gb": f"{max(measured.peak_memory_bytes) / 2**30:.4f}",
        "trial_cost_s": f"{result.wall_s:.2f}",
        "n_steps": len(measured.slowest_s),
        "step_time_low_s": f"{low:.5f}",
        "step_time_high_s": f"{high:.5f}",
    }


def _append(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    is_new = not path.is_file()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One study of real trials."""

    seed: int
    trials: tuple[str, ...]
    """Names of the configs that ran."""
    best: tuple[str, ...]
    """What the study held for the best after each of them; blank while nothing had completed."""
    confirmed: tuple[str, ...]
    """Names of those that ran again at its end, longer."""
    winner: str
    """What it held for the best after that."""

    def qualities(self, of: Mapping[str, float]) -> tuple[float, ...]:
        """By the rates `of` configs, what it held for the best over the best of all, after each trial."""
        return tuple(of.get(name, 0.0) / max(of.values()) for name in self.best)

    def quality(self, of: Mapping[str, float]) -> float:
        """The same of its winner."""
        return of.get(self.winner, 0.0) / max(of.values())

    def has_run_near(self, of: Mapping[str, float]) -> bool:
        """One near the best of all was among its trials, whether or not it measured that."""
        return any(of.get(name, 0.0) >= NEAR * max(of.values()) for name in self.trials)

    def reached_after(self, of: Mapping[str, float]) -> int | None:
        """Trials from which on it held one near the best of all for the best; None where it did not at its last trial."""
        far = [number for number, quality in enumerate(self.qualities(of), 1) if quality < NEAR]
        first = far[-1] + 1 if far else 1
        return first if first <= len(self.best) else None


def read_studies(path: Path) -> list[Study]:
    """In the order they ran in."""
    rows: dict[int, list[Mapping[str, str]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(int(row["study"]), []).append(row)
    return [_study(seed, told) for seed, told in rows.items()]


def _study(seed: int, rows: Sequence[Mapping[str, str]]) -> Study:
    trials = [row for row in rows if row["run"] == "trial"]
    return Study(
        seed=seed,
        trials=tuple(row["config"] for row in trials),
        best=tuple(row["best"] for row in trials),
        confirmed=tuple(row["config"] for row in rows if row["run"] == "confirm"),
        winner=rows[-1]["best"],
    )


def study(trials: Trials, *, seed: int) -> list[dict[str, object]]:
    """A row for every run of a study of real trials, that goes on as `tune` does: what model and machine promise first, then what has run."""
    facts = trials.facts
    if facts.profile is None:
        sys.exit(f"{MODEL} must have a profile: {facts.unprofiled_because}")
    readings = calibrate(trials.server, trials.cluster, precision=trials.workload.precision)
    problem = Problem(
        profile=facts.profile,
        hardware=readings.hardware(trials.cluster),
        software=DEEPSPEED,
        n_ranks=trials.cluster.n_ranks,
        layer_costs=facts.structure.layer_costs,
    )
    listed = space(trials.cluster)
    candidates = OpenCandidates(
        listed.listed,
        space=listed,
        n_ranks=trials.cluster.n_ranks,
        limit_bytes=trials.limits.memory_bytes,
        longest_step_s=LONGEST_STEP_S,
    )
    sampler = make_sampler("bo", candidates, seed=seed, problem=problem)
    store = StudyStore(Location(folder=trials.folder), f"study-{seed}")
    store.create(Manifest(workload=trials.workload, cluster=trials.cluster, space=listed, seed=seed))
    with store.drive(n_ranks=trials.cluster.n_ranks):
        Engine(
            store=store,
            sampler=sampler,
            candidates=candidates,
            objective=trials.objective,
            budget=Budget(trials=N_TRIALS),
            limits=trials.limits,
            n_ranks=trials.cluster.n_ranks,
            progress=SilentProgress(),
        ).run()
    records = store.records()
    before = [replace(record, confirmations=()) for record in records]
    told = [
        _told(seed, "trial", record, record.result, sampler.best(before[: number + 1]))
        for number, record in enumerate(records)
    ]
    again = [record for record in records if record.confirmation is not None]
    return told + [_told(seed, "confirm", record, record.confirmation, best_of(records)) for record in again]


def _told(
    seed: int, run: str, record: TrialRecord, result: TrialResult | None, best: TrialRecord | None
) -> dict[str, object]:
    """What a run showed, and what the study held for the best after it."""
    measured = result.measurement if result else None
    low, high = (result and record.interval_of(result)) or (math.nan, math.nan)
    return {
        "study": seed,
        "run": run,
        "config": record.config.name,
        "samples_per_s": f"{measured.samples_per_s:.3f}" if measured else "",
        "samples_per_s_low": f"{low:.3f}",
        "samples_per_s_high": f"{high:.3f}",
        "best": best.config.name if best else "",
    }


def by_chance(of: Mapping[str, float]) -> tuple[int, float]:
    """How many configs are near the best, and the chance that one of them is among as many random trials as a study has."""
    n, n_near = len(of), sum(rate >= NEAR * max(of.values()) for rate in of.values())
    n_trials = min(N_TRIALS, n)
    return n_near, 1 - math.comb(n - n_near, n_trials) / math.comb(n, n_trials)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, run studies, or tell what they came to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real", description=__doc__)
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="measure every config N times")
    parser.add_argument("--study", type=int, default=0, metavar="N", help="run studies with the seeds up to N")
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    options = parser.parse_args(argv)
    runs, studies = FOLDER / "runs.csv", FOLDER / "studies.csv"
    if not options.measure and not options.study:
        _tell(rates(runs), read_studies(studies), as_json=options.json)
        return
    with trials_of(MODEL, seq_len=SEQ_LEN, device="cpu", n_ranks=2, traces=True) as trials:
        for n_pass in range(1, options.measure + 1):
            measure(trials, runs, n_pass=n_pass)
        known = {one.seed for one in read_studies(studies)} if studies.is_file() else set[int]()
        for seed in sorted(set(range(options.study)) - known):
            rows = study(trials, seed=seed)
            _append(studies, rows)
            runs_of_it = ", ".join(f"{row['run']} {row['config']} {row['samples_per_s']}" for row in rows)
            print(f"study {seed}: {runs_of_it}; best {rows[-1]['best']}", file=sys.stderr, flush=True)


def _tell(of: Mapping[str, float], studies: Iterable[Study], *, as_json: bool) -> None:
    judged = [(one, one.qualities(of), one.reached_after(of)) for one in studies]
    n_near, chance = by_chance(of)
    if as_json:
        rows = [
            {**asdict(one), "qualities": shares, "reached_after": after, "quality": one.quality(of)}
            for one, shares, after in judged
        ]
        json.dump({"n_near": n_near, "chance": chance, "studies": rows}, sys.stdout, indent=1)
        print()
        return
    print(
        "| study | within 5 % from trial | its best after 1, 2, ... trials, of the best of all | confirmed, more runs |"
    )
    print("| --- | --- | --- | --- |")
    for one, shares, after in judged:
        told = " ".join(f"{share:.2f}" for share in shares)
        print(f"| {one.seed} | {after or 'never'} | {told} | {one.quality(of):.2f}, {len(one.confirmed)} |")
    print()
    n_reached = sum(after is not None for *_, after in judged)
    n_won = sum(one.quality(of) >= NEAR for one, *_ in judged)
    print(
        f"Within 5 % of the best of all are {n_near} of {len(of)} configs. {n_reached} of {len(judged)} studies hold one of them for the best "
        f"after {N_TRIALS} trials (aim: 9 of 10), {n_won} once it is confirmed; {sum(one.has_run_near(of) for one, *_ in judged)} have run one. "
        f"With random trials {chance:.2f} of studies would."
    )


if __name__ == "__main__":
    main()

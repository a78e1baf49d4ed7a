"""How often what a study tells of its trials holds: does another launch lie within the 95 % interval, or below the bound of a trial that was
ended early?

    python -m benchmarks.coverage                     the measured passes, and simulated studies
    python -m benchmarks.coverage --studies 40        more of them

The measured passes are those of `benchmarks/measured/here`: the prior of what launches differ by was chosen on one half of their configs, and
the other half judges it. Simulated studies run whole, confirmations included, with launches that differ by 2, 5 and 10 %; then every
config is launched once more. These studies begin with the prior for GPUs, which is the same for all three.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.tables import MEASURED
from bo_tuner.budget import Budget
from bo_tuner.engine import Engine
from bo_tuner.launches import Launch, LaunchNoise, NoisePrior, prior_of
from bo_tuner.objectives import TrialEvent
from bo_tuner.objectives.simulated import SimulatedObjective, Simulation
from bo_tuner.objectives.training import DeepSpeedBackEnd
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.opening import TuneOptions
from bo_tuner.opening.simulation import SimulatedOpening, open_simulation
from bo_tuner.outcome import TrialLimits
from bo_tuner.report import SilentProgress
from bo_tuner.samplers import make_sampler
from bo_tuner.storage import Location, StudyStore
from bo_tuner.trial import TrialRecord, reopened

NOISES = (0.02, 0.05, 0.1)
_THEN_HALF_WIDTH = 0.03182
"""What the measured intervals count in for launches, which is taken out again: 3.182 times 1 %."""
_ANOTHER_DRAW = 1000


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over one config: its step time and the 95 % interval by its steps alone."""

    step_s: float
    interval_s: tuple[float, float]

    @classmethod
    def of(cls, row: dict[str, str]) -> Pass:
        step_s, low, high = (float(row[name]) for name in ("step_time_s", "step_time_low_s", "step_time_high_s"))
        launch = _THEN_HALF_WIDTH * step_s
        down, up = (math.sqrt(max(side**2 - launch**2, 0.0)) for side in (step_s - low, high - step_s))
        return cls(step_s, (step_s - down, step_s + up))

    @property
    def launch(self) -> Launch:
        return Launch.of(self.step_s, self.interval_s)


def measured_passes(path: Path = MEASURED / "here" / "runs.csv") -> list[list[Pass]]:
    """Per config its passes, in a disorder that is always the same, so that halves of the list are alike."""
    found: dict[tuple[str, ...], list[Pass]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in ("gbs", "dp", "pp", "mbs", "gas", "zero", "recompute"))
            found.setdefault(key, []).append(Pass.of(row))
    return random.Random(0).sample([found[key] for key in sorted(found)], len(found))


def held(configs: Sequence[Sequence[Pass]], noise: LaunchNoise) -> float:
    """Of all pairs of passes over one config, the share where the second lies within the interval that is told of the first."""
    pairs = [pair for passes in configs for pair in itertools.permutations(passes, 2)]
    spans = [(noise.another(one.step_s, one.interval_s), other.step_s) for one, other in pairs]
    return statistics.fmean(low <= step_s <= high for (low, high), step_s in spans)


@dataclass(frozen=True, slots=True)
class Told:
    """What simulated studies told, and how it held."""

    held: float
    """Intervals of complete trials that another launch lay in."""
    n_intervals: int
    broken: float
    """Bounds that another launch was above."""
    n_bounds: int
    half_width: float
    """Of the intervals in the median, in logarithms."""
    n_launches: float
    """Of a study in the mean, repeats and confirmations included."""
    n_open: int
    """Trials that were ended early, with a bound above the best at the end of their study."""
    lost: float
    """Of the rate of the best config that any study of that seed ran, what the winner lacks, in the mean."""


def studies(noise: float, n: int, *, stalls: float) -> Told:
    """Run `n` studies with launches that differ by `noise`, and steps that stall with this probability."""
    spans: list[tuple[float, float, float]] = []
    bounds: list[tuple[float, float]] = []
    n_launches, n_open, lost = list[int](), 0, list[float]()
    options = TuneOptions(
        model="bert-tiny",
        simulate=Simulation(noise=noise, straggler_probability=stalls),
        cluster="2x4xV100-16GB",
        seq_len=128,
        budget="20 trials",
        max_global_batch=512,
    )
    with open_simulation(options) as opening:
        for seed in range(n):
            objective = SimulatedObjective(opening.simulated, seed=seed, settings=opening.settings)
            quiet = SimulatedObjective(opening.simulated, seed=seed, settings=replace(opening.settings, noise=0.0))
            limits = TrialLimits(memory_bytes=opening.memory_bytes, data_draw=_ANOTHER_DRAW)
            records = _study(opening, objective, seed)
            truth = {
                record.config: rate
                for record in records
                if (rate := quiet(record.config, limits=limits, on_event=_ignore).samples_per_s) is not None
            }
            best = max(
                (record for record in records if record.standing_samples_per_s is not None and record.confirmations),
                key=lambda record: record.standing_samples_per_s or 0.0,
            )
            lost.append(1 - truth[best.config] / max(truth.values()))
            n_launches.append(sum(len(record.runs) + len(record.attempts) for record in records))
            n_open += len(reopened(records))
            for record in records:
                rate = objective(record.config, limits=limits, on_event=_ignore).samples_per_s
                trial = replace(record, confirmations=())  # the interval of a trial, as of one that nobody confirmed
                if rate is not None and trial.samples_per_s_interval is not None:
                    spans.append((*trial.samples_per_s_interval, rate))
                if rate is not None and record.bound_samples_per_s is not None:
                    bounds.append((record.bound_samples_per_s, rate))
    return Told(
        held=statistics.fmean(low <= rate <= high for low, high, rate in spans),
        n_intervals=len(spans),
        broken=statistics.fmean(rate > bound for bound, rate in bounds) if bounds else math.nan,
        n_bounds=len(bounds),
        half_width=statistics.median(math.log(high / low) / 2 for low, high, _ in spans),
        n_launches=statistics.fmean(n_launches),
        n_open=n_open,
        lost=statistics.fmean(lost),
    )


def _study(opening: SimulatedOpening, objective: SimulatedObjective, seed: int) -> list[TrialRecord]:
    space, n_ranks = opening.wanted.space, opening.wanted.cluster.n_ranks
    candidates = OpenCandidates(
        space.candidates(opening.wanted.cluster, DeepSpeedBackEnd()),
        space=space,
        n_ranks=n_ranks,
        limit_bytes=opening.memory_bytes,
        longest_step_s=math.inf,
    )
    with tempfile.TemporaryDirectory(prefix="bo_tuner-") as folder:
        store = StudyStore(Location(folder=Path(folder)), "study")
        store.create(replace(opening.wanted, seed=seed))
        Engine(
            store=store,
            sampler=make_sampler("bo", candidates, seed=seed, problem=opening.simulated),
            candidates=candidates,
            objective=objective,
            budget=Budget(trials=20),
            limits=TrialLimits(memory_bytes=opening.memory_bytes),
            n_ranks=n_ranks,
            progress=SilentProgress(),
        ).run()
        records = store.records()
        store.location.open().engine.dispose()
        return records


def _ignore(event: TrialEvent) -> None:
    """Nobody looks on."""


def rows(n_studies: int, *, stalls: float) -> Iterator[str]:
    """Both tables, in Markdown."""
    configs = measured_passes()
    half = len(configs) // 2
    chosen_on, judged = configs[:half], configs[half:]
    flat = NoisePrior(sd=0.05, spread=10.0)  # says nothing
    likeliest = flat.given([[one.launch for one in passes] for passes in chosen_on])
    yield f"launches of the first {half} configs differ by {likeliest.sd:.3f}; the prior for CPUs has {prior_of('cpu').sd:.3f}"
    yield ""
    yield "| measured passes | prior alone | after three launches of another config |"
    yield "| --- | --- | --- |"
    for words, own, others in (
        ("configs that chose the prior", chosen_on, judged),
        ("the others", judged, chosen_on),
    ):
        alone = held(own, prior_of("cpu").given([]))
        learnt = [held(own, prior_of("cpu").given([[one.launch for one in passes[:3]]])) for passes in others]
        yield f"| {words} | {alone:.3f} | {statistics.fmean(learnt):.3f} |"
    yield ""
    yield (
        "| launches differ by | intervals that hold | half-width, median | bounds broken | bounds above the best at the end "
        "| launches a study | winner's loss |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for noise in NOISES:
        told = studies(noise, n_studies, stalls=stalls)
        yield (
            f"| {noise:.0%} | {told.held:.3f} of {told.n_intervals} | {told.half_width:.1%} | {told.broken:.3f} of {told.n_bounds} "
            f"| {told.n_open} | {told.n_launches:.1f} | {told.lost:.2%} |"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--studies", type=int, default=20, help="simulated studies at each noise (default: 20)")
    parser.add_argument(
        "--stalls", type=float, default=0.0, help="probability of a step to take 1.5 times as long (default: 0)"
    )
    options = parser.parse_args()
    for line in rows(options.studies, stalls=options.stalls):
        print(line, flush=True)


if __name__ == "__main__":
    main()

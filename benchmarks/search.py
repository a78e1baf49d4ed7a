"""Every method of search, replayed on measured tables: how near to the best config after how many trials, and at what cost.

    python -m benchmarks.search [--methods bo,tpe] [--seeds 20] [--data vtrain] [--csv FILE] [--html FILE] [--json] [--jobs 2]

All groups with 20 or more configs. Those that calibrate the cost model are told apart. A trial that failed in the table takes what the table
says, or 1.5 times a good one. Besides the samplers of `--sampler` there are arms of the first: without a cost model (`bo-alone`), with
one whose constants are all wrong (`bo-mistaken`), and with one that says of each config what is true of another (`bo-misled`).
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.mistaken import Misled, mistaken
from benchmarks.replays import Replay, Replayed
from benchmarks.tables import Guess, calibrates, tables
from bo_tuner.samplers import SAMPLERS, CandidateSampler, make_sampler
from bo_tuner.samplers.bayesian import BayesianSampler

__all__ = ["BUDGETS", "METHODS", "Row", "Stop", "Study", "replays", "rows", "stops", "studies"]

BUDGETS = (3, 5, 10, 20)
"""Trials; against time, as many medians of a completed trial."""
DATA_SETS = ("ultrascale_playbook", "vtrain")
FEWEST = 20
"""Configs of a group."""
_N_RESAMPLED = 1000
_SLOW_SEEDS = {"gp": 3, "tpe": 10}
"""At most so many, for methods that take long to ask."""

Make = Callable[[Replay, int], CandidateSampler]


def _stock(name: str, replay: Replay, seed: int) -> CandidateSampler:
    return make_sampler(name, replay.candidates, seed=seed, problem=replay.problem)


def _alone(replay: Replay, seed: int) -> CandidateSampler:
    return BayesianSampler(replay.candidates, seed=seed)


def _mistaken(replay: Replay, seed: int) -> CandidateSampler:
    assert replay.problem is not None
    problem = mistaken(replay.problem, replay.table.name, seed)
    return BayesianSampler(replay.candidates, seed=seed, problem=problem)


def _misled(replay: Replay, seed: int) -> CandidateSampler:
    return Misled(replay.candidates, seed=seed, problem=replay.problem)


METHODS: dict[str, Make] = {
    **{name: functools.partial(_stock, name) for name in SAMPLERS},
    "bo-alone": _alone,
    "bo-mistaken": _mistaken,
    "bo-misled": _misled,
}
"""Name -> makes a sampler of a replay for a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One method on one group with one seed."""

    method: str
    data_set: str
    group: str
    calibrates: bool
    seed: int
    replayed: Replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one budget, over groups and seeds."""

    method: str
    groups: str
    budget: int
    mean: float
    """Of the best rate over the best of the table."""
    low: float
    high: float
    """95 % interval of the mean, groups drawn anew."""
    median: float
    within_5: float
    """Share of studies within 5 % of the best."""
    within_2: float
    infeasible: float
    """Trials that did not complete, per study."""
    worst: float
    """Of a group, over its seeds."""
    mean_at_cost: float
    """As `mean`, after the time of so many completed trials, in the median; what has not ended by then does not count."""
    within_5_at_cost: float


def replays(data_sets: Sequence[str] = DATA_SETS, *, only: Sequence[str] = ()) -> list[tuple[str, Replay]]:
    """The groups that are large enough, with their data set.

    Args:
        data_sets: Where to look.
        only: Beginnings of groups' names; none for all.
    """
    found: list[tuple[str, Replay]] = []
    for data_set in data_sets:
        for table in tables(data_set, fewest=FEWEST):
            if len(table.configs) >= FEWEST and (not only or table.name.startswith(tuple(only))):
                found.append((data_set, Replay(table, Guess().problem(table))))
    return found


def studies(
    methods: Iterable[str], found: Sequence[tuple[str, Replay]], *, n_seeds: int, n_trials: int = BUDGETS[-1]
) -> list[Study]:
    """Every method on every group with every seed."""
    return [
        Study(
            method=method,
            data_set=data_set,
            group=replay.table.name,
            calibrates=calibrates(replay.table),
            seed=seed,
            replayed=replay.study(METHODS[method](replay, seed), n_trials=n_trials),
        )
        for method in methods
        for data_set, replay in found
        for seed in range(min(n_seeds, _SLOW_SEEDS.get(method, n_seeds)))
    ]


def rows(found: Sequence[Study], groups: str) -> list[Row]:
    """One for each method and budget.

    Args:
        found: Studies of the same groups by each method.
        groups: What these are called.
    """
    methods = dict.fromkeys(study.method for study in found)
    return [
        _row([study for study in found if study.method == method], method, groups, budget)
        for method in methods
        for budget in BUDGETS
    ]


def _row(found: Sequence[Study], method: str, groups: str, budget: int) -> Row:
    best = np.array([study.replayed.best[budget - 1] for study in found])
    at_cost = np.array([_at_cost(study.replayed, budget) for study in found])
    by_group = _by_group(found, best)
    chance = np.random.default_rng(0)
    drawn = chance.choice(by_group, size=(_N_RESAMPLED, len(by_group))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Row(
        method=method,
        groups=groups,
        budget=budget,
        mean=float(best.mean()),
        low=float(low),
        high=float(high),
        median=float(np.median(best)),
        within_5=float((best >= 0.95).mean()),
        within_2=float((best >= 0.98).mean()),
        infeasible=float(np.mean([study.replayed.ran[:budget].count(False) for study in found])),
        worst=float(by_group.min()),
        mean_at_cost=float(at_cost.mean()),
        within_5_at_cost=float((at_cost >= 0.95).mean()),
    )


def _by_group(found: Sequence[Study], values: Any) -> Any:
    """Means over seeds."""
    names = [study.group for study in found]
    return np.array(
        [np.mean([v for v, n in zip(values, names, strict=True) if n == name]) for name in dict.fromkeys(names)]
    )


def _at_cost(replayed: Replayed, budget: float) -> float:
    n_ended = sum(cost <= budget + 1e-9 for cost in replayed.cost)
    return replayed.best[n_ended - 1] if n_ended else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """How studies of one method end by themselves."""

    method: str
    groups: str
    stopped: float
    """Share of studies that do within 20 trials."""
    trials: float
    """Until then, in the mean."""
    quality: float
    """Best until then over the best of the table, in the mean."""
    wrong: float
    """Share of them that left a config behind which is over 2 % faster: twice the gain that counts."""


def stops(found: Sequence[Study], groups: str) -> list[Stop]:
    """One for each method that can tell when to stop."""
    told: list[Stop] = []
    for method in dict.fromkeys(study.method for study in found):
        own = [study.replayed for study in found if study.method == method]
        ended = [replayed for replayed in own if replayed.stopped_after is not None]
        if ended:
            told.append(
                Stop(
                    method=method,
                    groups=groups,
                    stopped=len(ended) / len(own),
                    trials=float(np.mean([one.stopped_after or 0 for one in ended])),
                    quality=float(np.mean([one.best[(one.stopped_after or 1) - 1] for one in ended])),
                    wrong=float(np.mean([one.left_better > 1.02 for one in ended])),
                )
            )
    return told


def _told_apart(found: Sequence[Study]) -> list[tuple[str, list[Study]]]:
    """Studies by what their groups are for, and by data set."""
    tests = [study for study in found if not study.calibrates]
    sets = dict.fromkeys(study.data_set for study in tests)
    return [
        ("all that test", tests),
        *((f"{name}, test", [study for study in tests if study.data_set == name]) for name in sets if len(sets) > 1),
        ("calibrate", [study for study in found if study.calibrates]),
    ]


def print_rows(found: Sequence[Row]) -> None:
    """As a table in Markdown."""
    print(
        f"| {found[0].groups} | trials | mean of best/optimum | median | within 5 % / 2 % | infeasible | worst group | same cost: mean, within 5 % |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in found:
        print(
            f"| {row.method} | {row.budget} | {row.mean:.3f} ({row.low:.3f} to {row.high:.3f}) | {row.median:.3f} | {row.within_5:.2f} / "
            f"{row.within_2:.2f} | {row.infeasible:.2f} | {row.worst:.3f} | {row.mean_at_cost:.3f}, {row.within_5_at_cost:.2f} |"
        )
    print()


def print_stops(found: Sequence[Stop]) -> None:
    """As a table in Markdown."""
    print("| ends by itself | groups | share | after trials | best/optimum then | wrong by over 2 % |")
    print("| --- | --- | --- | --- | --- | --- |")
    for stop in found:
        print(
            f"| {stop.method} | {stop.groups} | {stop.stopped:.2f} | {stop.trials:.1f} | {stop.quality:.4f} | {stop.wrong:.3f} |"
        )


def write_csv(found: Sequence[Study], path: Path) -> None:
    """A line a trial of every study."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("method", "data_set", "group", "calibrates", "seed", "trial", "best_over_optimum", "completed", "cost")
        )
        for study in found:
            of = study.replayed
            for trial, (ran, cost) in enumerate(zip(of.ran, of.cost, strict=True)):
                head = (study.method, study.data_set, study.group, int(study.calibrates), study.seed)
                writer.writerow((*head, trial + 1, f"{of.best[trial]:.5f}", int(ran), f"{cost:.3f}"))


def write_page(found: Sequence[Study], path: Path) -> None:
    """Best over optimum by trials and by cost, a line a method."""
    from plotly.subplots import make_subplots

    tests = [study for study in found if not study.calibrates]
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("after trials", "after the time of so many completed trials")
    )
    n_trials = BUDGETS[-1]
    for method in dict.fromkeys(study.method for study in tests):
        own = [study.replayed for study in tests if study.method == method]
        x = list(range(1, n_trials + 1))
        by_trial = np.mean([one.best for one in own], axis=0)
        by_cost = [float(np.mean([_at_cost(one, budget) for one in own])) for budget in x]
        for column, y in ((1, by_trial), (2, by_cost)):
            figure.add_scatter(x=x, y=y, name=method, legendgroup=method, showlegend=column == 1, row=1, col=column)
    figure.update_yaxes(title_text="mean of best / optimum", range=[0, 1.01])
    figure.update_layout(title_text="Search on measured tables that set no constant")
    figure.write_html(path, include_plotlyjs="cdn")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--methods", default=",".join(METHODS), help="some of them, with commas")
    parser.add_argument("--seeds", type=int, default=20, help="studies of each method and group")
    parser.add_argument("--data", default=",".join(DATA_SETS), help="data sets, with commas")
    parser.add_argument("--groups", default="", help="beginnings of groups' names, with commas; empty for all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at work")
    parser.add_argument("--csv", type=Path, help="write every trial there")
    parser.add_argument("--html", type=Path, help="write a page there")
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    options = parser.parse_args(argv)
    methods = options.methods.split(",")
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        parser.error(f"--methods must be some of {', '.join(METHODS)}; got {unknown[0]}")
    found = _all_studies(methods, options)
    if options.csv:
        write_csv(found, options.csv)
    if options.html:
        write_page(found, options.html)
    parts = [(name, some) for name, some in _told_apart(found) if some]
    if options.json:
        every_row = [asdict(row) for name, some in parts for row in rows(some, name)]
        every_stop = [asdict(stop) for name, some in parts for stop in stops(some, name)]
        json.dump({"rows": every_row, "stops": every_stop}, sys.stdout, indent=1)
        print()
        return
    for name, some in parts:
        print_rows(rows(some, name))
    print_stops([stop for name, some in parts for stop in stops(some, name)])


def _all_studies(methods: Sequence[str], options: argparse.Namespace) -> list[Study]:
    groups = [part for part in options.groups.split(",") if part]
    names = [replay.table.name for _, replay in replays(options.data.split(","), only=groups)]
    if not names:
        sys.exit(f"--groups must name groups of {options.data} with {FEWEST} or more configs; got {options.groups!r}")
    work = [(method, name, options.data, options.seeds) for method in methods for name in names]
    found: list[Study] = []
    with ProcessPoolExecutor(max_workers=options.jobs) as pool:
        for done, some in enumerate(pool.map(_studies_of, work), start=1):
            found += some
            if sys.stderr.isatty():
                print(f"\r{done} of {len(work)} groups and methods", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return found


def _studies_of(work: tuple[str, str, str, int]) -> list[Study]:
    method, name, data_sets, n_seeds = work
    own = [pair for pair in _replays_once(data_sets) if pair[1].table.name == name]
    return studies([method], own, n_seeds=n_seeds)


@functools.cache
def _replays_once(data_sets: str) -> list[tuple[str, Replay]]:
    """In each process."""
    return replays(data_sets.split(","))


if __name__ == "__main__":
    main()

"""What the models expect against what others measured, group by group.

    python -m benchmarks.validation [--json] [--all]

Groups that calibrate constants are told apart from those that test them. Times are compared per sample, inside a group only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.tables import Compared, calibrates, compared, tables
from bo_tuner.models.choices import Flags, Floats

__all__ = ["Agreement", "agreement", "rank_correlation", "summary"]

DATA_SETS = ("ultrascale_playbook", "vtrain")
"""With groups that are large enough to rank."""
SINGLE = ("llmfoundry", "internevo")
"""With few configs a group, or one: absolute times."""
_NEAR = 2.0
"""Configs within this factor of the best are those that a search must tell apart."""
_HIT = 0.95
_FITS = 0.94
"""Of the card: above it the models' memory counts as too much."""
_CROWDED = 0.7
"""Of the card: a failure below it is no lack of memory, most likely."""
_LARGE_BYTES = 30 * 2**30
_FEWEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How the expectation of one group agrees with its measurements. None where there is too little to say."""

    data_set: str
    group: str
    calibrates: bool
    n_configs: int
    n_complete: int
    rank_correlation: float | None
    """Spearman's, of expected and measured time per sample."""
    near_correlation: float | None
    """Among configs within 2x of the best."""
    best_of_top: tuple[float, float, float]
    """Best rate of the first 1, 3 and 5 that are expected to be fast and to fit, over the best of the group."""
    bias: float
    """Median of expected over measured time, among configs within 2x of the best."""
    near_error: float
    """Median of the relative error of time there, beside the bias."""
    memory_error: float | None
    """Median of the relative error of memory, where over 30 GiB were measured."""
    n_failed_expected: int
    """Failed, and expected to fill 0.94 of the card or more."""
    n_failed_crowded: int
    """Failed, and expected to fill 0.7 of the card or more."""
    n_complete_refused: int
    """Complete, and expected to fill 0.94 of the card or more."""

    def hits(self, first: int) -> bool:
        """A config within 5 % of the best is among the first 1, 3 or 5."""
        return self.best_of_top[(1, 3, 5).index(first)] >= _HIT


def rank_correlation(one: Floats, other: Floats) -> float | None:
    """Spearman's rho, ties at their mean rank; None for fewer than three or all alike."""
    if len(one) < 3:
        return None
    first, second = _ranks(one), _ranks(other)
    if first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Floats = last - (counts - 1) / 2
    return mean[places]


def agreement(found: Compared) -> Agreement:
    """Compare one group."""
    done: Flags = found.is_complete
    expected, measured = found.expected_per_sample[done], found.measured_per_sample[done]
    near = measured <= _NEAR * measured.min()
    ratio = expected[near] / measured[near]
    fullness = found.expected_bytes / found.card_bytes
    speed = np.where(done, measured.min() / found.measured_per_sample, 0.0)
    order = np.argsort(np.where(fullness <= _FITS, found.expected_per_sample, np.inf), kind="stable")
    large = done & (found.measured_bytes > _LARGE_BYTES)
    memory_ratio = found.expected_bytes[large] / found.measured_bytes[large]
    return Agreement(
        data_set=found.table.data_set,
        group=found.table.name,
        calibrates=calibrates(found.table),
        n_configs=len(done),
        n_complete=int(done.sum()),
        rank_correlation=rank_correlation(measured, expected),
        near_correlation=rank_correlation(measured[near], expected[near]),
        best_of_top=(float(speed[order[:1]].max()), float(speed[order[:3]].max()), float(speed[order[:5]].max())),
        bias=float(np.median(ratio)),
        near_error=float(np.median(np.abs(ratio / np.median(ratio) - 1))),
        memory_error=float(np.median(np.abs(memory_ratio - 1))) if len(memory_ratio) >= 3 else None,
        n_failed_expected=int((~done & (fullness > _FITS)).sum()),
        n_failed_crowded=int((~done & (fullness > _CROWDED)).sum()),
        n_complete_refused=int((done & (fullness > _FITS)).sum()),
    )


def summary(found: Sequence[Agreement]) -> dict[str, float]:
    """Medians over groups, and shares of them."""

    def median(values: Sequence[float | None]) -> float:
        known = [value for value in values if value is not None]
        return float(np.median(known)) if known else float("nan")

    refused = sum(one.n_complete_refused for one in found)
    expected, crowded = sum(one.n_failed_expected for one in found), sum(one.n_failed_crowded for one in found)
    return {
        "groups": len(found),
        "rank_correlation": median([one.rank_correlation for one in found]),
        "near_correlation": median([one.near_correlation for one in found]),
        **{f"hit_among_{n}": float(np.mean([one.hits(n) for one in found])) for n in (1, 3, 5)},
        "near_error": median([one.near_error for one in found]),
        "memory_error": median([one.memory_error for one in found]),
        "oom_precision": expected / (expected + refused) if expected + refused else float("nan"),
        "oom_recall": expected / crowded if crowded else float("nan"),
    }


def absolute(data_set: str) -> dict[str, tuple[int, float, float, float]]:
    """By device, the number of runs, and the 10th, 50th and 90th percentile of expected over measured time."""
    ratios: dict[str, list[float]] = {}
    for table in tables(data_set, fewest=1):
        one = compared(table)
        if one is not None:
            done = one.is_complete
            ratios.setdefault(table.gpu, []).extend((one.expected_s[done] / one.measured_s[done]).tolist())
    return {
        gpu: (len(values), *(float(value) for value in np.quantile(values, (0.1, 0.5, 0.9))))  # type: ignore[misc]
        for gpu, values in sorted(ratios.items())
    }


def _print_absolute() -> None:
    print("| absolute times | runs | expected / measured: 10th, 50th, 90th percentile |")
    print("| --- | --- | --- |")
    for name in SINGLE:
        for gpu, (n, low, middle, high) in absolute(name).items():
            print(f"| {name}, {gpu} | {n} | {_shown(low)}, {_shown(middle)}, {_shown(high)} |")


def _shown(value: float | None, digits: int = 2) -> str:
    return "" if value is None or np.isnan(value) else f"{value:.{digits}f}"


def _print_groups(found: Sequence[Agreement]) -> None:
    print(
        "| group | configs (complete) | rank, all | rank, near | best of top 1 / 3 / 5 | bias | time error | memory error |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in found:
        tops = " / ".join(_shown(top) for top in one.best_of_top)
        print(
            f"| {one.data_set} {one.group} | {one.n_configs} ({one.n_complete}) | {_shown(one.rank_correlation)} "
            f"| {_shown(one.near_correlation)} | {tops} | {_shown(one.bias)} | {_shown(one.near_error, 3)} | {_shown(one.memory_error, 3)} |"
        )


def _print_summary(name: str, found: Sequence[Agreement]) -> None:
    of = summary(found)
    print(
        f"| {name} | {of['groups']:.0f} | {_shown(of['rank_correlation'])} | {_shown(of['near_correlation'])} "
        f"| {_shown(of['hit_among_1'])} / {_shown(of['hit_among_3'])} / {_shown(of['hit_among_5'])} "
        f"| {_shown(of['near_error'], 3)} | {_shown(of['memory_error'], 3)} "
        f"| {_shown(of['oom_precision'])} / {_shown(of['oom_recall'])} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the same for programs")
    parser.add_argument("--all", action="store_true", help="list the groups that calibrate, too")
    options = parser.parse_args(argv)
    found = [
        agreement(one)
        for name in DATA_SETS
        for table in tables(name, fewest=_FEWEST)
        if (one := compared(table)) is not None
    ]
    tests = [one for one in found if not one.calibrates]
    if options.json:
        parts: dict[str, object] = {
            "tests": summary(tests),
            "calibrate": summary([one for one in found if one.calibrates]),
        }
        parts["absolute"] = {name: absolute(name) for name in SINGLE}
        json.dump({**parts, "groups": [asdict(one) for one in found]}, sys.stdout, indent=1)
        print()
        return
    print(
        "| groups | number | rank, all | rank, near | hit among 1 / 3 / 5 | time error | memory error | OOM precision / recall |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    _print_summary("all that test", tests)
    for name in DATA_SETS:
        for is_calibration in (False, True):
            some = [one for one in found if one.data_set == name and one.calibrates is is_calibration]
            if some:
                _print_summary(f"{name}, {'calibrate' if is_calibration else 'test'}", some)
    print()
    _print_absolute()
    print()
    _print_groups(found if options.all else tests)


if __name__ == "__main__":
    main()

"""What a study found, as facts for the top of a report; nothing here is estimated or rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bo_tuner.config import TrainConfig
from bo_tuner.outcome import Measurement
from bo_tuner.report.standing import without_value
from bo_tuner.text import gib, rate
from bo_tuner.trial import TrialRecord, best_of, last_limit_bytes, memory_margin

__all__ = ["Answer", "Gain", "answer_of", "default_gain", "first_gain", "ratio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The best config against another one."""

    factor: float | None
    """How many times as good by the study's goal, as many samples/s for one; None where there is nothing to compare with."""
    against: TrialRecord | None = None
    """The trial compared with."""
    text: str
    """What it is compared with, or why it cannot be, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best config that fits, by the study's goal, and how far it came."""

    best: TrialRecord
    measurement: Measurement
    """Of its confirmation, or of its trial where it has none."""
    over_default: Gain
    over_first: Gain
    limit_bytes: int | None
    """Memory limit per rank of the last run."""

    @property
    def first_is_default(self) -> bool:
        """Both gains are over one trial."""
        return self.over_first.against is not None and self.over_first.against == self.over_default.against

    @property
    def peak_bytes(self) -> int | None:
        """Of the fullest rank, in all runs of the config."""
        return self.best.peak_memory_bytes

    @property
    def margin_bytes(self) -> int | None:
        """Below the limit; negative when the limit was lowered since. None when one of the two is unknown."""
        return memory_margin(self.best, self.limit_bytes)


def answer_of(records: Sequence[TrialRecord], default: TrainConfig) -> Answer | None:
    """What is known now; None when nothing completed.

    Args:
        records: The trials of a study.
        default: What one would start from without tuning.
    """
    best = best_of(records)
    standing = best.standing if best is not None else None
    if best is None or standing is None or standing.measurement is None:
        return None
    return Answer(
        best=best,
        measurement=standing.measurement,
        over_default=default_gain(records, best, default),
        over_first=first_gain(records, best),
        limit_bytes=last_limit_bytes(records),
    )


def default_gain(records: Sequence[TrialRecord], best: TrialRecord, default: TrainConfig) -> Gain:
    """Against the default config, or what became of it."""
    if best.config == default:
        return Gain(factor=None, text=f"{default.name} is the default config itself: nothing beat it")
    own = [record for record in records if record.config == default]
    complete = best_of(own)
    if complete is not None:
        return _gain(best, complete, "the default config")
    ended = [record.result for record in own if record.result is not None]
    if not ended:
        return Gain(factor=None, text=f"the default config ({default.name}) has not run in this study")
    if without_value(own):
        return Gain(factor=None, text=f"the default config ({default.name}) has run: {without_value(own)}")
    last = ended[-1]
    if last.outcome.is_memory:
        limit = f" in {gib(last.limit_bytes)} a rank" if last.limit_bytes else ""
        return Gain(factor=None, text=f"the default config ({default.name}) did not fit{limit}")
    return Gain(factor=None, text=f"the default config ({default.name}) ended as {last.outcome.value}: {last.reason}")


def first_gain(records: Sequence[TrialRecord], best: TrialRecord) -> Gain:
    """Against the first config that completed: what trial and error would have stopped at."""
    first = min(
        (record for record in records if record.goal.value(record) is not None),
        key=lambda record: record.number,
        default=best,
    )
    if first.number == best.number:
        return Gain(factor=None, text=f"{best.config.name} is the first config that fitted: nothing beat it")
    return _gain(best, first, "the first that fitted")


def _gain(best: TrialRecord, other: TrialRecord, what: str) -> Gain:
    goal = best.goal
    value, base = best.standing_value, goal.score(other)
    assert value is not None and base is not None  # both are ranked
    return Gain(
        factor=goal.measure.score(value) / base,
        against=other,
        text=f"{what}, {other.config.name}, with {rate(other.samples_per_s or 0.0)}{goal.beside(other)} (trial {other.number})",
    )


def ratio(factor: float) -> str:
    """A factor with as many digits as measurements of a few steps bear: "1.07", "3.4", "12", and a times sign."""
    digits = 0 if factor >= 9.95 else 1 if factor >= 1.995 else 2
    return f"{factor:.{digits}f}\N{MULTIPLICATION SIGN}"

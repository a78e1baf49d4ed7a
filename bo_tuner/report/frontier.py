"""Where memory ends in each layout: the largest micro-batch that fits, and the smallest that does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bo_tuner.config import TrainConfig
from bo_tuner.open_candidates import memory_proofs
from bo_tuner.trial import TrialRecord, ranked

__all__ = ["Frontier", "frontiers", "layout_label"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What is known of one layout under one memory limit."""

    layout: TrainConfig
    fits: int | None = None
    """Largest micro-batch that ran within the limit; None when none did."""
    fails: int | None = None
    """Smallest that ran out of memory; None when none did."""
    proof: int | None = None
    """Number of the trial that showed `fails`."""
    best: TrialRecord | None = None
    """The layout's fastest complete trial."""
    n_trials: int = 0
    """With a result."""


def frontiers(records: Sequence[TrialRecord], limit_bytes: int | None) -> list[Frontier]:
    """One for every layout that was tried, the least sharded and least deep first.

    Args:
        records: The trials of a study.
        limit_bytes: Memory limit per rank that counts; what a lower one ended is then no proof. None when unknown.
    """
    tried = [record for record in records if record.result is not None]
    proofs = memory_proofs(tried, limit_bytes=limit_bytes or 0)
    found: list[Frontier] = []
    for layout in sorted({record.config.layout for record in tried}, key=_order):
        own = [record for record in tried if record.config.layout == layout]
        proof = proofs.get(layout)
        found.append(
            Frontier(
                layout=layout,
                fits=max(
                    (record.config.micro_batch_size for record in own if _fits(record, limit_bytes)), default=None
                ),
                fails=proof.micro_batch_size if proof else None,
                proof=proof.trial if proof else None,
                best=next(iter(ranked(own)), None),
                n_trials=len(own),
            )
        )
    return found


def _fits(record: TrialRecord, limit_bytes: int | None) -> bool:
    """It ran, and would under this limit."""
    peak = record.peak_memory_bytes
    return record.has_run and (limit_bytes is None or (peak or 0) <= limit_bytes)


def _order(layout: TrainConfig) -> tuple[int, int, int, bool, str]:
    return (layout.zero_stage, layout.pipeline_depth, layout.tensor_parallel, layout.recompute, layout.name)


def layout_label(config: TrainConfig) -> str:
    """A layout for legends and tables: "ZeRO 1", "ZeRO 1 pp2 rc"; what differs from the default is named as in the config's name."""
    parts = config.layout.name.split("_")
    return " ".join([f"ZeRO {config.zero_stage}", *(part for part in parts[1:] if part not in ("gas1", "mbs1"))])

"""Studies to report on: made by hand, shaped like real ones, and kept in real databases."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.outcome import Measurement, Outcome, TrialResult
from bo_tuner.space import SearchSpace, distributions
from bo_tuner.storage import Location, Manifest, StudyStore
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import ModelSpec, Workload

GIB = 2**30
LIMIT_BYTES = int(0.92 * 80 * GIB)
N_RANKS = 8
SEQ_LEN = 512
HOSTILE = '</script><script>alert("x")</script> <b>bold</b> & {{ name }}'
"""A reason that a careless page would run, or draw in bold."""


def reported_manifest() -> Manifest:
    """BERT-large on eight GPUs."""
    return Manifest(
        workload=Workload(
            model=ModelSpec.resolve("bert-large-uncased"),
            n_parameters=336_226_108,
            seq_len=SEQ_LEN,
            precision="bf16",
        ),
        cluster=Cluster(
            device="cuda",
            n_ranks=N_RANKS,
            device_name="NVIDIA H100 80GB HBM3",
            memory_bytes=80 * GIB,
            usual_precision="bf16",
        ),
        space=SearchSpace(),
        seed=7,
        versions={
            "bo_tuner": "0.1.0",
            "python": "3.11.2",
            "torch": "2.13.0",
            "deepspeed": "0.19.8",
            "host": "gpu-node-3",
        },
    )


def measured(config: TrainConfig, *, step_s: float, peak_bytes: int, noise: random.Random | None = None) -> TrialResult:
    """A complete trial of five steps, each within some percent of `step_s`."""
    draw = noise or random.Random(0)
    times = tuple(
        tuple(step_s * (1 + 0.01 * abs(draw.gauss(0, 1.5))) for _ in range(5)) for _ in range(min(N_RANKS, 2))
    )
    return TrialResult(
        outcome=Outcome.COMPLETE,
        measurement=Measurement(
            global_batch=config.global_batch(N_RANKS),
            seq_len=SEQ_LEN,
            step_times_s=times,
            engine_times_s=times,
            peak_memory_bytes=(peak_bytes,) * len(times),
        ),
        peak_memory_bytes=peak_bytes,
        limit_bytes=LIMIT_BYTES,
        wall_s=8 + 7 * step_s,
        phases_s={"start": 6.0, "warmup": 2 * step_s, "measure": 5 * step_s, "teardown": 2.0},
    )


def ended(outcome: Outcome, reason: str, *, peak_bytes: int | None = None, log_tail: str = "") -> TrialResult:
    """A trial that did not complete."""
    return TrialResult(
        outcome=outcome,
        reason=reason,
        peak_memory_bytes=peak_bytes,
        limit_bytes=LIMIT_BYTES,
        wall_s=11.0,
        log_tail=log_tail,
    )


def pretended(config: TrainConfig, noise: random.Random) -> TrialResult:
    """What a cluster of the shape above might have said: throughput that levels off, memory that grows with the micro-batch."""
    depth, sharded = config.pipeline_depth, (1.0, 0.45, 0.35, 0.25)[config.zero_stage]
    activations = (0.22 if config.recompute else 0.75) * config.micro_batch_size / depth
    peak_bytes = int((6.2 * sharded / depth + 1.5 + activations) * GIB)
    if peak_bytes > LIMIT_BYTES:
        if noise.random() < 0.5:
            return ended(
                Outcome.GUARDED,
                f"rank {noise.randrange(N_RANKS)} used {peak_bytes / GIB:.2f} GiB, over the limit of 73.60 GiB",
                peak_bytes=LIMIT_BYTES + GIB // 4,
            )
        return ended(
            Outcome.OOM,
            f"the allocator of rank {noise.randrange(N_RANKS)} refused a request of 1.25 GiB",
            peak_bytes=LIMIT_BYTES - GIB // 2,
            log_tail="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB.\nrank 3 exited with 1",
        )
    slowed = (1.0, 1.0, 1.04, 1.2)[config.zero_stage] * (1.28 if config.recompute else 1.0) * (1 + 0.06 * (depth - 1))
    full = 118 * N_RANKS * (1 - math.exp(-config.micro_batch_size / 14)) / slowed
    bubble = config.grad_accum_steps / (config.grad_accum_steps + depth - 1)
    overhead = 1 + 0.25 / config.grad_accum_steps / (1 + config.micro_batch_size / 16)
    rate = full * bubble / overhead
    return measured(config, step_s=config.global_batch(N_RANKS) / rate, peak_bytes=peak_bytes, noise=noise)


def rich_trials() -> list[TrialRecord]:
    """68 trials of sixteen layouts: every kind of end, a retry, one that runs, and a reason full of markup."""
    noise = random.Random(3)
    configs = [TrainConfig()]
    for stage in (0, 1, 2, 3):
        for depth in (1, 2, 4) if stage < 2 else (1,):
            for recompute in (False, True):
                configs += [
                    TrainConfig(
                        zero_stage=stage,
                        micro_batch_size=size,
                        grad_accum_steps=noise.choice((1, 2, 4, 8)),
                        pipeline_depth=depth,
                        recompute=recompute,
                    )
                    for size in sorted(noise.sample((2, 4, 8, 16, 32, 45, 64, 93, 128, 181, 256, 362), 4))
                ]
    first, *others = dict.fromkeys(configs)
    noise.shuffle(others)
    results = [pretended(config, noise) for config in (first, *others)]
    slow = min(range(1, len(results)), key=lambda index: results[index].samples_per_s or math.inf)
    results[slow] = TrialResult(
        outcome=Outcome.PRUNED,
        reason="it cannot beat 800/s: at most 210/s after 2 steps",
        bound_samples_per_s=210.0,
        peak_memory_bytes=12 * GIB,
        limit_bytes=LIMIT_BYTES,
        wall_s=9.0,
    )
    records = [
        TrialRecord(number=number, config=config, result=result)
        for number, (config, result) in enumerate(zip((first, *others), results, strict=True))
    ]
    hung = ended(Outcome.TIMEOUT, "no step within 90 s; rank 2 waits in all_reduce", log_tail="rank 2: all_reduce")
    failed = ended(Outcome.FAILED, HOSTILE, log_tail=f"Traceback\n{HOSTILE}")
    extra = [
        (TrainConfig(zero_stage=2, micro_batch_size=11), failed, (hung,)),
        (TrainConfig(zero_stage=3, micro_batch_size=13), ended(Outcome.REJECTED, "DeepSpeed refuses this config"), ()),
        (TrainConfig(zero_stage=3, micro_batch_size=3), None, ()),
    ]
    return records + [
        TrialRecord(number=len(records) + index, config=config, result=result, attempts=attempts)
        for index, (config, result, attempts) in enumerate(extra)
    ]


def numbered(*trials: tuple[TrainConfig, TrialResult | None]) -> list[TrialRecord]:
    """Trials in the order given."""
    return [TrialRecord(number=number, config=config, result=result) for number, (config, result) in enumerate(trials)]


def stored(folder: Path, name: str, records: Sequence[TrialRecord]) -> StudyStore:
    """A real study in the default database of `folder`, as `tune` leaves it."""
    store = StudyStore(Location(folder=folder / "bo_tuner_studies"), name)
    store.create(reported_manifest())
    space = distributions([record.config for record in records] or [TrainConfig()])
    with store.drive(n_ranks=N_RANKS, budget="60 trials, 1h"):
        for record in records:
            trial = store.begin(record.config, space)
            for attempt in record.attempts:
                trial = store.add_attempt(trial, attempt)
            if record.result is not None:
                store.finish(trial, record.result)
        store.note_stop("60 trials, 1h", "the budget is used up" if records else "")
    return store


def edge_studies() -> dict[str, list[TrialRecord]]:
    """Studies that have little to show."""
    default, other, small = TrainConfig(), TrainConfig(zero_stage=1, micro_batch_size=16), TrainConfig(zero_stage=3)
    refused = ended(Outcome.OOM, "the allocator of rank 0 refused a request of 2.00 GiB", peak_bytes=70 * GIB)
    low = replace(ended(Outcome.GUARDED, "rank 0 used 9.00 GiB", peak_bytes=9 * GIB), limit_bytes=8 * GIB)
    broken = ended(Outcome.FAILED, HOSTILE, log_tail=HOSTILE)
    fine = measured(default, step_s=0.2, peak_bytes=9 * GIB)
    return {
        "nothing": [],
        "running": numbered((default, None)),
        "none-fits": numbered((default, refused), (other, refused), (small, refused)),
        "all-failed": numbered((default, broken), (small, broken)),
        "one": numbered((default, fine)),
        "default-unfit": numbered(
            (default, refused),
            (small, measured(small, step_s=0.2, peak_bytes=GIB)),
            (other, measured(other, step_s=0.25, peak_bytes=2 * GIB)),
        ),
        "earlier-limit": numbered((other, low), (default, fine), (other, None)),
    }

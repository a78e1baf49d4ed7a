"""Runs a whole study of a made-up objective, in a process that tests may kill: `crash_driver.py FOLDER JOURNAL [options]`.

Says on stdout, one JSON document a line: what it found, that it drives, how it ended. With `--die-at` it first runs once for
each point given, in a fork that kills itself there. Every call of the objective is one line of JOURNAL, on disk before the call does anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bo_tuner import engine as engine_module
from bo_tuner.budget import Budget
from bo_tuner.cluster import Cluster
from bo_tuner.config import TrainConfig
from bo_tuner.engine import Engine, Snapshot
from bo_tuner.errors import BoTunerError
from bo_tuner.objectives import EventSink
from bo_tuner.open_candidates import OpenCandidates
from bo_tuner.outcome import Measurement, Outcome, TrialLimits, TrialResult
from bo_tuner.samplers import make_sampler
from bo_tuner.space import SearchSpace
from bo_tuner.storage import Location, Manifest, StudyStore, study_names
from bo_tuner.trial import TrialRecord
from bo_tuner.workload import ModelSpec, Workload

STUDY = "mine"
TRIAL_S = 0.02
_GIB = 2**30
_CLUSTER = Cluster(device="cpu", n_ranks=2, device_name="made up", memory_bytes=8 * _GIB)
_SPACE = SearchSpace(zero_stages=(0, 1, 3), max_micro_batch=32, max_grad_accum=4)
_WORKLOAD = Workload(model=ModelSpec(name="toy", architecture={"model_type": "bert"}), n_parameters=1000, seq_len=16)


class AnyBackEnd:
    """Runs everything."""

    def legal(self, config: TrainConfig) -> bool:
        return True


class SilentProgress:
    """Tells nobody."""

    def shows(self, snapshot: Snapshot) -> None: ...

    def ended(self, record: TrialRecord, snapshot: Snapshot) -> None: ...

    def ran_again(self, record: TrialRecord, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class JournalObjective:
    """The same result for a config whenever it runs."""

    def __init__(
        self, folder: Path, journal: Path, *, fill_disk_at: int | None, run_at: tuple[int, str] | None, trial_s: float
    ) -> None:
        self._folder = folder
        self._journal = journal
        self._fill_disk_at = fill_disk_at
        self._run_at = run_at
        self._trial_s = trial_s

    def __call__(self, config: TrainConfig, *, limits: TrialLimits, on_event: EventSink) -> TrialResult:
        with open(self._journal, "a", encoding="ascii") as journal:
            journal.write(f"{config.name}\n")
            journal.flush()
            os.fsync(journal.fileno())
        time.sleep(self._trial_s)
        n_calls = len(self._journal.read_text(encoding="ascii").splitlines())
        if self._fill_disk_at == n_calls:
            self._fill_disk()
        if self._run_at is not None and self._run_at[0] == n_calls:
            subprocess.run(self._run_at[1].split(), check=True)
        return result_of(config)

    def _fill_disk(self) -> None:
        with contextlib.suppress(OSError), open(self._folder / "ballast", "wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))


def result_of(config: TrainConfig) -> TrialResult:
    """Big micro-batches run out of memory; accumulation of 4 always crashes under ZeRO 1."""
    size, accum, stage = config.micro_batch_size, config.grad_accum_steps, config.zero_stage
    peak = _GIB * size * (4 - stage) // 12
    if peak > 8 * _GIB:
        return TrialResult(outcome=Outcome.OOM, reason="too big", peak_memory_bytes=8 * _GIB, limit_bytes=8 * _GIB)
    if stage == 1 and accum == 4:
        return TrialResult(outcome=Outcome.FAILED, reason="crashed", wall_s=0.5)
    step_s = 0.01 + 0.002 * size * accum + 0.003 * stage
    times = ((step_s, step_s), (step_s, step_s * 1.01))
    measurement = Measurement(
        global_batch=config.global_batch(2),
        seq_len=16,
        step_times_s=times,
        engine_times_s=times,
        peak_memory_bytes=(peak, peak),
    )
    return TrialResult(
        outcome=Outcome.COMPLETE, measurement=measurement, peak_memory_bytes=peak, limit_bytes=8 * _GIB, wall_s=1.0
    )


def die() -> None:
    """As if the power went."""
    os.kill(os.getpid(), signal.SIGKILL)


def after(owner: Any, method: str, is_point: Callable[..., bool]) -> None:
    """Die when `method` of `owner` has returned from a call that `is_point` recognises."""
    original = getattr(owner, method)

    def dying(*args: Any, **options: Any) -> Any:
        value = original(*args, **options)
        if is_point(*args, **options):
            die()
        return value

    setattr(owner, method, dying)


class Nth:
    """True at the n-th call, false at all others."""

    def __init__(self, n: int) -> None:
        self._left = n

    def __call__(self, *args: Any, **options: Any) -> bool:
        self._left -= 1
        return self._left == 0


def plan_death(store: StudyStore, point: str, nth: int) -> None:
    """Arrange for the process to die at the `nth` pass of a point in the life of a trial."""
    storage = store.location.open()
    count = Nth(nth)
    if point == "after-begin":
        after(storage, "create_new_trial", count)
    elif point == "after-tell":
        after(storage, "set_trial_state_values", count)
    elif point == "after-study":
        after(storage, "create_new_study", count)
    elif point == "in-transaction":
        die_in_transaction(store, count)
    else:
        method, key = ATTRIBUTES[point]
        after(storage, method, lambda trial_id, name, value: name == key and count())


def die_in_transaction(store: StudyStore, count: Nth) -> None:
    """Die in a transaction that writes, its statements made and not committed."""
    from sqlalchemy import event

    wrote = [False]

    def on_statement(connection: object, cursor: object, statement: str, *rest: object) -> None:
        wrote[0] = wrote[0] or statement.startswith(("INSERT", "UPDATE"))

    def on_commit(connection: object) -> None:  # SQLAlchemy tells just before it commits
        if wrote[0] and count():
            die()
        wrote[0] = False

    event.listen(store.location.open().engine, "before_cursor_execute", on_statement)
    event.listen(store.location.open().engine, "commit", on_commit)


ATTRIBUTES = {
    "after-result": ("set_trial_user_attr", "result"),
    "after-attempt": ("set_trial_user_attr", "attempts"),
    "after-outcome": ("set_trial_user_attr", "outcome"),
    "between-constraints": ("set_trial_system_attr", "constraints"),
    "before-tell": ("set_trial_system_attr", "constraints:memory"),
}


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def drive(options: argparse.Namespace, death: str = "") -> None:
    """Start the study or go on with it, as `tune` does; die where `death` says, as in `after-begin:3`."""
    location = Location(folder=options.folder)
    store = StudyStore(location, STUDY)
    point, _, nth = death.partition(":")
    exists = STUDY in study_names(location)
    stored = store.manifest()
    if point == "after-study":
        plan_death(store, point, int(nth))
    manifest = Manifest(workload=_WORKLOAD, cluster=_CLUSTER, space=_SPACE, seed=options.seed)
    if stored is None:
        store.create(manifest)
    else:
        stored.check_same(manifest, study_name=STUDY)
    records = store.records()
    say(
        study="whole" if stored else "half" if exists else "none",
        done=[record.config.name for record in records if record.result is not None],
        running=[record.config.name for record in records if record.result is None],
        spent=store.spent().seconds,
    )
    candidates = OpenCandidates(
        _SPACE.candidates(_CLUSTER, AnyBackEnd()), space=_SPACE, n_ranks=2, limit_bytes=8 * _GIB, longest_step_s=20.0
    )
    with store.drive(n_ranks=2):
        say(driving=True)
        if point not in ("", "after-study"):
            plan_death(store, point, int(nth))
        engine = Engine(
            store=store,
            sampler=make_sampler(options.sampler, candidates, seed=options.seed),
            candidates=candidates,
            objective=JournalObjective(
                options.folder,
                options.journal,
                fill_disk_at=options.fill_disk_at,
                run_at=(int(options.run_at[0]), options.run_at[1]) if options.run_at else None,
                trial_s=options.trial_s,
            ),
            budget=Budget(trials=options.budget),
            limits=TrialLimits(memory_bytes=8 * _GIB),
            n_ranks=2,
            progress=SilentProgress(),
            confirms=False,
        )
        started = time.monotonic()
        reason = engine.run()
        say(stopped=reason.name, seconds=time.monotonic() - started)


def drive_to_death(options: argparse.Namespace, death: str) -> None:
    """Drive in a process of its own, which saves it the imports."""
    child = os.fork()
    if child == 0:
        drive(options, death)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    say(died=os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--budget", type=int, default=12)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--sampler", default="random")
    parser.add_argument("--die-at", nargs="*", default=[], help="POINT:NTH of each run before the last")
    parser.add_argument("--fill-disk-at", type=int, help="the call of the objective that fills the disk")
    parser.add_argument(
        "--run-at", nargs=2, metavar=("CALL", "COMMAND"), help="at this call of the objective, run a command"
    )
    parser.add_argument("--trial-s", type=float, default=TRIAL_S)
    options = parser.parse_args()
    engine_module.MOST_KILLS = 1000  # trials are killed here for no fault of theirs, and some of them often
    try:
        for death in options.die_at:
            drive_to_death(options, death)
        drive(options)
    except BoTunerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

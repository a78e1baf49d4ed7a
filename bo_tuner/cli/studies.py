"""`bo-tuner show`, `export` and `list`: commands that read studies."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bo_tuner.cli.options import AsJson, Debug, Storage, StudyName, print_json
from bo_tuner.errors import ConfigError, NothingFitsError, StoreError, UnreadableStudyError
from bo_tuner.objectives.training import DeepSpeedBackEnd, deepspeed_config
from bo_tuner.objectives.training.dimensions import dimensions_found
from bo_tuner.origin import Origin
from bo_tuner.report import study_to_dict, summary_text, trials_table, write_job
from bo_tuner.report.export import check_exportable
from bo_tuner.report.progress import ending
from bo_tuner.report.standing import confirmation_text, margin_text, without_value
from bo_tuner.storage import Location, Manifest, StudyStore, study_names
from bo_tuner.text import count, rate
from bo_tuner.trial import TrialRecord, best_of, last_limit_bytes, ranked

__all__ = ["export", "export_text", "list_studies", "open_study", "show", "show_study"]


def show(study: StudyName, storage: Storage = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show a study: one row a trial, and the best."""
    store, manifest = open_study(study, storage)
    records = store.records()
    if as_json:
        budget = store.last_stop().get("budget") or None
        candidates = manifest.space.candidates(manifest.cluster, DeepSpeedBackEnd())
        print_json(
            study_to_dict(
                study,
                records,
                candidates,
                budget=budget,
                spent=store.spent(records),
                origin=manifest.origin,
                goal=manifest.goal,
            )
        )
        return
    print(show_study(study, records, manifest))
    spent, stop = store.spent(), store.last_stop()
    ended = f"; stopped: {stop['reason']} ({stop['budget']})" if stop.get("reason") else ""
    print(f"spent {count(spent.trials, 'trial')}, {spent.seconds:.0f} s{ended}")


def export(
    study: StudyName,
    rank: Annotated[int, typer.Option(help="Which of the complete trials: 1 is the best.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for ds_config.json, train.py and launch.sh.", show_default="print the DeepSpeed JSON"
        ),
    ] = None,
    storage: Storage = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Hand over a config: its DeepSpeed JSON, or a job.

    Prints the DeepSpeed JSON, or with --out writes all that is needed to train.
    """
    store, manifest = open_study(study, storage)
    records = store.records()
    complete = ranked(records)
    if not complete:
        why = without_value(records) or "it has no complete trial"
        raise NothingFitsError(f"study {study!r} has nothing to export: {why}; go on with bo-tuner tune")
    if not 1 <= rank <= len(complete):
        raise ConfigError(f"--rank must be from 1 to the {len(complete)} complete trials; got {rank}")
    record = complete[rank - 1]
    check_exportable(record.config, manifest.space.dimensions)
    dimensions = dimensions_found(manifest.space, manifest.workload, folder=store.folder)
    print(export_text(record, manifest.origin), file=sys.stderr)
    if out is None:
        n_ranks, device = manifest.cluster.n_ranks, manifest.cluster.device
        settings = deepspeed_config(
            record.config, manifest.workload, n_ranks=n_ranks, device=device, dimensions=dimensions
        )
        print(json.dumps(settings, indent=2))
        return
    files = write_job(
        out,
        record,
        manifest.workload,
        manifest.cluster,
        study_folder=store.folder,
        origin=manifest.origin,
        dimensions=dimensions,
        environment=manifest.environment,
    )
    if as_json:
        print_json(
            {
                "study": study,
                "name": record.config.name,
                "origin": manifest.origin.kind,
                "files": [str(file) for file in files],
                "confirmed": record.is_confirmed,
                "peak_memory_bytes": record.peak_memory_bytes,
                "memory_limit_bytes": last_limit_bytes([record]),
            }
        )
    else:
        print("\n".join(str(file) for file in files))


def export_text(record: TrialRecord, origin: Origin) -> str:
    """What is known of a config that is handed over: its speed, whether that was confirmed, and the memory it leaves free; and whether
    anybody has measured it."""
    margin = margin_text(record, last_limit_bytes([record]))
    known = f"{record.config.name}: {ending(record)}, {confirmation_text(record, origin)}; {margin}"
    return f"{origin.warning}\n{known}" if origin.warning else known


def list_studies(storage: Storage = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the studies of this folder, or of a storage."""
    location = Location(storage)
    rows: list[dict[str, str | int | float | None]] = []
    lines: list[tuple[str, str]] = []
    for name in study_names(location):
        try:
            row, line = _listed(StudyStore(location, name))
        except UnreadableStudyError as error:
            row, line = dict[str, str | int | float | None](study=name, unreadable=str(error)), f"unreadable: {error}"
        rows.append(row)
        lines.append((name, line))
    if as_json:
        print_json({"storage": location.shown_url, "studies": rows})
    elif not rows:
        print(f"no studies in {location.shown_url}; bo-tuner tune MODEL starts one")
    else:
        width = max(len(name) for name, _ in lines)
        print("\n".join(f"{name:<{width}}  {line}" for name, line in lines))


def _listed(store: StudyStore) -> tuple[dict[str, str | int | float | None], str]:
    """A study as `list` tells it, for programs and for people."""
    records, origin = store.records(), store.origin
    best = best_of(records)
    found = "nothing complete"
    if best is not None:
        found = f"best {rate(best.standing_samples_per_s or 0.0)}{best.beside} {best.config.name}"
    unreal = "" if origin.is_real else f" ({origin.kind})"
    row: dict[str, str | int | float | None] = {
        "study": store.name,
        "origin": origin.kind,
        "objective": store.goal.name,
        "trials": len(records),
        "best_name": best.config.name if best else None,
        "samples_per_s": best.standing_samples_per_s if best else None,
        "value": best.standing_value if best else None,
    }
    return row, f"{count(len(records), 'trial'):>9}  {found}{unreal}"


def show_study(name: str, records: Sequence[TrialRecord], manifest: Manifest) -> str:
    """A study in text."""
    candidates = manifest.space.candidates(manifest.cluster, DeepSpeedBackEnd())
    summary = summary_text(
        records,
        candidates=candidates,
        limit_bytes=last_limit_bytes(records),
        stages=manifest.space.zero_stages,
        depths=manifest.space.pipeline_depths,
        origin=manifest.origin,
    )
    warning = f"{manifest.origin.warning}\n" if manifest.origin.warning else ""
    return f"{warning}{name}\n\n{trials_table(records, n_ranks=manifest.cluster.n_ranks)}\n\n{summary}"


def open_study(name: str, storage: str | None) -> tuple[StudyStore, Manifest]:
    """A study that was started, and what for.

    Raises:
        StoreError: There is none.
    """
    store = StudyStore.existing(Location(storage), name)
    manifest = store.manifest()
    if manifest is None:
        raise StoreError(f"study {name!r} was never started; bo-tuner tune MODEL --study {name} starts it")
    return store, manifest

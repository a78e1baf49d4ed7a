"""`examine`: every check, quick ones first."""

from __future__ import annotations

import re
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

from bo_tuner.cluster import Cluster, DeviceKind
from bo_tuner.doctor.database import database
from bo_tuner.doctor.finding import Finding, Status, fail, ok, warn
from bo_tuner.doctor.gpus import Driver, cuda, gpu_findings, read_driver, sick_driver, torch_build
from bo_tuner.doctor.group import examine_group
from bo_tuner.doctor.launcher import started_by
from bo_tuner.doctor.leftovers import extension_folders, extension_locks, shared_segments
from bo_tuner.doctor.machine import cores, disk, memory, open_files, shared_memory
from bo_tuner.doctor.software import compiler, ninja, packages, python_version
from bo_tuner.errors import ClusterError
from bo_tuner.objectives.training import extensions
from bo_tuner.storage.location import DEFAULT_FOLDER

__all__ = ["examine", "look"]

_USUAL_RANKS = 2

_Found = Finding | Iterable[Finding]


def examine(
    *,
    device: str = "auto",
    n_ranks: int | None = None,
    storage: str | None = None,
    tell: Callable[[str], None],
    debug: bool = False,
) -> Iterator[Finding]:
    """Look at this machine as `tune` would use it. Never raises for what is wrong with it: that is a finding.

    Args:
        device: `auto`, `cpu` or `cuda`.
        n_ranks: Ranks that must meet; None for all visible GPUs, or two on a CPU.
        storage: Database URL; None for the default.
        tell: Is told what is waited for.
        debug: Tell the traceback of a check that breaks too.
    """
    clusters: list[Cluster] = []
    drivers: list[Driver] = []

    def gpus() -> Iterator[Finding]:
        must_be_there = device == "cuda"
        try:
            driver = read_driver()
        except ClusterError as error:
            yield sick_driver(str(error), wants_gpu=device != "cpu")
            return
        drivers.extend([driver] if driver else [])
        yield from gpu_findings(driver, must_be_there=must_be_there)

    def torch() -> Finding:
        import torch

        driver = drivers[0] if drivers else None
        return torch_build(driver, version=torch.__version__, cuda=torch.version.cuda, wants_gpu=device != "cpu")

    def devices() -> Finding:
        try:
            clusters.append(Cluster.detect(device=device, n_ranks=n_ranks))
        except ClusterError as error:
            found, *way_out = re.split(r"[;:] (?=use |mend |correct |leave |name |make )", str(error), maxsplit=1)
            return fail("devices", found, *(way_out or ["use --device cpu"]))
        return ok("devices", str(clusters[0]), **clusters[0].to_dict())

    what_is_there: dict[str, Callable[[], _Found]] = {
        "bo_tuner": _own_version,
        "started by": started_by,
        "python": python_version,
        "packages": packages,
        "gpu driver": gpus,
        "torch": torch,
        "devices": devices,
    }
    has_failed = False
    for name, check in what_is_there.items():
        for finding in look(name, check, tell, debug=debug):
            has_failed |= finding.name == "torch" and finding.status is Status.FAIL
            yield finding
    if clusters and clusters[0].device == "cuda" and not has_failed:
        tell("starting CUDA ...")
        for finding in look("cuda", lambda: cuda(clusters[0]), tell, debug=debug):
            has_failed |= finding.status is Status.FAIL
            yield finding

    kind: DeviceKind = clusters[0].device if clusters else ("cuda" if device == "cuda" else "cpu")
    ranks = clusters[0].n_ranks if clusters else n_ranks or _USUAL_RANKS
    caches = extension_folders()
    temporary = Path(tempfile.gettempdir())
    whether_it_will_do: dict[str, Callable[[], _Found]] = {
        "compiler": lambda: compiler(kind, is_op_cached=extensions.is_cached()),
        "ninja": lambda: ninja(kind, is_op_cached=extensions.is_cached()),
        "cpu cores": lambda: cores(ranks),
        "memory": lambda: memory(ranks),
        "open files": open_files,
        "/dev/shm": lambda: shared_memory(ranks, kind),
        "shared segments": shared_segments,
        "extension locks": lambda: extension_locks(caches),
        "disk: studies": lambda: disk("studies", DEFAULT_FOLDER, way_out="tune in another folder"),
        "disk: temporary": lambda: disk("temporary", temporary, way_out="set TMPDIR to another folder"),
        "disk: compiled ops": lambda: disk("compiled ops", caches[-1], way_out="set XDG_CACHE_HOME to another folder"),
        "storage": lambda: database(storage),
    }
    for name, check in whether_it_will_do.items():
        yield from look(name, check, tell, debug=debug)
    if clusters and not has_failed:
        yield from look(
            "fork server",
            lambda: examine_group(clusters[0], tell, gpus=drivers[0].visible if drivers else ()),
            tell,
            debug=debug,
        )


def look(name: str, check: Callable[[], _Found], tell: Callable[[str], None], *, debug: bool) -> Iterator[Finding]:
    """The findings of one check; one that breaks is a finding too."""
    try:
        found = check()
        yield from [found] if isinstance(found, Finding) else found
    except Exception as error:  # noqa: BLE001  # whatever is broken here, the other checks must still be made
        if debug:
            tell(traceback.format_exc())
        text = " ".join(f"{type(error).__name__}: {error}".split())
        yield warn(name, f"could not be looked at: {text}", "mend what the text names; --debug shows where it happened")


def _own_version() -> Finding:
    return ok("bo_tuner", f"{metadata.version('bo_tuner')} in {Path(__file__).parents[1]}")

"""`Manifest`: what a study was started for. It is written with the study, and a resume must agree with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bo_tuner.cluster import Cluster
from bo_tuner.errors import StudyMismatchError, UnreadableStudyError
from bo_tuner.fork import Fork
from bo_tuner.goal import THROUGHPUT, Goal
from bo_tuner.launches import NoisePrior
from bo_tuner.origin import REAL, Origin
from bo_tuner.source_code import changes
from bo_tuner.space import SearchSpace
from bo_tuner.workload import Workload

__all__ = ["Manifest"]

SCHEMA_VERSION = 1
_SAME_FLOPS = 0.01
"""Relative; of data whose samples differ in length, the first need not be the same."""
_SAME_MEMORY = 0.02
"""Relative; what a kernel leaves of a machine's memory differs a little from boot to boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What makes the trials of a study comparable, and where they come from."""

    workload: Workload
    cluster: Cluster
    space: SearchSpace
    seed: int
    goal: Goal = THROUGHPUT
    origin: Origin = REAL
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of python, torch, deepspeed, transformers and bo_tuner; they may differ on resume."""
    environment: Mapping[str, str] | None = None
    """The user's variables that change how ranks run (of the allocator, of NCCL, of threads); they may differ on resume. None where
    nothing ran, and in studies of old."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the user's code, by file or name; empty where there is none, and in studies of old."""
    fork: Fork | None = None
    """What it was forked from; None where from nothing."""
    noise: NoisePrior | None = None
    """What launches were expected to differ by when the study began, by earlier studies on the same devices; None where none told, and in
    studies of old."""
    unknown: tuple[str, ...] = field(default=(), compare=False)
    """What a newer version wrote and this one has no field for: such a study is shown, and not gone on with."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {
            "schema_version": SCHEMA_VERSION,
            "workload": self.workload.to_dict(),
            "cluster": self.cluster.to_dict(),
            "space": self.space.to_dict(),
            "seed": self.seed,
            "goal": self.goal.to_dict(),
            "origin": self.origin.to_dict(),
            "versions": dict(self.versions),
            "environment": None if self.environment is None else dict(self.environment),
            "code": dict(self.code),
            "fork": None if self.fork is None else self.fork.to_dict(),
            "noise": None if self.noise is None else self.noise.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_dict`.

        Raises:
            UnreadableStudyError: Another version of bo_tuner wrote it.
        """
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise UnreadableStudyError(
                f"it has schema version {version}, and this bo_tuner reads {SCHEMA_VERSION}: "
                "upgrade bo_tuner, or start another study with --study"
            )
        manifest = cls(
            workload=Workload.from_dict(data["workload"]),
            cluster=Cluster.from_dict(data["cluster"]),
            space=SearchSpace.from_dict(data["space"]),
            seed=data["seed"],
            goal=Goal.from_dict(data.get("goal", {})),  # studies of old looked for samples/s only, ...
            origin=Origin.from_dict(data.get("origin", {})),  # ... and had real steps only
            versions=data["versions"],
            environment=data.get("environment"),
            code=data.get("code", {}),
            fork=Fork.from_dict(data["fork"]) if data.get("fork") else None,
            noise=NoisePrior.from_dict(data["noise"]) if data.get("noise") else None,
        )
        return replace(manifest, unknown=tuple(_unknown(data, manifest.to_dict())))

    def check_same(self, other: Manifest, *, study_name: str) -> None:
        """Refuse to go on with a study for something else.

        Args:
            other: What is wanted now.
            study_name: For the message.

        Raises:
            StudyMismatchError: Origin, goal, workload, hardware or space differ; the text names the first differences.
        """
        if self.unknown:
            raise StudyMismatchError(
                f"study {study_name!r} was begun by a newer bo_tuner and depends on what this one does not know "
                f"({', '.join(self.unknown[:3])}): upgrade, or start another study with --study NAME"
            )
        mine, theirs = (json.loads(json.dumps(manifest.to_dict())) for manifest in (self, other))
        if abs(self.cluster.memory_bytes - other.cluster.memory_bytes) <= _SAME_MEMORY * self.cluster.memory_bytes:
            theirs["cluster"]["memory_bytes"] = self.cluster.memory_bytes
        theirs["origin"]["source"] = self.origin.source
        differences = list(_differences(mine["origin"], theirs["origin"], "origin"))
        if not differences:  # all else follows: another table has other configs
            if self.goal.name == other.goal.name:
                differences += list(_differences(mine["goal"], theirs["goal"], "objective"))
            else:
                differences.append(f"objective is {self.goal.name}, not {other.goal.name}")
            for part in ("workload", "cluster", "space"):
                differences += list(_differences(mine[part], theirs[part], part))
        if differences:
            shown = "; ".join(differences[:3]) + ("; ..." if len(differences) > 3 else "")
            raise StudyMismatchError(
                f"study {study_name!r} exists for something else ({shown}): repeat its options, "
                "or start another study with --study NAME"
            )

    def check_code(self, other: Manifest, *, study_name: str, flops: Sequence[int] = ()) -> None:
        """Refuse to go on with a study of other code.

        Args:
            other: What is wanted now.
            study_name: For the message.
            flops: Of a sample's forward pass, in the study and now, where both are known.

        Raises:
            StudyMismatchError: The user's code, or what it computes, differs; the text names it.
        """
        if _sources(self.workload) != _sources(other.workload):
            return  # other files and functions have other code: `check_same` tells which
        differences = list(changes(self.code, other.code))
        if flops and abs(flops[1] - flops[0]) > _SAME_FLOPS * flops[0]:
            differences.append(f"the forward pass of a sample takes {flops[1]:.4g} FLOPs, not {flops[0]:.4g}")
        if differences:
            shown = "; ".join(differences[:4]) + ("; ..." if len(differences) > 4 else "")
            raise StudyMismatchError(
                f"study {study_name!r} was tuned with other code ({shown}), and its figures need not hold any more: start another study with "
                "--study NAME, or with --fork NAME one that begins with the best configs of this one"
            )


def _sources(workload: Workload) -> tuple[str | None, ...]:
    """Where the user's code comes from."""
    return (workload.model.name, workload.model.function, workload.data, workload.optimizer)


def _differences(mine: Any, theirs: Any, path: str) -> Iterator[str]:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*mine, *theirs}, key=lambda name: (name != "name", str(name))):
            yield from _differences(
                mine.get(key), theirs.get(key), f"{path} {key}".replace("workload ", "").replace("settings ", "")
            )
    elif _plain(mine) != _plain(theirs):
        yield f"{path} is {mine}, not {theirs}"


def _unknown(stored: Mapping[str, Any], read: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Keys at any depth that were not read."""
    for key, value in stored.items():
        if key not in read:
            yield f"{path}{key}"
        elif isinstance(value, Mapping) and isinstance(read[key], Mapping):
            yield from _unknown(value, read[key], f"{path}{key} ")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

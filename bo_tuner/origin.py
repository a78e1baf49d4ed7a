"""`Origin`: where the figures of a study come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bo_tuner.stored import known_fields

__all__ = ["REAL", "Origin", "OriginKind"]

OriginKind = Literal["training", "simulation", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Real steps on real devices, a cost model's figures, or those of a table that somebody measured before."""

    kind: OriginKind = "training"
    source: str = ""
    """For people: which table; it may lie elsewhere on resume."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Plain data that decide the figures: a study goes on only with the same."""

    @property
    def is_real(self) -> bool:
        """Its trials run on this machine, and take the time that they take."""
        return self.kind == "training"

    @property
    def can_confirm(self) -> bool:
        """Another run of a config would show something new; a table says the same again."""
        return self.kind != "replay"

    @property
    def warning(self) -> str:
        """What must be said wherever its figures are shown, in one line; empty for real steps."""
        return {
            "training": "",
            "simulation": "SIMULATED: nothing was run, nothing was measured; all figures come from a cost model with made-up noise",
            "replay": f"REPLAYED: nothing was run here; all figures are those of {self.source}",
        }[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Origin:
        """The inverse of `to_dict`."""
        return cls(**known_fields(cls, data))


REAL = Origin()
"""Of all studies that train."""

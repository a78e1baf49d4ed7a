"""What one rank of a pipeline does, as a list of actions."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Action", "Backward", "Forward", "Update"]


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward pass of one micro-batch through one chunk of the rank's layers."""

    micro_batch: int
    """Counted from 0 over the whole run."""
    chunk: int = 0
    """Of the rank's chunks, in the order in which a micro-batch meets them."""
    version: int = 0
    """Weights that it and its backward pass read: those after so many updates."""

    def __str__(self) -> str:
        return f"F{self.micro_batch}" if self.chunk == 0 else f"F{self.micro_batch}.{self.chunk}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward pass of one micro-batch through one chunk; frees what the forward pass kept."""

    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"B{self.micro_batch}" if self.chunk == 0 else f"B{self.micro_batch}.{self.chunk}"


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer step that ends a batch: makes weight version `batch + 1` out of the batch's gradient."""

    batch: int

    def __str__(self) -> str:
        return f"U{self.batch}"


Action = Forward | Backward | Update

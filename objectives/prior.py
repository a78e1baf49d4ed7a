"""`problem_of`: what to expect of the configs of a measured table, before looking at its times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bo_tuner.cluster import Cluster
from bo_tuner.errors import BoTunerError
from bo_tuner.hardware import REACHED, Reached, find_device, hardware_of
from bo_tuner.models.choices import Problem
from bo_tuner.models.shape import profile_of_shape
from bo_tuner.models.software import Software, framework_of
from bo_tuner.objectives.table import MeasuredTable
from bo_tuner.profile import ModelProfile

__all__ = ["cluster_of", "problem_of"]

_UNKNOWN_MEMORY = 80 * 2**30
"""Of a device that no data sheet is known of."""


def cluster_of(table: MeasuredTable) -> tuple[Cluster, str]:
    """The devices that a table was measured on, and one line on what was supposed, empty when nothing was."""
    sheet, note = find_device(table.gpu)
    if sheet is None:
        note = f"{note}; its memory is taken as {_UNKNOWN_MEMORY >> 30} GiB"
    is_uneven = table.n_ranks % table.n_nodes != 0
    cluster = Cluster(
        device="cuda",
        n_ranks=table.n_ranks,
        n_nodes=1 if is_uneven else table.n_nodes,
        device_name=sheet.name if sheet else table.gpu,
        memory_bytes=sheet.memory_bytes if sheet else _UNKNOWN_MEMORY,
        usual_precision="bf16" if sheet and "bf16" in sheet.peak_flops_per_s else "fp16",
    )
    if is_uneven:
        note = "; ".join(
            filter(None, (note, f"{table.n_nodes} nodes do not divide {table.n_ranks} devices: taken as one"))
        )
    return cluster, note


def problem_of(
    table: MeasuredTable, *, reached: Reached = REACHED, software: Software | None = None
) -> tuple[Problem | None, str]:
    """What the models need to know of a table, and one line on what was supposed or is missing.

    Args:
        table: With the shape of its model, as `models.csv` beside it tells.
        reached: What trainings get of data sheets' figures.
        software: What it was measured with; None for what is known of the data set.

    Returns:
        None where the device or the shape of the model is not known: then there is nothing to expect.
    """
    cluster, note = cluster_of(table)
    if not table.shape:
        return None, _and(note, f"no expectation: no models.csv beside the table has the shape of {table.model}")
    try:
        profile = _profile(table)
        hardware = hardware_of(cluster, cluster.usual_precision, reached)
    except (BoTunerError, KeyError, ValueError) as error:
        return None, _and(note, f"no expectation: {error}")
    software = software or framework_of(table.data_set)
    if table.shape.get("grad_dtype_bytes"):
        software = replace(software, gradient_bytes=int(table.shape["grad_dtype_bytes"]))
    problem = Problem(
        profile=profile,
        hardware=hardware,
        software=software,
        n_ranks=cluster.n_ranks,
    )
    return problem, note


def _profile(table: MeasuredTable) -> ModelProfile:
    shape = table.shape
    return profile_of_shape(
        name=table.model,
        seq_len=table.seq_len or 1,
        layers=int(shape["layers"]),
        hidden=int(shape["hidden"]),
        heads=int(shape["heads"]),
        ffn=int(shape["ffn"]),
        vocab=int(shape["vocab"]),
        gated_mlp=_is_set(shape, "gated_mlp"),
        tied_embeddings=not _is_set(shape, "gated_mlp"),  # as GPT has it, and Llama has not
        causal=_is_set(shape, "causal"),
        flash_attention=_is_set(shape, "flash_attention"),
        fused_kernels=_is_set(shape, "fused_kernels"),
        activation_dtype_bytes=int(shape.get("activation_dtype_bytes") or 2),
    )


def _is_set(shape: Mapping[str, str], column: str) -> bool:
    return (shape.get(column) or "0").strip() not in ("0", "")


def _and(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more

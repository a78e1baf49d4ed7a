"""`problem_of`: what to expect of the configs of a measured table, before looking at its times."""

from __future__ import annotations

from dataclasses import replace

from bo_tuner.cluster import Cluster
from bo_tuner.errors import ConfigError
from bo_tuner.hardware import CATALOGUE, REACHED, Reached, find_device, hardware_of
from bo_tuner.models.choices import Problem
from bo_tuner.models.shape import profile_of_shape, profile_of_size
from bo_tuner.models.software import Software, framework_of
from bo_tuner.objectives.lines import CellError, Line
from bo_tuner.objectives.table import MeasuredTable
from bo_tuner.profile import ModelProfile

__all__ = ["cluster_of", "problem_of"]

_STAND_IN = CATALOGUE["A100-80GB"]
"""For a device that no data sheet is known of. Of its figures only the proportions matter to a search: with wrong ones it does better on
measured tables than with none."""
_SINGLE = "4"
"""Bytes of an fp32 element, as models.csv has it."""


def cluster_of(table: MeasuredTable) -> tuple[Cluster, str]:
    """The devices that a table was measured on, and one line on what was supposed, empty when nothing was."""
    known, note = find_device(table.gpu)
    if known is None:
        note = f"no figures are known of {table.gpu!r}: those of {_STAND_IN.name} are taken, memory included"
    sheet = known or _STAND_IN
    notes = [note]
    n_nodes = table.n_nodes
    if n_nodes is None:
        n_nodes = -(-table.n_ranks // sheet.node_size)
        notes.append(f"nodes are not told: {n_nodes} taken")
    if table.n_ranks % n_nodes:
        notes.append(f"{n_nodes} nodes do not divide {table.n_ranks} devices: taken as one")
        n_nodes = 1
    is_single = table.shape is not None and table.shape.text("activation_dtype_bytes") == _SINGLE
    cluster = Cluster(
        device="cuda",
        n_ranks=table.n_ranks,
        n_nodes=n_nodes,
        device_name=known.name if known else table.gpu,
        memory_bytes=sheet.memory_bytes,
        usual_precision="fp32" if is_single else "bf16" if "bf16" in sheet.peak_flops_per_s else "fp16",
    )
    return cluster, "; ".join(filter(None, notes))


def problem_of(
    table: MeasuredTable, *, reached: Reached = REACHED, software: Software | None = None
) -> tuple[Problem | None, str]:
    """What the models need to know of a table, and one line on what was supposed or is missing.

    Args:
        table: With the shape of its model, as `models.csv` beside it tells, or its parameters at least.
        reached: What trainings get of data sheets' figures.
        software: What it was measured with; None for what is known of the data set.

    Returns:
        None where the size of the model or the length of its samples is not known: then there is nothing to expect.
    """
    cluster, note = cluster_of(table)
    rated = cluster if find_device(table.gpu)[0] else replace(cluster, device_name=_STAND_IN.name)
    if table.seq_len is None:
        return None, _and(note, "no expectation: seq_len is not told")
    software = software or framework_of(table.data_set)
    try:
        hardware = hardware_of(rated, cluster.usual_precision, reached)
        if table.shape is not None:
            profile = _profile(table.model, table.seq_len, table.shape)
            gradient_bytes = table.shape.whole("grad_dtype_bytes")
            software = replace(software, gradient_bytes=gradient_bytes or software.gradient_bytes)
        elif table.n_parameters:
            profile = profile_of_size(name=table.model, n_parameters=table.n_parameters, seq_len=table.seq_len)
            blocks = sum(layer.is_block for layer in profile.layers)
            note = _and(note, f"{_no_shape(table)}: by its parameters {blocks} layers of {profile.hidden} are expected")
        else:
            return None, _and(note, f"no expectation: {_no_shape(table)}, and params_b is not told")
    except CellError as error:
        return None, _and(note, f"no expectation: models.csv, {error}")
    except ConfigError as error:
        return None, _and(note, f"no expectation: {error}")
    problem = Problem(
        profile=profile,
        hardware=hardware,
        software=software,
        n_ranks=cluster.n_ranks,
    )
    return problem, note


def _no_shape(table: MeasuredTable) -> str:
    return f"no models.csv beside the table has the shape of {table.model}"


def _profile(name: str, seq_len: int, shape: Line) -> ModelProfile:
    return profile_of_shape(
        name=name,
        seq_len=seq_len,
        layers=shape.needed("layers"),
        hidden=shape.needed("hidden"),
        heads=shape.needed("heads"),
        ffn=shape.needed("ffn"),
        vocab=shape.needed("vocab"),
        gated_mlp=shape.is_set("gated_mlp"),
        tied_embeddings=not shape.is_set("gated_mlp"),  # as GPT has it, and Llama has not
        causal=shape.is_set("causal"),
        flash_attention=shape.is_set("flash_attention"),
        fused_kernels=shape.is_set("fused_kernels"),
        activation_dtype_bytes=shape.whole("activation_dtype_bytes") or 2,
    )


def _and(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more

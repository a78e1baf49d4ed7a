"""`traced`: what a model costs and is made of, found in this process, without weights and without any device."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bo_tuner.cluster import DeviceKind
from bo_tuner.errors import ModelError
from bo_tuner.objectives.training.sources import MODEL_FILE, JobSources, write_object
from bo_tuner.profile import ModelProfile
from bo_tuner.workload import ModelStructure, Workload, check_seq_len

__all__ = ["Traced", "traced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A model, looked at."""

    workload: Workload
    """Completed."""
    profile: ModelProfile


def traced(workload: Workload, folder: Path, *, seq_len: int | None, device: DeviceKind, balance: str) -> Traced:
    """Build the model of `workload` and trace a step of it.

    Args:
        workload: As far as it is known.
        folder: Holds what came as Python objects; the structure of a function's model is written here.
        seq_len: As the user gave it.
        device: Whose kernels are looked at.
        balance: Layers are weighed by their `parameters`, or by their arithmetic in place of `time`, which nobody measures.

    Raises:
        ModelError: The model cannot be built or traced, or the data cannot be used; the text says why.
    """
    from bo_tuner.objectives.training.chain import told
    from bo_tuner.objectives.training.job import JobError, load_model, micro_batches
    from bo_tuner.objectives.training.job.data import n_samples
    from bo_tuner.objectives.training.job.hugging_face import architecture_of
    from bo_tuner.objectives.training.job.structure import digest, structure_of
    from bo_tuner.objectives.training.profiles import profile_of

    spec, sources = workload.model, JobSources.of(workload, folder)
    chatter = logging.getLogger("transformers.modeling_utils")  # of losses that it knows by another name
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        is_function = spec.source == "function"
        with told("it must be one that can be built"):
            model = load_model({**sources.model, "structure": None} if is_function else sources.model)
        if is_function:
            model = structure_of(model)
            write_object(model, folder / MODEL_FILE, f"the model of {spec.function}")
        if spec.source != "config":
            spec = replace(spec, architecture=architecture_of(model), digest=digest(model))
        if workload.data is None and not spec.architecture:
            raise JobError("none of transformers' models with a loss, so samples for it cannot be made up: give --data")
        usual = spec.made_up_seq_len(device) if workload.data is None else spec.usual_seq_len
        offered = seq_len if seq_len is not None else usual if spec.architecture else None
        if offered is not None:
            check_seq_len(spec, offered)
        source = {**sources.model, "architecture": spec.architecture}
        job = {**asdict(sources), "model": source, "seq_len": offered, "seed": 0}
        sizes: list[int | None] = []
        batches = micro_batches(job, micro_batch_size=1, on_made=lambda made: sizes.append(n_samples(made)))
        profile = profile_of(
            model,
            next(batches),
            name=spec.name,
            precision=workload.precision,
            device=device,
        )
    except JobError as error:
        raise ModelError(f"model {workload.model.name}: {error}") from error
    finally:
        chatter.setLevel(level)
    return Traced(
        workload=replace(
            workload,
            model=spec,
            n_parameters=profile.n_parameters,
            seq_len=seq_len or (offered if workload.data is None else profile.seq_len) or profile.seq_len,
            data_seq_len=None if workload.data is None else offered,
            n_samples=sizes[0] if sizes else None,
            structure=_structure_of(profile, balance=balance),
        ),
        profile=profile,
    )


def _structure_of(profile: ModelProfile, *, balance: str) -> ModelStructure:
    """How the model can be cut and recomputed, as its profile shows."""
    by_parameters = balance == "parameters"
    costs = [
        layer.n_parameters if by_parameters else layer.matmul_flops + layer.attention_flops for layer in profile.layers
    ]
    is_whole, n_trainable = bool(profile.whole_because), profile.n_trainable
    return ModelStructure(
        n_trainable=n_trainable if n_trainable < profile.n_parameters else None,
        layer_costs=() if is_whole else tuple(map(float, costs)),
        cost_unit="" if is_whole else "parameters" if by_parameters else "operations",
        whole_because=profile.whole_because,
        plain_because="" if any(layer.recomputed for layer in profile.layers) else "no layer of it can be repeated",
    )

"""What one rank of a trial does: join the group, build the job, train until it is killed, report every step."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bo_tuner.objectives.launch.channel import Channel
from bo_tuner.objectives.memory import OwnPeak
from bo_tuner.objectives.training import extensions
from bo_tuner.objectives.training.failures import UNHEARD, RankFailure, of_exception
from bo_tuner.objectives.training.pulse import Heart
from bo_tuner.objectives.training.stacks import dump_on_signal
from bo_tuner.outcome import Outcome

__all__ = ["prepare", "run_rank"]

_MOST_SKIPPED = 32
"""Optimizer steps in a row that may overflow and count for nothing: from 2^16 the loss scale has long reached its least by then. What overflows
for ever is measured as it is."""
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.utils.data",
    "deepspeed",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.ops.adam",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.pipe",
    "transformers",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "bo_tuner.objectives.training.job",
    "bo_tuner.objectives.training.look",
    "bo_tuner.objectives.training.job.split",
    "bo_tuner.objectives.training.rank",
)
"""Imported once, before the first fork. `deepspeed.initialize`, and the modules of transformers' models, import the deeper ones
lazily, in every rank."""


def prepare() -> None:
    """Compile and load, once before the first fork, the one small op that DeepSpeed wants on a CPU."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        from deepspeed.comm.torch import build_shm_op

        build_shm_op()
        extensions.keep(Path(os.environ["TORCH_EXTENSIONS_DIR"]))


def run_rank(channel: Channel, rank: int, spec_file: Path) -> None:
    """Run one rank; never returns before it is killed or has failed."""
    spec: dict[str, Any] = json.loads(spec_file.read_text(encoding="utf-8"))
    dump_on_signal(Path(spec["stacks"][rank]))
    heart = Heart(Path(spec["pulse"]), rank)
    phase = "model"

    def enter(name: str) -> None:
        nonlocal phase
        phase = name
        heart.beat()
        channel.send({"event": "phase", "phase": name})

    try:
        _train(channel, rank, spec, enter, heart)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # every end of a rank is judged and reported
        ended_at = time.monotonic()
        traceback.print_exc()
        on_gpu = spec["device"] == "cuda"
        failure = of_exception(
            error,
            phase=phase,
            cap_bytes=spec["cap_bytes"][rank] if on_gpu else None,
            free_bytes=_free_on_gpu() if on_gpu else None,
        )
        try:
            _tell_failure(channel, failure, ended_at)
        except OSError:  # the supervisor has gone, or hears that the channel is closed
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(UNHEARD)


def _free_on_gpu() -> int | None:
    """None where CUDA does not answer any more."""
    import torch

    with contextlib.suppress(RuntimeError):
        return torch.cuda.mem_get_info()[0]
    return None


def _tell_late(channel: Channel, spec: Mapping[str, Any]) -> None:
    reason = f"the data gave no micro-batch for {spec['longest_wait_s']:g} s (--data-timeout)"
    _tell_failure(channel, RankFailure(outcome=Outcome.TIMEOUT, reason=reason), time.monotonic())


def _tell_failure(channel: Channel, failure: RankFailure, at: float) -> None:
    channel.send(
        {
            "event": "failed",
            "at": at,
            "outcome": failure.outcome.value,
            "reason": failure.reason,
            "requested_bytes": failure.requested_bytes,
            "is_consequence": failure.is_consequence,
        }
    )


def _train(channel: Channel, rank: int, spec: Mapping[str, Any], enter: Callable[[str], None], heart: Heart) -> None:
    import torch

    from bo_tuner.objectives.training import job

    own_peak = OwnPeak()
    channel.send({"event": "baseline", "bytes": own_peak.baseline_bytes})
    on_gpu = spec["device"] == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        capacity = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(spec["cap_bytes"][rank] / capacity, 1.0), device)
    job.join_group(device, init_method=f"file://{spec['rendezvous']}", rank=rank, world_size=spec["n_ranks"])
    ds_config, the_job = spec["ds_config"], spec["job"]
    model = job.place_model(the_job, ds_config, device=device)
    # Forward begins and ends at a mark: in a pipeline no data is fetched between the first stage and the last.
    model.register_forward_pre_hook(heart.beat)
    model.register_forward_hook(heart.beat)
    enter("initialize")
    engine = job.build_engine(model, ds_config, optimizer=the_job["optimizer"])
    enter("data")
    loaders: list[tuple[int, int]] = []
    batches = job.micro_batches(
        the_job,
        micro_batch_size=ds_config["train_micro_batch_size_per_gpu"],
        rank=rank,
        world_size=spec["n_ranks"],
        on_made=lambda made: loaders.append(job.n_ahead(made)),
    )
    data = job.Watched(
        heart.beating(batches), longest_s=spec["longest_wait_s"], on_late=lambda: _tell_late(channel, spec)
    )
    accum = ds_config["gradient_accumulation_steps"]
    # Twice, since the optimizer's state is there only from the second step on.
    data.fetch_first(longest_of=spec["longest_of"], times=2 * accum)
    data.on_fetch = heart.micro_batch
    n_workers, n_ready = loaders[0] if loaders else (0, 0)
    if n_workers:
        channel.send({"event": "loader", "n_workers": n_workers})
    enter("train")
    step, n_skipped = 0, 0
    while True:
        n_skipped_before = engine.skipped_steps
        try:
            times = job.run_step(engine, data, grad_accum_steps=accum)
        except Exception as error:
            if step == 0 and not isinstance(error, job.JobError):
                error.add_note(f"the first batch was {data.first}")
            raise
        heart.beat()
        n_skipped = n_skipped + 1 if engine.skipped_steps > n_skipped_before else 0
        if 0 < n_skipped <= _MOST_SKIPPED:
            channel.send({"event": "skipped"})
            continue
        step += 1
        channel.send(
            {
                "event": "step",
                "step": step,
                "total_s": times.total_s,
                "engine_s": times.engine_s,
                "is_loss_finite": bool(torch.isfinite(torch.tensor(times.loss))),
                "peak_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else own_peak.read(),
            }
        )
        if step == 1 and n_ready:
            # While the first step compiled and allocated, workers loaded ahead: what comes of that is no measure of how fast they load.
            channel.send({"event": "uses up", "is_begin": True})
            data.use_up(n_ready)
            channel.send({"event": "uses up", "is_begin": False})

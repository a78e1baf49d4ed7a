"""`bo-tuner plan`: what to expect before anything runs."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bo_tuner.cli.options import AsJson, Data, Debug, Dimensions, MemoryReserve, names_in
from bo_tuner.errors import ConfigError, NothingFitsError
from bo_tuner.objectives.training.sources import model_spec
from bo_tuner.plan import plan as make_plan
from bo_tuner.report.plan_json import plan_json
from bo_tuner.report.plan_page import write_plan
from bo_tuner.report.plan_text import plan_text
from bo_tuner.text import gib

__all__ = ["plan"]

_TOP = 10


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A preset, a path to a Hugging Face config (folder or file), or FILE.py:FUNCTION."
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Nodes x devices x name: 8x8xV100-16GB, 8xA100-80GB, or H100; @25Gb/s behind it tells a node's network.",
            show_default="this machine",
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            help="Samples per optimizer step; with --allow-2bw the largest that is safe.", show_default="16 a device"
        ),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per sample.", show_default="the model's longest, at most 2048")
    ] = None,
    data: Data = None,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16; auto is the devices' usual.")] = "auto",
    schedules: Annotated[
        str | None,
        typer.Option(
            help="Schedules of pipelines: 1f1b, gpipe, 2bw, and those of installed packages.",
            show_default="1f1b, and 2bw with --allow-2bw",
        ),
    ] = None,
    allow_2bw: Annotated[
        bool,
        typer.Option(
            "--allow-2bw",
            help="Also schedules that change training, as PipeDream-2BW, which never drains: its gradients are one optimizer step old.",
        ),
    ] = False,
    max_tensor: Annotated[
        int, typer.Option(help="Largest degree of tensor parallelism; what trains here has none yet.")
    ] = 1,
    dimension: Dimensions = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Memory per device: a fraction of it, or bytes as in 3GiB.", show_default="0.92"),
    ] = None,
    memory_reserve: MemoryReserve = None,
    top: Annotated[
        int | None,
        typer.Option(help="How many configs to show.", min=1, show_default=f"{_TOP}; all with --json"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write an HTML page with figures.", show_default="not written")
    ] = None,
    timeline: Annotated[
        str | None,
        typer.Option(
            help="Config whose pipeline the page shows, by its name.", show_default="the best with a pipeline"
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Predict which configs fit a cluster and how fast they are, and rank them.

    Nothing is measured: the model is traced without weights, and the rates of devices come from their data sheets.
    """
    if timeline is not None and out is None:
        raise ConfigError(f"--timeline says what the page of --out shows; got {timeline!r} without --out")
    if cluster is None:
        print("planned for this machine (--cluster plans for another)", file=sys.stderr)
    remark = model_spec(model).remark
    if remark:
        print(f"note: {remark}", file=sys.stderr)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it looks for devices otherwise, and a plan needs none
    with contextlib.redirect_stdout(sys.stderr):  # what libraries and a user's function print is no result
        found = make_plan(
            model,
            global_batch=global_batch,
            cluster=cluster,
            seq_len=seq_len,
            data=data,
            precision=precision,
            schedules=None if schedules is None else names_in(schedules),
            allow_2bw=allow_2bw,
            max_tensor=max_tensor,
            dimensions=dimension or (),
            memory_limit=memory_limit,
            memory_reserve=memory_reserve,
        )
    if global_batch is None:
        print(
            f"planned for steps of {found.global_batch} samples, 16 a device (--global-batch plans for others)",
            file=sys.stderr,
        )
    if as_json:
        sys.stdout.writelines(plan_json(found, top))
    else:
        print(plan_text(found, top or _TOP))
    if out is not None:
        print(f"wrote {write_plan(found, out, top=top or _TOP, timeline=timeline)}", file=sys.stderr)
    if not found.n_fitting:
        least = found.best(1)[0]
        raise NothingFitsError(
            f"at least one config must fit in {gib(found.limit_bytes)} a device, and {least.config.name}, which needs least, needs "
            f"{gib(least.total_bytes)}: raise --memory-limit, lower --seq-len, or plan for more devices or larger ones"
        )

"""`bo-tuner tune`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bo_tuner.cli.options import AsJson, Data, Debug, Dimensions, MemoryReserve, Storage, names_in, print_json
from bo_tuner.cli.studies import export_text, show_study
from bo_tuner.engine import StopReason
from bo_tuner.errors import ConfigError, NothingFitsError
from bo_tuner.report.standing import without_value
from bo_tuner.storage import Location
from bo_tuner.text import gib
from bo_tuner.trial import TrialRecord, last_limit_bytes
from bo_tuner.tune import TuneResult
from bo_tuner.tune import tune as run_tune

__all__ = ["command_to_go_on", "tune"]


def tune(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A preset, a path to a Hugging Face config (folder or file), or FILE.py:FUNCTION.",
            show_default="none only with --replay",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Instead of training: a table of measured runs in CSV.", show_default="real training"),
    ] = None,
    group: Annotated[str | None, typer.Option(help="Which problem of that table.", show_default="its only one")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Instead of training: the cost model, with made-up noise.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(help="What to simulate: nodes x GPUs x device, as in 8x8xV100-16GB.", show_default="this machine"),
    ] = None,
    budget: Annotated[
        str, typer.Option(help='How much to spend: "20 trials", "15m", "2 gpu-h", or several with commas.')
    ] = "20 trials",
    objective: Annotated[
        str,
        typer.Option(
            help="What to look for: throughput, latency (with --global-batch), energy, cost (with --price-per-gpu-hour), or throughput,memory."
        ),
    ] = "throughput",
    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option(help="Of one GPU, or CPU rank, in any currency, for --objective cost.", show_default="none"),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            help="Name of the study.", show_default="from model, length, precision, ranks and objective, or the group"
        ),
    ] = None,
    fork: Annotated[
        str | None,
        typer.Option(help="Name of a new study that begins with the best configs of this one.", show_default="none"),
    ] = None,
    storage: Storage = None,
    ranks: Annotated[
        int | None, typer.Option(help="World size.", show_default="all visible GPUs, or 2 CPU ranks")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Memory per rank: a fraction of the device, or bytes as in 3GiB.", show_default="0.92"),
    ] = None,
    memory_reserve: MemoryReserve = None,
    allow_shared_gpu: Annotated[
        bool, typer.Option("--allow-shared-gpu", help="Measure also on GPUs that other processes use.")
    ] = False,
    global_batch: Annotated[
        int | None, typer.Option(help="Samples per optimizer step, fixed.", show_default="free")
    ] = None,
    max_global_batch: Annotated[
        int | None, typer.Option(help="Samples per optimizer step at most.", show_default="free")
    ] = None,
    data: Data = None,
    data_timeout: Annotated[float, typer.Option(help="Seconds that the data may take to give a micro-batch.")] = 120.0,
    first_step_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a rank may take for the first step without getting on.",
            show_default="60, more for a large model, and 600 while it compiles",
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sample.",
            show_default="the model's longest, at most 2048 on GPUs, 128 on a CPU, or the data's",
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw or adam (fused on GPUs), fused_adam (DeepSpeed's), or FILE.py:FUNCTION that takes the parameters and returns one."
        ),
    ] = "adamw",
    zero_stages: Annotated[str, typer.Option(help="ZeRO stages to try.")] = "0,1,2,3",
    max_depth: Annotated[
        int | None, typer.Option(help="Most pipeline stages to try.", show_default="as many as ranks and layers")
    ] = None,
    schedules: Annotated[
        str,
        typer.Option(help="Schedules of pipelines to try: those that DeepSpeed runs; `bo-tuner plan` takes others."),
    ] = "1f1b",
    balance: Annotated[str, typer.Option(help="Balance stages by time or parameters of layers.")] = "time",
    recompute: Annotated[str, typer.Option(help="Recompute activations: both tries it, on, off.")] = "both",
    dimension: Dimensions = None,
    sampler: Annotated[str, typer.Option(help="bo, tpe, gp, random, grid, climb, doubling or deepspeed.")] = "bo",
    min_gain: Annotated[
        str,
        typer.Option(
            help="End early once nothing left is likely to be faster than the best by this: a fraction, or 1%; 0 goes on."
        ),
    ] = "1%",
    precision_target: Annotated[
        str, typer.Option(help="A trial ends once its step time is known within this: a fraction, or 2%.")
    ] = "2%",
    max_steps: Annotated[
        int | None,
        typer.Option(help="Optimizer steps of a trial at most.", show_default="as 4 s hold, from 6 to 100"),
    ] = None,
    confirm: Annotated[
        bool, typer.Option(help="Repeat the first config, and confirm the winner by a longer run.")
    ] = True,
    insist: Annotated[
        bool, typer.Option("--insist", help="Start also where every config should need far more memory than there is.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Configs whose trials failed or timed out may run again.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the sampler, the synthetic data, and the noise of a simulation.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the best config, train.py and launch.sh.", show_default="not written"),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tune a model: start a study, or go on."""
    if out is not None:
        nearest = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise ConfigError(f"--out must be a folder that can be written; got {out}")
    if study is not None and not study.strip():
        raise ConfigError(f"--study must be a name; got {study!r}")
    try:
        result = run_tune(
            model,
            replay=replay,
            group=group,
            simulate=simulate,
            cluster=cluster,
            budget=budget,
            objective=objective,
            price_per_gpu_hour=price_per_gpu_hour,
            study=study,
            fork=fork,
            storage=storage,
            ranks=ranks,
            device=device,
            memory_limit=memory_limit,
            memory_reserve=memory_reserve,
            allow_shared_gpu=allow_shared_gpu,
            global_batch=global_batch,
            max_global_batch=max_global_batch,
            data=data,
            data_timeout=data_timeout,
            first_step_timeout=first_step_timeout,
            seq_len=seq_len,
            precision=precision,
            optimizer=optimizer,
            zero_stages=_stages(zero_stages),
            max_depth=max_depth,
            schedules=names_in(schedules),
            balance=balance,
            recompute=recompute,
            dimensions=dimension or (),
            sampler=sampler,
            min_gain=min_gain,
            precision_target=precision_target,
            max_steps=max_steps,
            confirm=confirm,
            insist=insist,
            retry_failed=retry_failed,
            seed=seed,
        )
    except KeyboardInterrupt:
        print(
            f"\nstopped; every finished trial is kept. To go on{command_to_go_on(sys.argv[1:], storage)}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if as_json:
        print_json(result.to_dict())
    else:
        print(show_study(result.study_name, result.trials, result.manifest))
    print(f"stopped: {result.stopped_because}", file=sys.stderr)
    known = {record.config for record in result.trials if record.result and record.result.outcome.teaches}
    failed = [record for record in result.trials if record.result and record.config not in known]
    if failed:
        print(f"{_failures(failed)}: the same command with --retry-failed tries again", file=sys.stderr)
    if result.best is None:
        raise NothingFitsError(_why_nothing(result))
    if out is not None:
        try:
            files = result.best.export(out)
        except ConfigError as error:
            if result.manifest.origin.kind != "replay":
                raise
            print(f"nothing is written to {out}: {error}", file=sys.stderr)  # the study is good all the same
            return
        print(export_text(result.best.record, result.manifest.origin), file=sys.stderr)
        print(
            f"wrote {', '.join(dict.fromkeys(file.relative_to(out).parts[0] for file in files))} to {out}; "
            f"train with {out / 'launch.sh'}",
            file=sys.stderr,
        )


def _stages(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(" ", "").split(","))
    except ValueError:
        raise ConfigError(f"--zero-stages must be some of 0, 1, 2, 3, as in 0,1,2; got {text!r}") from None


def _failures(failed: Sequence[TrialRecord]) -> str:
    """ "trials 0 and 3 failed or timed out"."""
    numbers = [str(record.number) for record in failed]
    listed = " and ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers)
    return f"{'trial' if len(numbers) == 1 else 'trials'} {listed} failed or timed out, which says nothing about the config"


def _all(n_trials: int) -> str:
    return "the only trial" if n_trials == 1 else f"all {n_trials} trials"


def command_to_go_on(arguments: list[str], storage: str | None) -> str:
    """The same command, without the password of its storage."""
    shown = Location(storage).shown_url if storage is not None else ""
    words = [word.replace(storage, shown) if storage and word.endswith(storage) else word for word in arguments]
    hint = " (with the database's password in the place of ***)" if words != arguments else ""
    return f"{hint}:\n  {shlex.join(['bo-tuner', *words])}"


def _why_nothing(result: TuneResult) -> str:
    ended = [record for record in result.trials if record.result is not None]
    if not ended:
        return "no trial was done within the budget; give a larger --budget"
    by_memory = [record for record in ended if record.result and record.result.outcome.is_memory]
    if without_value(ended):
        return f"{without_value(ended)}: choose another --objective"
    last = ended[-1]
    assert last.result is not None
    if len(by_memory) < len(ended):
        return (
            f"no trial of {len(ended)} completed; the last ({last.config.name}) ended as {last.result.outcome.value}: "
            f"{last.result.reason}"
        )
    smallest = min(by_memory, key=lambda record: (record.config.micro_batch_size, -record.config.zero_stage))
    assert smallest.result is not None
    limit = gib(last_limit_bytes(ended) or 0)
    is_over = result.stop_reason in (StopReason.EXHAUSTED, StopReason.NOTHING_FITS)
    rest = "every candidate is ruled out" if is_over else "others may still fit"
    return (
        f"at least one config must fit in {limit} a rank, and {_all(len(ended))} ran out of memory, down to "
        f"{smallest.config.name} ({rest}): raise --memory-limit or --budget, lower --seq-len, or use more --ranks"
    )

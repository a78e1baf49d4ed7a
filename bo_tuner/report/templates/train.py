"""Train the model of model.json with the DeepSpeed config of ds_config.json; launch.sh starts this on every rank.

Needs torch, transformers and deepspeed, not bo_tuner. The folder job beside this file is the code that was measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with the tuned config.")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument(
        "--data",
        metavar="FILE.py:FUNCTION",
        help="a function that returns a Dataset of samples as the model takes them, labels included, or a loader of micro-batches; "
        "default: what was measured",
    )
    parser.add_argument("--workers", type=int, default=0, help="data loading processes per rank (default: 0)")
    parser.add_argument("--save", type=Path, help="folder for a DeepSpeed checkpoint at the end")
    parser.add_argument("--seed", type=int, default=0, help="of the order of samples (default: 0)")
    parser.add_argument("--check", action="store_true", help="look at the arguments, and end")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        sys.exit(f"--steps must be at least 1; got {arguments.steps}")
    if arguments.data is not None:
        file, _, name = arguments.data.partition(":")
        if not Path(file).is_file():
            sys.exit(f"--data must be FILE.py:FUNCTION; there is no Python file {file!r}")
        if f"def {name}(" not in Path(file).read_text(encoding="utf-8"):
            sys.exit(f"--data must be FILE.py:FUNCTION; {file} has no function {name!r}")
    needed = ["torch", "deepspeed", "transformers", *(["cloudpickle"] if any(HERE.glob("*.pkl")) else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{sys.executable} must have {', '.join(needed)}; it lacks {', '.join(missing)}: set PYTHON")
    return arguments


def load_job(arguments: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """What is trained, with the paths that hold here."""
    found = {**facts["job"], "model": dict(facts["job"]["model"]), "seed": arguments.seed}
    for holder, name in ((found["model"], "structure"), (found, "data"), (found, "optimizer")):
        if holder.get(name) is not None and holder[name].endswith(".pkl"):
            holder[name] = str(HERE / holder[name])
    if arguments.data is not None:
        found["data"] = arguments.data
    return found


def train(arguments: argparse.Namespace) -> None:
    import job
    import torch

    facts = json.loads((HERE / "model.json").read_text(encoding="utf-8"))
    ds_config = json.loads((HERE / "ds_config.json").read_text(encoding="utf-8"))
    what = load_job(arguments, facts)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = facts["device"] == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    job.join_group(device)
    batches = job.Watched(
        job.micro_batches(
            what,
            micro_batch_size=ds_config["train_micro_batch_size_per_gpu"],
            rank=rank,
            world_size=world_size,
            n_workers=arguments.workers,
        )
    )
    batches.fetch_first()  # before the model, which takes longer to build
    model = job.place_model(what, ds_config, device=device)
    engine = job.build_engine(model, ds_config, optimizer=what["optimizer"])
    times_s: list[float] = []
    loss = float("nan")
    for step in range(1, arguments.steps + 1):
        done = job.run_step(engine, batches, grad_accum_steps=ds_config["gradient_accumulation_steps"])
        times_s.append(done.total_s)
        loss = done.loss
        if rank == 0 and (step <= 3 or step % 10 == 0):
            rate = ds_config["train_batch_size"] / done.total_s
            print(f"step {step}  loss {loss:.4f}  {rate:.4g} samples/s", file=sys.stderr, flush=True)
    if arguments.save is not None:
        engine.save_checkpoint(str(arguments.save.resolve()))
    if rank == 0:
        # At first compilers are at work, and a loader with workers gives what it had ready.
        mean_s = statistics.fmean(times_s[len(times_s) // 2 :])
        summary = {
            "steps": arguments.steps,
            "world_size": world_size,
            "loss": loss,
            "step_time_s": mean_s,
            "samples_per_s": ds_config["train_batch_size"] / mean_s,
            "measured_samples_per_s": facts["measured"]["samples_per_s"],
        }
        print(json.dumps(summary), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    arguments = parse_arguments()
    if not arguments.check:
        train(arguments)

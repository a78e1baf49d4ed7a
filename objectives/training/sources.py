"""Where the ranks of a run find model, data and optimizer: by name, in a user's file, or pickled from Python."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from bo_tuner.config import TrainConfig
from bo_tuner.errors import ConfigError, ModelError
from bo_tuner.partition import stage_bounds
from bo_tuner.text import did_you_mean
from bo_tuner.workload import OPTIMIZERS, ModelSpec, Workload

__all__ = ["MODEL_FILE", "JobSources", "job_of", "model_spec", "named", "own_folders", "reference", "write_object"]

MODEL_FILE = "model.pkl"
"""A model's structure, in a run's folder, a study's and an exported one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSources:
    """What a rank loads."""

    model: dict[str, Any]
    """As `job.load_model` takes it."""
    data: str | None = None
    """The user's function, as `FILE.py:FUNCTION` or a pickle's path; None for synthetic samples."""
    optimizer: str | None = None
    """Likewise; None for one that DeepSpeed makes."""

    @classmethod
    def of(cls, workload: Workload, folder: Path) -> JobSources:
        """The sources of a study whose pickles lie in `folder`."""
        spec = workload.model
        model: dict[str, Any] = {"architecture": dict(spec.architecture)}
        if spec.source != "config":
            model |= {"function": spec.function or None, "structure": str(folder / MODEL_FILE)}
        optimizer = None if workload.optimizer in OPTIMIZERS else workload.optimizer
        return cls(model=model, data=_found(workload.data, folder), optimizer=_found(optimizer, folder))

    @property
    def pickles(self) -> list[Path]:
        """Files that a copy of the job needs."""
        named = [self.model.get("structure"), self.data, self.optimizer]
        return [Path(name) for name in named if name is not None and name.endswith(".pkl")]

    def copied_to(self, folder: Path) -> JobSources:
        """The same from copies of the pickles in `folder`.

        Raises:
            OSError: A file cannot be copied.
        """
        for file in self.pickles:
            shutil.copyfile(file, folder / file.name)

        def moved(name: str | None) -> str | None:
            return str(folder / Path(name).name) if name is not None and name.endswith(".pkl") else name

        model = {**self.model, "structure": moved(self.model.get("structure"))} if self.pickles else self.model
        return replace(self, model=model, data=moved(self.data), optimizer=moved(self.optimizer))


def _found(source: str | None, folder: Path) -> str | None:
    """A Python name stands for a pickle of that name."""
    return source if source is None or ".py:" in source else str(folder / f"{source}.pkl")


def model_spec(model: Any) -> ModelSpec:
    """What the user gave as a model.

    Args:
        model: As in `tune`; a module's structure is not looked at yet.

    Raises:
        ModelError: It is nothing that can be trained.
    """
    if isinstance(model, str | Path) and ".py:" in str(model):
        whole = reference("MODEL", str(model), ModelError)
        file, _, name = whole.rpartition(":")
        return ModelSpec(name=f"{Path(file).stem}-{name}", architecture={}, source="function", function=whole)
    if isinstance(model, str | Path) and str(model).endswith(".py"):
        raise ModelError(f"MODEL must name a function in {model}, as {model}:FUNCTION")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return ModelSpec(name=type(model).__name__, architecture={}, source="object")
    return ModelSpec.resolve(model)


def named(option: str, given: str | Callable[..., Any], folder: Path) -> str:
    """What the user gave as data or optimizer, as a source: its file and function, or the name of its pickle in `folder`.

    Args:
        option: For messages.
        given: `FILE.py:FUNCTION`, or a function, which is pickled.
        folder: Of this run.

    Raises:
        ConfigError: It is neither, or cannot be pickled.
    """
    if callable(given):
        name = f"{option.strip('-')}-{getattr(given, '__name__', type(given).__name__).strip('<>')}"
        write_object(given, folder / f"{name}.pkl", option)
        return name
    if isinstance(given, str) and ".py:" in given:
        return reference(option, given, ConfigError)
    builtin = ", ".join(OPTIMIZERS) + ", " if option == "--optimizer" else ""
    near = did_you_mean(str(given), OPTIMIZERS) if option == "--optimizer" else ""
    raise ConfigError(f"{option} must be {builtin}FILE.py:FUNCTION or a Python function; got {given!r}{near}")


def reference(option: str, given: str, error_class: type[ConfigError]) -> str:
    """`FILE.py:FUNCTION` with the file's whole path, which is looked at and not run.

    Raises:
        ConfigError: It defines no such name; of `error_class`, and names `option`.
    """
    from bo_tuner.objectives.training.job.errors import JobError
    from bo_tuner.objectives.training.job.functions import find_function

    try:
        file, name = find_function(given)
    except JobError as error:
        raise error_class(f"{option} {given}: {error}") from error
    return f"{file}:{name}"


def write_object(value: Any, file: Path, what: str) -> None:
    """Pickle something of the user's for `job.load_object`, in a process that has not run the caller's script.

    Raises:
        ModelError: It cannot be pickled.
        OSError: The file cannot be written.
    """
    import cloudpickle

    with _by_value(value):
        try:
            data: bytes = cloudpickle.dumps(own_folders()) + cloudpickle.dumps(value)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ModelError(
                f"{what} must be something that pickles, so that other processes get it, and "
                f"{getattr(value, '__name__', type(value).__name__)} does not: {type(error).__name__}: {text}"
            ) from error
    file.write_bytes(data)


def own_folders() -> list[str]:
    """Where this process finds modules and another one would not: the script's folder, and what was added to the search path."""
    folders = [os.path.abspath(entry) for entry in sys.path if os.path.isdir(os.path.abspath(entry))]
    standard = sysconfig.get_path("stdlib")
    return [
        folder
        for folder in folders
        if not folder.startswith(standard) and os.path.basename(folder) not in ("site-packages", "dist-packages")
    ]


@contextmanager
def _by_value(value: Any) -> Iterator[None]:
    """Code of modules that another process could not import travels with the pickle."""
    import cloudpickle

    modules = [module for module in _modules_of(value) if not _is_importable(module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_of(value: Any) -> list[ModuleType]:
    torch = sys.modules.get("torch")
    parts = value.modules() if torch is not None and isinstance(value, torch.nn.Module) else [value]
    owners = {getattr(part, "__module__", None) for part in parts} | {type(part).__module__ for part in parts}
    return [sys.modules[name] for name in owners if name in sys.modules and name not in ("__main__", "builtins")]


def _is_importable(module: ModuleType) -> bool:
    try:
        return importlib.util.find_spec(module.__name__) is not None and module.__name__ in sys.modules
    except (ImportError, ValueError):
        return False


def job_of(sources: JobSources, config: TrainConfig, workload: Workload, *, seed: int) -> dict[str, Any]:
    """What the ranks of one config train, as the job package takes it."""
    depth = config.pipeline_depth
    return {
        "model": sources.model,
        "data": sources.data,
        "optimizer": sources.optimizer,
        "seq_len": workload.seq_len if workload.data is None else workload.data_seq_len,
        "seed": seed,
        "stages": stage_bounds(workload.structure.layer_costs, depth) if depth > 1 else None,
        "recompute": config.recompute,
    }

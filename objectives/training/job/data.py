"""Micro-batches for one rank: from synthetic samples, or from what the user's function gives."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .epochs import Epochs, tell_epoch
from .errors import JobError
from .functions import call_offering, load_function, takes
from .hugging_face import SyntheticData
from .pipeline import data_parallel_rank
from .randomness import Randomness

__all__ = ["Watched", "describe", "micro_batches", "moved", "n_ahead", "n_samples", "n_tokens"]

_READY_S = 0.02
"""A micro-batch that takes longer was not ready."""


def micro_batches(
    job: Mapping[str, Any],
    *,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    n_workers: int = 0,
    on_made: Callable[[Any], None] = lambda made: None,
) -> Iterator[Any]:
    """Endless micro-batches on the host. Replicas share the samples of every epoch; the stages of one replica get the same.

    What a function that takes `rank` returns is this replica's share already.

    The user's function is called for the first one, so that whoever times that, times the function too.

    Args:
        job: What is trained; `data` names the user's function, or is None for synthetic samples; `seq_len` is None where the
            function decides.
        micro_batch_size: Samples.
        rank: Of this process.
        world_size: Ranks.
        n_workers: Loading processes for a data set; a loader brings its own.
        on_made: Is given what the user's function returned.

    Raises:
        JobError: Raised by `next`: the user's function cannot be called so, or gives no micro-batches of this size.
    """
    yield from _made(job, micro_batch_size, rank, world_size, n_workers, on_made)


def n_samples(made: Any) -> int | None:
    """How many samples there are in what the user's function returned; None where nothing tells: an iterable has no length."""
    if isinstance(made, DataLoader):
        made = None if made.batch_size is None else made.dataset
    if isinstance(made, IterableDataset) or not hasattr(made, "__getitem__") or not hasattr(made, "__len__"):
        return None
    return len(made)


def n_ahead(made: Any) -> tuple[int, int]:
    """Processes that load what the user's function returned, and how many micro-batches they have ready at most; (0, 0) where none do."""
    n_workers = made.num_workers if isinstance(made, DataLoader) else 0
    return (n_workers, n_workers * (made.prefetch_factor or 0)) if n_workers else (0, 0)


def _made(
    job: Mapping[str, Any],
    micro_batch_size: int,
    rank: int,
    world_size: int,
    n_workers: int,
    on_made: Callable[[Any], None],
) -> Iterator[Any]:
    seed: int = job["seed"]
    depth = len(job.get("stages") or (0, 0)) - 1
    world_size //= depth
    rank = data_parallel_rank(rank, n_replicas=world_size)
    own_seed = seed * 1_000_003 + rank
    if job.get("data") is None:
        samples = SyntheticData(job["model"]["architecture"], seq_len=job["seq_len"], seed=seed)
        order = Epochs(len(samples), seed=seed, replica=rank, n_replicas=world_size)
        return _loaded(samples, order, micro_batch_size, n_workers)
    offered = {"micro_batch_size": micro_batch_size, "rank": rank, "world_size": world_size, "seed": seed}
    hint = "" if job["seq_len"] else " (with --seq-len it is given a seq_len)"
    if job["seq_len"]:
        offered["seq_len"] = job["seq_len"]
    randomness = Randomness(own_seed)
    with randomness.own():
        function = load_function(job["data"])
        made = call_offering(function, "the data function", hint, **offered)
        on_made(made)
        is_share = takes(function, "rank")

    def ordered(n_samples: int) -> Epochs:
        if is_share:
            return Epochs(n_samples, seed=own_seed)
        return Epochs(n_samples, seed=seed, replica=rank, n_replicas=world_size)

    return _apart(_batches_of(made, ordered, micro_batch_size, n_workers), randomness)


def _batches_of(made: Any, ordered: Callable[[int], Epochs], micro_batch_size: int, n_workers: int) -> Iterator[Any]:
    """Micro-batches of what the user's function returned; `ordered` is told how many samples a data set has."""
    if isinstance(made, IterableDataset):
        loader = DataLoader(
            made, batch_size=micro_batch_size, num_workers=n_workers, drop_last=True, pin_memory=_pins()
        )
        return _endless(loader, micro_batch_size)
    if isinstance(made, Dataset) or (
        hasattr(made, "__getitem__") and hasattr(made, "__len__") and not isinstance(made, Mapping)
    ):
        n_samples = len(made)  # type: ignore[arg-type]  # a map-style data set has a length
        if not n_samples:
            raise JobError("the data set must hold samples; it is empty")
        return _loaded(made, ordered(n_samples), micro_batch_size, n_workers)
    if not isinstance(made, Iterable) or isinstance(made, Mapping | str):
        raise JobError(
            "the data function must return a Dataset, a DataLoader or an iterable of micro-batches; "
            f"it returned {'nothing' if made is None else type(made).__name__}"
        )
    return _endless(made, micro_batch_size)


def _apart(batches: Iterator[Any], randomness: Randomness) -> Iterator[Any]:
    """Endless batches, whatever random numbers the user's code draws for them."""
    while True:
        with randomness.own():
            batch = next(batches)
        yield batch


def _loaded(samples: Any, order: Epochs, micro_batch_size: int, n_workers: int) -> Iterator[Any]:
    return iter(
        DataLoader(samples, batch_size=micro_batch_size, sampler=order, num_workers=n_workers, pin_memory=_pins())
    )


def _pins() -> bool:
    return torch.cuda.is_available()


def _endless(loader: Iterable[Any], micro_batch_size: int) -> Iterator[Any]:
    """Epoch after epoch; an incomplete last micro-batch of an epoch is left out, as `drop_last` does."""
    n_before = 0
    for epoch in itertools.count():
        tell_epoch(loader, epoch)
        n_given = 0
        for batch in loader:
            size = _n_samples(batch)
            if size != micro_batch_size:
                if n_given == 0:
                    raise JobError(
                        f"micro-batches must hold the {_samples(micro_batch_size)} asked for, and the first has {size}: let the "
                        "function take micro_batch_size, or return a Dataset"
                    )
                continue
            n_given += 1
            yield batch
        if n_given == 0:
            ended = f"ends after {n_before} micro-batches" if n_before else "gives no micro-batch"
            raise JobError(
                f"the data must go on for as long as training does, and {ended} of {_samples(micro_batch_size)}: return a Dataset, "
                "or a DataLoader, which can begin again"
            )
        n_before += n_given


def _samples(number: int) -> str:
    return f"{number} sample{'s' * (number > 1)}"


class Watched:
    """An iterator that adds up the time its consumer waits for it, and tells when that takes too long."""

    def __init__(
        self, batches: Iterator[Any], *, longest_s: float | None = None, on_late: Callable[[], None] = lambda: None
    ) -> None:
        """Wrap `batches`.

        Args:
            batches: Micro-batches.
            longest_s: Seconds that one may take; None for any.
            on_late: Called once, from another thread, when one takes longer.
        """
        self.waited_s = 0.0
        self.on_fetch: Callable[[], None] = lambda: None
        """Called before each micro-batch."""
        self.first = ""
        """The first micro-batch in words, once it was fetched."""
        self._batches = batches
        self._first: list[Any] = []
        """Fetched, and to be given before others."""
        self._since: float | None = None
        if longest_s is not None:
            threading.Thread(target=self._watch, args=(longest_s, on_late), daemon=True).start()

    def fetch_first(self, *, longest_of: int = 0, times: int = 1) -> None:
        """Fetch the first micro-batch ahead of its use.

        Args:
            longest_of: Fetch so many, and put the largest of them in the place of the first: what training meets sooner or later
                where samples differ in length.
            times: How often that one comes before the others.
        """
        batch = max((next(self) for _ in range(max(longest_of, 1))), key=_n_elements)
        self.first = describe(batch)
        self._first += [batch] * (times if longest_of else 1)

    def use_up(self, n_ready: int) -> None:
        """Leave out what was loaded ahead, so that from now on micro-batches come as fast as they are loaded, and no faster.

        Args:
            n_ready: Micro-batches that there may be at most. The first that has to be waited for is kept.
        """
        for _ in range(n_ready):
            began = time.perf_counter()
            batch = self._fetch()
            if time.perf_counter() - began > _READY_S:
                self._first.append(batch)
                return

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.on_fetch()
        return self._first.pop(0) if self._first else self._fetch()

    def _fetch(self) -> Any:
        self._since = began = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self._since = None
            self.waited_s += time.perf_counter() - began

    def _watch(self, longest_s: float, on_late: Callable[[], None]) -> None:
        while True:
            time.sleep(min(longest_s / 4, 1.0))
            since = self._since
            if since is not None and time.perf_counter() - since > longest_s:
                on_late()
                return


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: moved(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(moved(part, device) for part in batch)
    return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors(part)
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from _tensors(part)


def _n_elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in _tensors(batch))


def _n_samples(batch: Any) -> int:
    first = next((tensor for tensor in _tensors(batch) if tensor.dim()), None)
    if first is None:
        raise JobError(f"a batch must hold tensors with samples along the first dimension; got {describe(batch)}")
    return first.shape[0]


def n_tokens(batch: Any) -> int:
    """Tokens of a sample, as far as its shape tells: the second dimension of the first tensor of whole numbers, else 1."""
    values = (
        list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    )
    if values and isinstance(values[0], tuple | list):
        values = list(values[0])
    first = next((value for value in values if isinstance(value, Tensor)), None)
    is_tokens = first is not None and first.dim() >= 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_tokens and first is not None else 1


def describe(batch: Any) -> str:
    """A batch in a few words: names, types and shapes."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{name}: {describe(part)}" for name, part in batch.items())
    if isinstance(batch, tuple | list):
        return f"({', '.join(describe(part) for part in batch)})"
    return type(batch).__name__

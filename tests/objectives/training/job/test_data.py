"""Micro-batches of one rank from everything that a user's function may return."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bo_tuner.objectives.training.job.data import Watched, describe, micro_batches, moved, n_samples
from bo_tuner.objectives.training.job.epochs import Epochs
from bo_tuner.objectives.training.job.errors import JobError
from bo_tuner.workload import ModelSpec

Batches = Callable[..., list[Any]]
SETS = """
import itertools, random
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

class Rows(Dataset):
    make = staticmethod(lambda index: index)

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return self.make(index)

class Dicts(Rows):
    make = staticmethod(lambda index: {"input_ids": torch.tensor([index, index]), "labels": torch.tensor(index)})

class Pairs(Rows):
    make = staticmethod(lambda index: (torch.tensor([index]), torch.tensor(-index)))

class Tensors(Rows):
    make = staticmethod(lambda index: torch.tensor([index]))

class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return (torch.tensor([index]) for index in range(self.n))

def dicts(): return Dicts()
def pairs(): return Pairs()
def tensors(): return Tensors()
def listed(): return [torch.tensor([index]) for index in range(100)]
def stream(): return Stream(7)
def endless_stream(): return Stream(10**9)
def empty(): return []
def empty_stream(): return Stream(0)
def nothing(): pass
def number(): return 3
def of_scalars(): return iter([torch.tensor(1.0)])
def shy(micro_batch_size): return DataLoader(Tensors(), batch_size=5)
def loader(micro_batch_size): return DataLoader(TensorDataset(torch.arange(10.0)), batch_size=micro_batch_size)
def shuffled(micro_batch_size): return DataLoader(Tensors(), batch_size=micro_batch_size, shuffle=True)
def everything(**given): return [str(sorted(given.items()))]
def share(rank, world_size): return [torch.tensor([index + 50 * rank]) for index in range(50)]
def distributed(micro_batch_size):
    data = TensorDataset(torch.arange(10))
    order = DistributedSampler(data, num_replicas=1, rank=0)
    return DataLoader(data, batch_size=micro_batch_size, sampler=order, collate_fn=lambda rows: torch.stack([row[0] for row in rows])[:, None])
def seen(micro_batch_size, rank, world_size, seed, seq_len):
    while True:
        yield torch.tensor([[rank, world_size, seed, seq_len]] * micro_batch_size)
def ending(micro_batch_size):
    for _ in range(3):
        yield torch.ones(micro_batch_size, 1)
def needy(micro_batch_size, tokenizer, path): pass
def broken(): raise KeyError("no\\nsuch file")
def noisy(micro_batch_size):
    while True:
        yield torch.rand(micro_batch_size, 1) + random.random()
"""


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    file = tmp_path / "sets.py"
    file.write_text(SETS, encoding="utf-8")
    return file


@pytest.fixture
def batches(sets: Path) -> Callable[..., Iterator[Any]]:
    """`batches(function, micro_batch_size, ...)`: what a rank gets."""

    def make(
        name: str | None,
        micro_batch_size: int = 4,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        stages: list[int] | None = None,
    ) -> Iterator[Any]:
        job: dict[str, Any] = {"seed": seed, "seq_len": 16, "data": None if name is None else f"{sets}:{name}"}
        job["model"] = {"architecture": dict(ModelSpec.resolve("bert-tiny").architecture)}
        if stages:
            job["stages"] = stages
        return micro_batches(job, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size)

    return make


def taken(batches: Iterator[Any], n: int) -> list[Any]:
    return list(itertools.islice(batches, n))


# -- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("dicts", "input_ids: int64 [4, 2], labels: int64 [4]"),
        ("pairs", "(int64 [4, 1], int64 [4])"),
        ("tensors", "int64 [4, 1]"),
        ("listed", "int64 [4, 1]"),
        ("endless_stream", "int64 [4, 1]"),
        ("shuffled", "int64 [4, 1]"),
        ("noisy", "float32 [4, 1]"),
    ],
)
def test_samples_become_micro_batches_without_end(name: str, described: str, batches: Batches) -> None:
    found = taken(batches(name), 60)  # type: ignore[arg-type]  # an iterator
    assert {describe(batch) for batch in found} == {described}
    assert len(found) == 60, "more than two epochs of the data set"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("dicts", 100), ("listed", 100), ("loader", 10), ("stream", None), ("of_scalars", None), ("noisy", None)],
)
def test_a_data_set_is_asked_for_its_length_and_what_has_none_tells_none(
    name: str, expected: int | None, sets: Path
) -> None:
    sizes: list[int | None] = []
    job = {"data": f"{sets}:{name}", "seq_len": None, "seed": 0}
    found = micro_batches(job, micro_batch_size=1, on_made=lambda made: sizes.append(n_samples(made)))
    with contextlib.suppress(JobError):
        next(found)
    assert sizes == [expected]


def test_without_a_function_samples_are_made_up_for_the_model(batches: Batches) -> None:
    (batch,) = taken(batches(None, 3), 1)  # type: ignore[arg-type]
    assert describe(batch) == "input_ids: int64 [3, 16], attention_mask: int64 [3, 16], labels: int64 [3, 16]"


def values(batches: Iterator[Any], n: int) -> list[int]:
    return [int(value) for value in torch.cat(taken(batches, n)).flatten()]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_an_epoch_shows_every_sample_once_over_all_replicas_in_an_order_of_its_own(
    world_size: int, batches: Batches
) -> None:
    n = 100 // world_size
    shares = [values(batches("tensors", 5, rank=rank, world_size=world_size), 2 * n // 5) for rank in range(world_size)]  # type: ignore[arg-type]
    epochs = [[value for share in shares for value in share[part]] for part in (slice(n), slice(n, 2 * n))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


def test_nothing_is_left_out_or_doubled_where_shares_are_not_even() -> None:
    orders = [iter(Epochs(7, seed=3, replica=replica, n_replicas=3)) for replica in range(3)]
    met = [next(order) for _ in range(14) for order in orders]
    assert [sorted(met[start : start + 7]) for start in range(0, 42, 7)] == [list(range(7))] * 6


def test_what_a_function_that_takes_the_rank_returns_is_a_share_already(batches: Batches) -> None:
    for rank in (0, 1):
        share = values(batches("share", 5, rank=rank, world_size=2), 10)  # type: ignore[arg-type]
        assert sorted(share) == list(range(50 * rank, 50 * rank + 50))


def test_a_sampler_of_the_users_is_told_the_epoch(batches: Batches) -> None:
    first, second = taken(batches("distributed", 10), 2)  # type: ignore[arg-type]
    assert sorted(first.flatten().tolist()) == sorted(second.flatten().tolist()) == list(range(10))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["stream", "loader"])
def test_an_incomplete_last_micro_batch_of_an_epoch_is_left_out_and_the_next_epoch_begins(
    name: str, batches: Batches
) -> None:
    found = taken(batches(name, 4), 5)  # type: ignore[arg-type]
    n_whole = {"stream": 1, "loader": 2}[name]
    firsts = [float(batch[0][0] if name == "loader" else batch[0]) for batch in found]
    assert firsts == [float(4 * (number % n_whole)) for number in range(5)]


# -- ranks and seeds -----------------------------------------------------------------------------------------------


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["tensors", "shuffled", "noisy", None])
def test_replicas_draw_their_own_samples_and_the_stages_of_one_the_same(name: str | None, batches: Batches) -> None:
    """Four ranks in two stages: ranks 0 and 2 are one replica. Whatever else a rank draws, as dropout does, its data stay."""

    def drawn(rank: int, *, seed: int = 0) -> list[Any]:
        found: list[Any] = []
        torch.manual_seed(100 + rank)  # what building its stage has left
        for batch in batches(name, rank=rank, world_size=4, seed=seed, stages=[0, 1, 2]):
            found.append(batch if name is not None else batch["input_ids"])
            torch.rand(1 + rank)  # dropout
            if len(found) == 30:
                break
        return found

    by_rank = [drawn(rank) for rank in range(4)]
    assert same(by_rank[0], by_rank[2]) and same(by_rank[1], by_rank[3])
    assert not same(by_rank[0], by_rank[1])
    assert same(drawn(1), by_rank[1]), "the same seed repeats"
    assert not same(drawn(1, seed=5), by_rank[1])


def test_data_leave_the_random_numbers_of_training_alone(batches: Batches) -> None:
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    taken(batches("noisy"), 3)  # type: ignore[arg-type]
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize(
    ("stages", "rank", "world_size", "told"),
    [
        (None, 3, 4, [3, 4, 9, 16]),
        ([0, 2, 4], 3, 4, [1, 2, 9, 16]),
        ([0, 1, 2, 3, 4], 3, 4, [0, 1, 9, 16]),
        ([0, 2, 4], 2, 4, [0, 2, 9, 16]),
    ],
)
def test_the_function_is_told_its_replica_not_its_rank(
    stages: list[int] | None, rank: int, world_size: int, told: list[int], batches: Batches
) -> None:
    (batch,) = taken(batches("seen", 2, rank=rank, world_size=world_size, seed=9, stages=stages), 1)  # type: ignore[arg-type]
    assert batch.tolist() == [told, told]


# -- what is wrong with data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        (
            "ending",
            2,
            (
                "the data must go on for as long as training does, and ends after 3 micro-batches of 2 samples: return a Dataset, "
                "or a DataLoader, which can begin again"
            ),
        ),
        (
            "empty_stream",
            2,
            (
                "the data must go on for as long as training does, and gives no micro-batch of 2 samples: return a Dataset, "
                "or a DataLoader, which can begin again"
            ),
        ),
        ("empty", 2, "the data set must hold samples; it is empty"),
        (
            "shy",
            4,
            (
                "micro-batches must hold the 4 samples asked for, and the first has 5: let the function take micro_batch_size, or "
                "return a Dataset"
            ),
        ),
        (
            "nothing",
            1,
            "the data function must return a Dataset, a DataLoader or an iterable of micro-batches; it returned nothing",
        ),
        (
            "number",
            1,
            "the data function must return a Dataset, a DataLoader or an iterable of micro-batches; it returned int",
        ),
        ("of_scalars", 1, "a batch must hold tensors with samples along the first dimension; got float32 []"),
        (
            "needy",
            1,
            "the data function must take only micro_batch_size, rank, world_size, seed, seq_len; it needs tokenizer, path",
        ),
        ("broken", 1, "the data function must not raise, and raises KeyError: 'no\\nsuch file'"),
    ],
)
def test_what_cannot_be_trained_with_is_told_with_the_way_out(
    name: str, size: int, text: str, batches: Batches
) -> None:
    with pytest.raises(JobError) as caught:
        taken(batches(name, size), 10)  # type: ignore[arg-type]
    assert str(caught.value) == text


# -- waiting -------------------------------------------------------------------------------------------------------


def slow(*pauses_s: float) -> Iterator[Tensor]:
    for number, pause_s in enumerate(pauses_s):
        time.sleep(pause_s)
        yield torch.full((2, 1), number)


def test_the_time_that_training_waits_for_data_is_added_up() -> None:
    data = Watched(slow(0.1, 0.2, 0.0))
    next(data)
    assert 0.1 <= data.waited_s < 0.2
    time.sleep(0.2)
    next(data)
    next(data)
    assert 0.3 <= data.waited_s < 0.5
    with pytest.raises(StopIteration):
        next(data)


def test_the_first_micro_batch_fetched_ahead_is_described_and_comes_first_all_the_same() -> None:
    data = Watched(slow(0.0, 0.0))
    assert data.first == ""
    data.fetch_first()
    assert data.first == "int64 [2, 1]"
    assert [int(batch[0]) for batch in data] == [0, 1]


def test_the_largest_of_some_comes_first_as_often_as_it_is_wanted_and_then_the_rest() -> None:
    lengths = [3, 9, 4, 8, 5]
    data = Watched(iter([(torch.ones(2, n), torch.ones(2)) for n in lengths]))
    data.fetch_first(longest_of=3, times=2)
    assert data.first == "(float32 [2, 9], float32 [2])"
    assert [batch[0].shape[1] for batch in data] == [9, 9, 8, 5]


def test_what_was_loaded_ahead_is_used_up_to_the_first_that_has_to_be_waited_for() -> None:
    data = Watched(slow(0.0, 0.0, 0.0, 0.2, 0.0, 0.0))
    data.fetch_first(longest_of=1, times=2)
    assert int(next(data)[0]) == 0
    data.use_up(8)
    assert [int(batch[0]) for batch in data] == [0, 3, 4, 5], "the largest comes twice all the same"
    fast = Watched(slow(*[0.0] * 5))
    fast.use_up(3)
    assert [int(batch[0]) for batch in fast] == [3, 4]


def test_data_that_are_late_are_told_once_while_they_are_late() -> None:
    late, times = threading.Event(), list[float]()

    def tell() -> None:
        times.append(time.monotonic())
        late.set()

    data = Watched(slow(0.0, 0.8, 0.8), longest_s=0.2, on_late=tell)
    next(data)
    time.sleep(0.5)
    assert not late.is_set(), "nobody waits"
    began = time.monotonic()
    next(data)
    assert len(times) == 1 and 0.2 < times[0] - began < 0.7
    next(data)
    assert len(times) == 1


def test_data_in_time_are_never_late() -> None:
    data = Watched(slow(*[0.05] * 10), longest_s=0.4, on_late=lambda: pytest.fail("late"))
    assert len(list(data)) == 10


# -- moving --------------------------------------------------------------------------------------------------------


def test_every_tensor_of_a_batch_is_moved_and_lists_become_tuples() -> None:
    one = torch.ones(2)
    found = moved({"a": one, "b": [one, {"c": one}], "name": "x"}, torch.device("meta"))
    assert found["a"].is_meta and found["b"][0].is_meta and found["b"][1]["c"].is_meta
    assert isinstance(found["b"], tuple) and found["name"] == "x"
    assert moved(one, torch.device("cpu")) is one

from __future__ import annotations

import pytest

from bo_tuner.budget import Budget, Spent
from bo_tuner.errors import ConfigError

EXAMPLES = 'as in "20 trials", "15m", "2 gpu-h", or several with commas as in "20 trials, 1h"'


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20 trials", Budget(trials=20)),
        ("1 trial", Budget(trials=1)),
        ("20 Trials", Budget(trials=20)),
        ("20trials", Budget(trials=20)),
        ("20", Budget(trials=20)),
        (" 20 ", Budget(trials=20)),
        (20, Budget(trials=20)),
        ("90s", Budget(seconds=90)),
        ("15m", Budget(seconds=900)),
        ("15 min", Budget(seconds=900)),
        ("1.5h", Budget(seconds=5400)),
        ("2d", Budget(seconds=172_800)),
        ("1h30m", Budget(seconds=5400)),
        ("1h 30m 5s", Budget(seconds=5405)),
        ("2 gpu-h", Budget(device_hours=2)),
        ("0.5 GPU-h", Budget(device_hours=0.5)),
        ("2 gpu h", Budget(device_hours=2)),
        ("2gpuh", Budget(device_hours=2)),
        ("3 device-h", Budget(device_hours=3)),
        ("20 trials, 1h", Budget(trials=20, seconds=3600)),
        ("1h30m, 20 trials, 2 gpu-h", Budget(trials=20, seconds=5400, device_hours=2)),
        ("20 trials or 1h", Budget(trials=20, seconds=3600)),
        ("20 trials and 1h", Budget(trials=20, seconds=3600)),
        ("20 trials + 2 gpu-h", Budget(trials=20, device_hours=2)),
    ],
)
def test_a_budget_is_read_as_people_write_it(text: str | int, budget: Budget) -> None:
    assert Budget.parse(text) == budget


def test_a_budget_that_is_one_already_is_taken_as_it_is() -> None:
    budget = Budget(trials=3)
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize("text", ["20 trials", "1h30m", "2 gpu-h", "20 trials, 15m, 0.25 gpu-h", "12d", "1234567s"])
def test_the_text_of_a_budget_reads_back_as_the_same_budget(text: str) -> None:
    budget = Budget.parse(text)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"--budget must say how much, {EXAMPLES}; got ''"),
        (" , ", f"--budget must say how much, {EXAMPLES}; got ' , '"),
        ("soon", f"--budget must read {EXAMPLES}; got 'soon'"),
        ("-5m", f"--budget must read {EXAMPLES}; got '-5m'"),
        ("5m, many trials", f"--budget must read {EXAMPLES}; got '5m, many trials'"),
        ("3 parsecs", f"--budget must read {EXAMPLES}; got the unit 'parsecs' in '3 parsecs'"),
        ("20 trials 1h", f"--budget must read {EXAMPLES}; got the unit 'trials' in '20 trials 1h'"),
        ("1h 2 gpu-h", f"--budget must read {EXAMPLES}; got the unit 'gpu-h' in '1h 2 gpu-h'"),
        ("10m, 20m", "--budget must limit time once; got '10m, 20m'"),
        ("5 trials, 6 trials", "--budget must limit trials once; got '5 trials, 6 trials'"),
        ("1 gpu-h, 2 gpuh", "--budget must limit gpu-h once; got '1 gpu-h, 2 gpuh'"),
        ("1.5 trials", "--budget must be a whole number of trials; got '1.5 trials'"),
        ("0 trials", f"--budget must be more than nothing, {EXAMPLES}; got 0 trials"),
        ("0m", f"--budget must be more than nothing, {EXAMPLES}; got 0s"),
        ("0 gpu-h", f"--budget must be more than nothing, {EXAMPLES}; got 0 gpu-h"),
        ("0 trials, 1h", f"--budget must be more than nothing, {EXAMPLES}; got 0 trials, 3600s"),
        (0, f"--budget must be more than nothing, {EXAMPLES}; got 0 trials"),
        (-3, f"--budget must be more than nothing, {EXAMPLES}; got -3 trials"),
    ],
)
def test_a_text_that_is_no_budget_is_refused_with_examples(text: str | int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Budget.parse(text)
    assert str(caught.value) == message


def test_a_digit_that_is_no_number_is_refused_like_any_other_text() -> None:
    with pytest.raises(ConfigError, match="--budget must read"):
        Budget.parse("²")


def test_a_budget_without_any_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="--budget must be more than nothing"):
        Budget()


@pytest.mark.parametrize(
    ("spent", "is_used_up"),
    [
        (Spent(), False),
        (Spent(trials=19, seconds=3599, device_seconds=7199), False),
        (Spent(trials=20), True),
        (Spent(trials=21), True),
        (Spent(seconds=3600), True),
        (Spent(device_seconds=7200), True),
    ],
)
def test_the_limit_reached_first_ends_the_study(spent: Spent, is_used_up: bool) -> None:
    assert Budget(trials=20, seconds=3600, device_hours=2).is_used_up(spent) is is_used_up


@pytest.mark.parametrize("budget", [Budget(trials=5), Budget(seconds=5), Budget(device_hours=5 / 3600)])
def test_only_limits_that_are_given_count(budget: Budget) -> None:
    below = Spent(
        trials=4 if budget.trials else 10**6,
        seconds=4.9 if budget.seconds else 1e9,
        device_seconds=4.9 if budget.device_hours else 1e9,
    )
    assert not budget.is_used_up(below)


@pytest.mark.parametrize(
    ("budget", "spent", "left"),
    [
        (Budget(trials=20), Spent(trials=13), "7 trials left"),
        (Budget(trials=20), Spent(trials=25), "0 trials left"),
        (Budget(seconds=900), Spent(seconds=880.2), "19s left"),
        (Budget(seconds=900), Spent(seconds=100), "13m20s left"),
        (Budget(seconds=900), Spent(seconds=1000), "0s left"),
        (Budget(seconds=7500), Spent(), "2h05m left"),
        (Budget(device_hours=2), Spent(device_seconds=1800), "1.50 gpu-h left"),
        (Budget(device_hours=2), Spent(device_seconds=9000), "0.00 gpu-h left"),
        (
            Budget(trials=20, seconds=900, device_hours=1),
            Spent(trials=13, seconds=180, device_seconds=360),
            "7 trials, 12m00s, 0.90 gpu-h left",
        ),
    ],
)
def test_what_is_left_is_told_for_people_and_never_below_zero(budget: Budget, spent: Spent, left: str) -> None:
    assert budget.left(spent) == left


def test_spending_is_told_to_programs_in_gpu_hours() -> None:
    spent = Spent(trials=3, seconds=12.34567, device_seconds=7200)
    assert spent.to_dict() == {"trials": 3, "seconds": 12.346, "gpu_h": 2.0}


@pytest.mark.parametrize(
    ("budget", "used", "fraction"),
    [
        (Budget(trials=20), "13 of 20 trials", 0.65),
        (Budget(seconds=900), "3m00s of 15m00s", 0.2),
        (Budget(device_hours=2), "0.10 of 2 gpu-h", 0.05),
        (Budget(trials=20, seconds=200, device_hours=2), "13 of 20 trials, 3m00s of 3m20s, 0.10 of 2 gpu-h", 0.9),
        (Budget(trials=5), "13 of 5 trials", 1.0),
    ],
)
def test_what_is_used_is_told_for_people_and_as_the_fraction_of_the_nearest_limit(
    budget: Budget, used: str, fraction: float
) -> None:
    spent = Spent(trials=13, seconds=180, device_seconds=360)
    assert budget.used(spent) == used
    assert budget.fraction_used(spent) == pytest.approx(fraction)


def test_spending_goes_on_on_the_devices_that_it_was_for() -> None:
    spent = Spent(trials=3, seconds=10, device_seconds=40)
    assert spent.later(5) == Spent(trials=3, seconds=15, device_seconds=60)
    assert Spent().later(5) == Spent(seconds=5)


@pytest.mark.parametrize("text", ["1000000 gpu-h", "0.00001 gpu-h", "12345678901s", "20 trials, 90s, 2.5 gpu-h"])
def test_a_budget_is_written_as_it_is_read(text: str) -> None:
    budget = Budget.parse(text)
    assert "e" not in str(budget).replace("trials", "")
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize("text", ["9" * 400, f"{'9' * 400}s", "9" * 5000, f"{'9' * 50} gpu-h", f"{'9' * 20} trials"])
def test_a_budget_beyond_all_use_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--budget must be at most"):
        Budget.parse(text)

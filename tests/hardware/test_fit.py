"""`fit_matmul`: it finds the curve that readings came from, also when some were disturbed."""

from __future__ import annotations

import itertools
import random

import pytest

from bo_tuner.hardware import MatmulRate, ProductReading, fit_matmul

TOKENS, WIDTHS = (16, 128, 1024, 8192), (64, 256, 1024, 4096)


def readings_of(rate: MatmulRate, *, slow_by: float = 1.0, n_slow: int = 0) -> list[ProductReading]:
    """What a device of this rate would be read as; `n_slow` of them, chosen at random, are slower."""
    sizes = list(itertools.product(TOKENS, WIDTHS))
    slow = set(random.Random(1).sample(sizes, n_slow))
    return [
        ProductReading(
            n_tokens=n,
            width=k,
            seconds=6 * n * k**2 / rate.flops_per_s(n_tokens=n, width=k) * (slow_by if (n, k) in slow else 1.0),
        )
        for n, k in sizes
    ]


def rate_of(half_tokens: float, half_width: float) -> MatmulRate:
    return MatmulRate(peak_flops_per_s=1e14, share=0.7, half_tokens=half_tokens, half_width=half_width)


@pytest.mark.parametrize(("half_tokens", "half_width"), [(300, 250), (5, 40), (1500, 20)])
@pytest.mark.parametrize("n_slow", [0, 3])
def test_the_curve_that_readings_came_from_is_found(half_tokens: float, half_width: float, n_slow: int) -> None:
    rate = rate_of(half_tokens, half_width)
    fitted = fit_matmul(readings_of(rate, slow_by=3.0, n_slow=n_slow))
    for n, k in itertools.product(TOKENS, WIDTHS):
        predicted = fitted.flops_per_s(n_tokens=n, width=k)
        assert predicted == pytest.approx(rate.flops_per_s(n_tokens=n, width=k), rel=0.05)


def test_the_peak_is_the_fastest_reading() -> None:
    rate = rate_of(300, 250)
    fitted = fit_matmul(readings_of(rate))
    assert fitted.peak_flops_per_s == pytest.approx(rate.flops_per_s(n_tokens=8192, width=4096))
    assert fitted.peak_flops_per_s * fitted.share == pytest.approx(0.7e14, rel=0.02)


def test_a_rate_that_never_levels_off_is_not_promised_to_rise_for_ever() -> None:
    sizes = itertools.product(TOKENS, WIDTHS)
    rising = [ProductReading(n_tokens=n, width=k, seconds=6 * n * k**2 / (1e4 * n * k)) for n, k in sizes]
    fitted = fit_matmul(rising)
    assert fitted.flops_per_s(n_tokens=1e9, width=1e9) <= 1.251 * rising[-1].flops_per_s


def test_half_of_the_limit_is_reached_at_half_tokens_and_large_width() -> None:
    rate = rate_of(300, 250)
    assert rate.flops_per_s(n_tokens=300, width=1e12) == pytest.approx(0.35e14)
    assert rate.flops_per_s(n_tokens=1e12, width=250) == pytest.approx(0.35e14)


def test_one_reading_is_met() -> None:
    only = ProductReading(n_tokens=256, width=512, seconds=0.004)
    fitted = fit_matmul([only])
    assert fitted.flops_per_s(n_tokens=256, width=512) == pytest.approx(only.flops_per_s)

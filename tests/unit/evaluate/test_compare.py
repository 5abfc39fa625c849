from __future__ import annotations

import pytest

from trimtab.evaluate.compare import paired_difference, wilson


def test_wilson_matches_known_values() -> None:
    got = wilson(8, 10)
    assert (got.value, got.low, got.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10).low == 0.0 and wilson(10, 10).high == pytest.approx(1.0)


def test_a_clear_gain_has_a_bound_above_zero_and_noise_has_not() -> None:
    clear = paired_difference([0.0] * 100, [1.0] * 60 + [0.0] * 40)
    assert clear.value == 0.6 and clear.low > 0.45
    noise = paired_difference([1.0, 0.0] * 50, [0.0, 1.0] * 50)
    assert noise.value == 0.0 and noise.low < 0 < noise.high


def test_weights_are_denominators() -> None:
    got = paired_difference([10.0, 30.0], [12.0, 34.0], [10.0, 20.0])
    assert got.value == pytest.approx(6 / 30) and got.low == got.high == pytest.approx(0.2)


def test_the_interval_is_the_same_each_time() -> None:
    pair = ([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0])
    assert paired_difference(*pair) == paired_difference(*pair)

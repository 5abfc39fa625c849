from __future__ import annotations

import math
from itertools import pairwise

import pytest

from trimtab.report.axis import smooth, tick_label, ticks


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.013, 0.987), (-3.0, 4.0), (1e-7, 2e-3), (17.0, 90001.0)]
)
def test_ticks_cover_the_range_in_equal_round_steps(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high
    assert 3 <= len(found) <= 12
    steps = [b - a for a, b in pairwise(found)]
    assert max(steps) - min(steps) < 1e-9 * max(1.0, high)
    digit = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert round(digit) in (1, 2, 5, 10)


@pytest.mark.parametrize("value", [0.0, 0.8, -2.0])
def test_a_constant_curve_still_gets_an_axis(value: float) -> None:
    found = ticks(value, value)
    assert found[0] < value < found[-1]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (2e-3, "0.002"), (5e-4, "5e-4"), (4000, "4000"),
                        (25000, "25k"), (3e6, "3M"), (-0.5, "-0.5")]
)
def test_tick_labels_are_short(value: float, text: str) -> None:
    assert tick_label(value) == text


def test_smoothing_keeps_length_and_starts_at_the_first_value() -> None:
    found = smooth([4.0, 0.0, 0.0, 0.0], 0.5)
    assert found[0] == 4.0
    assert found == sorted(found, reverse=True) and len(found) == 4

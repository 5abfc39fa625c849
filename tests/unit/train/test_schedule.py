from __future__ import annotations

import pytest

from trimtab.train.schedule import Schedule


def test_warmup_rises_in_equal_parts_and_moves_at_once() -> None:
    schedule = Schedule.from_ratio("cosine", 100, 0.03)
    assert schedule.warmup_steps == 3
    assert [schedule.factor(s) for s in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


def test_cosine_is_half_way_at_half_time_and_ends_above_zero() -> None:
    schedule = Schedule("cosine", 110, 10)
    assert schedule.factor(60) == pytest.approx(0.5)
    assert 0 < schedule.factor(109) < 1e-3
    assert schedule.factor(110) == pytest.approx(0.0)


def test_linear_and_constant() -> None:
    assert [Schedule("linear", 4, 0).factor(s) for s in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert Schedule("constant", 4, 2).factor(99) == 1.0


def test_a_run_of_one_step_has_a_rate() -> None:
    assert Schedule.from_ratio("cosine", 1, 0.03).factor(0) == 1.0
    assert Schedule.from_ratio("cosine", 1, 0.0).factor(0) == 1.0

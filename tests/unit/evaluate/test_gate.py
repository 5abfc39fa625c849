from __future__ import annotations

import math

from trimtab.evaluate.compare import Interval
from trimtab.evaluate.report import EvalReport, Metric, Role, SetReport, gate


def made(role: Role, metric: Metric, difference: Interval | None) -> SetReport:
    at = Interval(0.5, 0.4, 0.6)
    return SetReport("s", role, metric, 10, at, at, difference)


def test_a_domain_gain_counts_by_its_lower_bound() -> None:
    report = made("domain", "exact_match", Interval(0.3, 0.1, 0.5))
    assert gate([report], min_domain_gain=0.1, max_general_loss=0.0)[0].passed
    assert not gate([report], min_domain_gain=0.2, max_general_loss=0.0)[0].passed


def test_a_general_loss_counts_by_its_upper_bound() -> None:
    report = made("general", "bits_per_byte", Interval(0.004, -0.002, 0.02))
    (verdict,) = gate([report], min_domain_gain=0.0, max_general_loss=0.01)
    assert verdict.measured == 0.02 and not verdict.passed
    assert gate([report], min_domain_gain=0.0, max_general_loss=0.03)[0].passed


def test_less_bits_on_the_domain_is_a_gain_and_less_accuracy_in_general_a_loss() -> None:
    domain = made("domain", "bits_per_byte", Interval(-0.3, -0.4, -0.2))
    general = made("general", "exact_match", Interval(-0.3, -0.4, -0.2))
    first, second = gate([domain, general], min_domain_gain=0.1, max_general_loss=0.1)
    assert first.measured == 0.2 and first.passed
    assert second.measured == 0.4 and not second.passed


def test_a_score_that_is_no_number_fails() -> None:
    nan = Interval(math.nan, math.nan, math.nan)
    assert not gate([made("domain", "exact_match", nan)], min_domain_gain=0, max_general_loss=0)[0].passed


def test_without_adapter_there_is_nothing_to_gate() -> None:
    verdicts = gate([made("domain", "exact_match", None)], min_domain_gain=0, max_general_loss=0)
    assert verdicts == () and EvalReport("m", None, (), verdicts, 0.0).passed

from __future__ import annotations

import math

from trimtab.evaluate.compare import Interval
from trimtab.evaluate.report import EvalReport, Metric, Role, SetReport, gate
from trimtab.verdict import Verdict


def made(role: Role, metric: Metric, difference: Interval | None) -> SetReport:
    at = Interval(0.5, 0.4, 0.6)
    return SetReport("s", role, metric, 10, at, at, difference)


def judged(report: SetReport, limit: float) -> Verdict:
    verdict = gate(report, limit)
    assert verdict is not None
    return verdict


def test_a_domain_gain_counts_by_its_lower_bound() -> None:
    report = made("domain", "exact_match", Interval(0.3, 0.1, 0.5))
    assert judged(report, 0.1).passed and not judged(report, 0.2).passed


def test_a_general_loss_counts_by_its_upper_bound() -> None:
    report = made("general", "bits_per_byte", Interval(0.004, -0.002, 0.02))
    verdict = judged(report, 0.01)
    assert verdict.measured == 0.02 and not verdict.passed
    assert judged(report, 0.03).passed


def test_less_bits_on_the_domain_is_a_gain_and_less_accuracy_in_general_a_loss() -> None:
    domain = made("domain", "bits_per_byte", Interval(-0.3, -0.4, -0.2))
    general = made("general", "exact_match", Interval(-0.3, -0.4, -0.2))
    first, second = judged(domain, 0.1), judged(general, 0.1)
    assert first.measured == 0.2 and first.passed
    assert second.measured == 0.4 and not second.passed


def test_a_score_that_is_no_number_fails() -> None:
    nan = Interval(math.nan, math.nan, math.nan)
    assert not judged(made("domain", "exact_match", nan), 0.0).passed


def test_without_adapter_there_is_nothing_to_gate() -> None:
    assert gate(made("domain", "exact_match", None), 0.0) is None
    assert EvalReport("m", None, (), (), 0.0).passed

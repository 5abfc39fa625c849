"""The page of a run holds its curves and loads nothing from outside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trimtab.errors import RunError
from trimtab.train.report_page import report_page, write_report
from trimtab.train.run_dir import RunDirectory, RunRecord
from trimtab.verdict import Verdict

RECORD = RunRecord("finished", 4, 4, 17, 1, {}, {}, verdicts=(Verdict.at_most("a check", 0, 0, "x"),))


def rows() -> list[dict[str, object]]:
    found: list[dict[str, object]] = [
        {"step": 0, "validation_domain_loss": 3.0, "validation_general_loss": 2.0}
    ]
    found += [
        {"step": step, "loss": 3.0 / step, "domain_loss": 3.1 / step, "general_loss": 2.9 / step,
         "lr": 1e-3, "grad_norm": 1.0, "grad_norm_by_branch": {"attention": 0.6, "latent": 0.8},
         "tokens": 256, "tokens_per_second": 100.0, "step_time_s": 2.56, "mfu": 0.25,
         "peak_memory_gib": 0.5, "router_max_over_mean": {"1": 1.5, "2": 2.5}}
        for step in range(1, 5)
    ]  # fmt: skip
    found[4] |= {"validation_domain_loss": 1.25, "validation_general_loss": 1.0,
                 "router_kl": {"1": 0.01, "2": 0.3}, "router_overlap": {"1": 1.0, "2": 0.75}}
    return found


EXPERTS = [{"step": 4, "since": 0, "tokens": {"1": [10, 30], "2": [5, 35]}}]


def test_the_page_shows_what_the_run_measured_and_loads_nothing() -> None:
    page = report_page("run<1>", RECORD, rows(), EXPERTS, "model: {path: a&b}")
    assert "run&lt;1&gt;" in page and "a&amp;b" in page, "names are text, not markup"
    for word in ("Domain loss", "General loss", "held-out records", "Gradient norm by branch",
                 "Experts in steps 1 to 4", "Divergence by layer", "Peak memory", "a check"):
        assert word in page, word
    assert "1.2500" in page  # the best validation loss
    assert page.count("<svg") == 13
    links = re.findall(r'(?:src|href)="([^"]+)"', page) + re.findall(r"url\(([^)]+)\)", page)
    assert links == []


def test_a_run_without_experts_or_validation_has_a_shorter_page() -> None:
    short = [{k: v for k, v in row.items() if not k.startswith(("validation", "router", "general"))}
             for row in rows()[1:]]
    for row in short:
        row["router_max_over_mean"] = {}
    page = report_page("run", RECORD, short, [], "")
    assert "Router drift" not in page and "Experts" not in page and "Domain loss" in page


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="TT603"):
        write_report(RunDirectory(tmp_path))

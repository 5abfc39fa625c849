"""Capacity factors from a measured histogram."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from trimtab.arch.load import load_outline
from trimtab.arch.outline import Outline
from trimtab.arch.presets import preset_config
from trimtab.config.cluster import load_cluster
from trimtab.errors import ConfigError
from trimtab.plan.capacity import capacity_rows, capacity_table, read_histogram
from trimtab.plan.job import Job, choose_adapters
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.question import Question
from trimtab.plan.search import Limits

EXPERTS = 256


@pytest.fixture(scope="module")
def outline() -> Outline:
    return load_outline(preset_config("kimi-linear-48b"))


@pytest.fixture(scope="module")
def plan(outline: Outline) -> Plan:
    job = Job(adapters=choose_adapters(outline, 32, ("attention",), "none"))
    question = Question(outline, job, load_cluster("h200"), 8, "fastest", Limits(ep=8), 2**19)
    return make_plan(question.with_length(8192))


def log(path: Path, *layers: list[int]) -> Path:
    path.write_text(json.dumps({"step": 2, "since": 0, "tokens": dict(enumerate(layers))}) + "\n")
    return path


def test_dropped_shares_are_those_of_the_counts(plan: Plan, outline: Outline, tmp_path: Path) -> None:
    # One expert of 256 gets four times the mean of the others' 100.
    counts = [400] + [100] * (EXPERTS - 1)
    table = capacity_table(plan, read_histogram(log(tmp_path / "experts.jsonl", counts), outline))
    by_factor = {row.factor: row for row in table}
    mean = sum(counts) / EXPERTS
    assert by_factor[2.0].dropped == pytest.approx((400 - 2 * mean) / sum(counts))
    assert by_factor[None].dropped == 0
    first = 400 + 31 * 100
    assert by_factor[None].load == pytest.approx(first / (sum(counts) / 8))


def test_a_larger_factor_drops_less_and_needs_more(plan: Plan, outline: Outline, tmp_path: Path) -> None:
    skewed = [1000 // (1 + index % 32) for index in range(EXPERTS)]
    skewed.sort(reverse=True)
    rows = capacity_table(plan, read_histogram(log(tmp_path / "experts.jsonl", skewed), outline))
    for a, b in pairwise(rows):
        assert a.dropped >= b.dropped and a.load <= b.load
        assert a.memory <= b.memory and a.step_seconds <= b.step_seconds
    assert rows[0].dropped > 0.3 and rows[0].memory < rows[-1].memory
    assert capacity_rows(rows)[-1][:2] == ("none", "0.00%")


def test_balanced_counts_drop_nothing(plan: Plan, outline: Outline, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    log(tmp_path / "run/experts.jsonl", [7] * EXPERTS, [0] * EXPERTS)
    rows = capacity_table(plan, read_histogram(tmp_path / "run", outline))
    assert all(row.dropped == 0 and row.load == 1 for row in rows)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{}\n", "TT106"), ("[1]\n", "TT106"), ("x\n", "TT106"), ("", "TT106"),
        ('{"tokens": {"0": [1, "2"]}}\n', "TT106"), ('{"tokens": {"0": [1, -2]}}\n', "TT106"),
        ('{"tokens": {"0": [0, 0]}}\n', "TT106"), ('{"tokens": {"0": [1, 2]}}\n', "TT105"),
    ],
)
def test_files_of_another_kind_are_refused(outline: Outline, tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "experts.jsonl").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_histogram(tmp_path, outline)
    assert caught.value.code == code


def test_a_missing_file_is_named(outline: Outline, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"experts\.jsonl"):
        read_histogram(tmp_path, outline)

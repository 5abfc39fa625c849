"""What would help when nothing fits: each change does, the cheapest kind comes first."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from trimtab.arch.load import load_outline
from trimtab.arch.outline import Outline
from trimtab.arch.presets import preset_config
from trimtab.config.cluster import load_cluster
from trimtab.errors import ConfigError
from trimtab.plan.changes import Change, helpful
from trimtab.plan.job import FULL_TRAINING, Job, choose_adapters
from trimtab.plan.legal import require_possible
from trimtab.plan.question import Question
from trimtab.plan.search import Limits, capacity


@pytest.fixture(scope="module")
def k3() -> Outline:
    return load_outline(preset_config("kimi-k3"))


@pytest.fixture(scope="module")
def linear() -> Outline:
    return load_outline(preset_config("kimi-linear-48b"))


def ask(outline: Outline, cluster: str, ranks: int, seq: int = 8192, experts: str = "none", **job: object) -> Question:
    adapters = choose_adapters(outline, 32, ("attention",), experts)  # type: ignore[arg-type]
    values = Job(adapters=adapters, **job)  # type: ignore[arg-type]
    return Question(outline, values, load_cluster(cluster), ranks, "fastest", Limits(), 2**22).with_length(seq)


def three(question: Question) -> list[Change]:
    assert not question.search().candidates, "nothing fits before"
    return list(islice(helpful(question), 3))


def test_settings_come_before_machines(linear: Outline) -> None:
    changes = three(ask(linear, "h100", 2, base_dtype="fp32"))
    assert changes[0].text.startswith("keep the base as released")
    assert changes[0].ranks == 2 and changes[1].ranks > 2


def test_a_shorter_sequence_is_the_longest_that_suffices(linear: Outline) -> None:
    question = ask(linear, "ascend-a3", 2, seq=131072, base_dtype="native")
    question = replace(question, limits=Limits(tp=1, cp=1, pp=1))
    found = [c for c in three(question) if c.text.startswith("sequences")]
    assert len(found) == 1
    length = int(found[0].text.split()[2].replace(",", ""))
    assert question.with_length(length).search().candidates
    assert not question.with_length(length * 2).search().candidates


def test_every_change_makes_the_job_fit(k3: Outline) -> None:
    question = ask(k3, "ascend-a3", 32, experts="per_expert")
    changes = three(question)
    assert len(changes) == 3
    for change in changes:
        assert change.memory <= capacity(question.cluster) or "ranks of" in change.text


def test_where_one_machine_is_far_too_small_others_are_named(k3: Outline) -> None:
    changes = three(ask(k3, "cpu", 1))
    assert len(changes) == 3 and all(change.ranks > 1 for change in changes)


def test_full_training_can_become_lora(linear: Outline) -> None:
    question = ask(linear, "h100", 4)
    full = replace(question, job=replace(question.job, method="full", adapters=None, stack=FULL_TRAINING))
    assert three(full)[0].text.startswith("train adapters")


@pytest.mark.parametrize(
    ("limits", "rule"),
    [
        (Limits(pp=5), "multiple of pp 5"), (Limits(pp=128), "at most 93"),
        (Limits(ep=13), "896 experts"), (Limits(dp_shard=2, tp=2, cp=1, ep=8), r"dp_shard \* cp \* tp"),
        (Limits(pp=64, ep=4), "2 ranks of a pipeline stage"),
        (Limits(pp=1, tp=1, cp=1), "data-parallel ranks"),
    ],
)
def test_an_impossible_layout_says_what_must_divide_what(k3: Outline, limits: Limits, rule: str) -> None:
    job = Job(seq_len=8192, global_batch=96)
    with pytest.raises(ConfigError, match=rule):
        require_possible(k3, job, 128, limits)


def test_possible_layouts_pass(k3: Outline) -> None:
    job = Job(seq_len=8192, global_batch=64)
    for limits in (Limits(), Limits(pp=8, tp=4, cp=2, ep=8), Limits(ep=32, dp_shard=64)):
        require_possible(k3, job, 64, limits)

"""The whole job: hours by phase, cost, host memory and disk, epochs turned into steps."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from html.parser import HTMLParser

import pytest

from trimtab.arch.load import load_outline
from trimtab.arch.presets import preset_config
from trimtab.config.cluster import load_cluster
from trimtab.config.recipe import Recipe
from trimtab.errors import ConfigError
from trimtab.plan.job import Job, choose_adapters
from trimtab.plan.page import plan_page
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.question import Question
from trimtab.plan.report import Extras, job_as_dict, job_rows
from trimtab.plan.search import Limits
from trimtab.plan.whole_job import WholeJob, whole_job
from trimtab.plan.workload import Volume, Workload, left_out, workload_of

RECIPE = {
    "model": {"path": "m"}, "output": "o",
    "finetune": {"data": {"domain": {"path": "d"}, "general": {"path": "g"}, "max_seq_len": 1024}},
}
VOLUME = Volume(records=1000, domain_tokens=4e6, filled=0.9, scored_tokens=2e5, answers=100,
                answer_tokens=6400, is_exact=True)  # fmt: skip


@pytest.fixture(scope="module")
def k3() -> Plan:
    outline = load_outline(preset_config("kimi-k3"))
    job = Job(adapters=choose_adapters(outline, 32, ("attention",), "none"))
    limits = Limits(pp=2, tp=1, cp=1, ep=32)
    question = Question(outline, job, load_cluster("ascend-a3"), 64, "fastest", limits, 2**22)
    return make_plan(question.with_length(8192))


def job_of(plan: Plan, price: float | None = None, **values: float) -> WholeJob:
    work = replace(Workload(100, 2**22), **values)  # type: ignore[arg-type]
    cluster = replace(plan.question.cluster, price=price)
    return whole_job(replace(plan, question=replace(plan.question, cluster=cluster)), work)


def recipe(**values: object) -> Recipe:
    tune = {**RECIPE["finetune"], **values}  # type: ignore[dict-item]
    return Recipe.model_validate({**RECIPE, "finetune": tune})


def test_phases_sum_to_the_job_and_only_rented_ones_cost(k3: Plan) -> None:
    job = job_of(k3, price=2.0, scored_tokens=10**6)
    assert k3.best is not None
    assert job.total_hours == pytest.approx(sum(job.hours.values()))
    assert job.hours["training"] > 100 * k3.best.step.seconds / 3600
    rented = job.total_hours - job.hours["download"] - job.hours["conversion"]
    assert job.cost == pytest.approx(2.0 * 64 * rented)
    assert job_of(k3).cost is None
    low, high = job.band_hours
    assert low < job.total_hours < high


def test_download_and_conversion_move_the_release(k3: Plan) -> None:
    job = job_of(k3)
    assert job.hours["download"] * 3600 == pytest.approx(1560860324864 / 1e9)
    # Four hosts read and write it at 2 GB/s each.
    assert job.hours["conversion"] * 3600 == pytest.approx(2 * 1560860324864 / 4 / 2e9)
    assert job.shared_storage == 2 * 1560860324864


def test_a_base_in_bf16_is_more_to_convert_and_to_store(k3: Plan) -> None:
    question = replace(k3.question, ranks=256, job=replace(k3.question.job, base_dtype="bf16"))
    plain = job_of(make_plan(replace(question, limits=Limits())))
    assert plain.shared_storage == pytest.approx(1560860324864 + 5.56e12, rel=0.01)
    assert plain.hours["download"] == job_of(k3).hours["download"]


def test_a_saved_state_is_parameters_and_moments_of_the_adapter(k3: Plan) -> None:
    outline, adapters = k3.question.outline, k3.question.job.adapters
    assert adapters is not None
    elements = sum(
        32 * sum(param.shape) for param in outline.params if param.name in adapters.names
    )
    assert job_of(k3).saved_bytes == pytest.approx(elements * (4 + 8))


def test_validation_and_evaluation_take_time_of_their_own(k3: Plan) -> None:
    none = job_of(k3)
    assert none.hours["validation"] == none.hours["evaluation"] == 0
    one = job_of(k3, validation_tokens=10**7)
    two = job_of(k3, validation_tokens=2 * 10**7)
    assert two.hours["validation"] == pytest.approx(2 * one.hours["validation"])
    # Writing a token costs far more than reading one.
    read = job_of(k3, scored_tokens=10**5).hours["evaluation"]
    written = job_of(k3, scored_tokens=10**3, answers=10, answer_tokens=10**5).hours["evaluation"]
    assert written > 3 * read > 0


def test_host_needs_are_told_beside_what_a_host_has(k3: Plan) -> None:
    job = job_of(k3)
    assert job.host_has == (1536 * 2**30, 7e12)
    assert 16 * 2**30 < job.host_memory < job.host_has[0]
    assert job.host_disk < job.host_has[1]
    assert job_as_dict(job)["host_memory_bytes"] == job.host_memory


def test_epochs_become_steps_by_domain_tokens_share_and_filling() -> None:
    tokens = 8192
    work = workload_of(recipe(epochs=2), VOLUME, tokens)
    assert work.steps == -(-2 * 4e6 / 0.8 / 0.9 // tokens)
    assert "2.00 passes" in work.data and "counted" in work.data
    fixed = workload_of(recipe(steps=10), replace(VOLUME, is_exact=False), tokens)
    assert fixed.steps == 10 and "estimated" in fixed.data


def test_epochs_without_data_are_an_error_and_steps_are_not() -> None:
    with pytest.raises(ConfigError, match="needs the records"):
        workload_of(recipe(epochs=2), None, 8192)
    assert workload_of(recipe(steps=5), None, 8192).data == ""


def test_validations_count_both_sets() -> None:
    asked = {**RECIPE, "validate": {"every_steps": 50, "max_tokens": 1000}}
    both = workload_of(Recipe.model_validate(asked), None, 8192)
    assert both.validation_tokens == 200 // 50 * 2 * 1000
    asked["validate"] = {"every_steps": 50, "max_tokens": 1000, "general_holdout": 0}
    assert workload_of(Recipe.model_validate(asked), None, 8192).validation_tokens == 4 * 1000


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [v or "" for k, v in attrs if k in ("src", "href")]


def test_the_page_needs_nothing_from_outside_and_shows_every_part(k3: Plan) -> None:
    text = plan_page(k3, Extras(job=job_of(k3, price=2.0)))
    page = _Page()
    page.feed(text)
    assert page.outside == [] and "script" not in page.tags and "link" not in page.tags
    # Memory by stage, shares of the step, pipeline, layouts.
    assert page.tags.count("svg") == 4
    for words in ("64 ranks = 32 packages", "stage 1", "What limits", "waits for all-to-all",
                  "base weights", "Layouts compared", "dp_shard", "The whole job", "cost"):
        assert words in text, words


def test_the_page_of_a_job_that_does_not_fit_names_the_way_out() -> None:
    outline = load_outline(preset_config("kimi-k3"))
    job = Job(adapters=choose_adapters(outline, 32, ("attention",), "none"))
    question = Question(outline, job, load_cluster("h200"), 8, "fastest", Limits(), 2**22)
    text = plan_page(make_plan(question.with_length(8192)))
    assert "16 ranks" in text and "too much" in text and "parallel:" not in text


def test_the_end_is_told_with_its_band(k3: Plan) -> None:
    job = job_of(k3)
    rows = dict(job_rows(job, datetime(2026, 12, 1, 8, 0)))
    text = rows["begun Tue 2026-12-01 08:00, it ends"]
    end = datetime(2026, 12, 1, 8, 0) + timedelta(hours=job.total_hours)
    assert text.startswith(f"{end:%a %Y-%m-%d %H:%M} (")


def test_what_a_plan_leaves_out_is_said() -> None:
    assert left_out(recipe()) == ()
    found = left_out(recipe(
        lora={"overrides": {"linear_attention": {"rank": 4}}}, router={"train": "full"},
        vision={"projector": "full"},
    ))
    assert len(found) == 3 and "rank 32" in found[0] and "routers" in found[1]

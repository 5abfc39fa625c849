"""Serving: caches agree with the inventory, memory adds up, adapters take room from requests."""

from __future__ import annotations

import pytest

from trimtab.arch.load import load_arch, load_outline
from trimtab.arch.outline_cache import active_parameters, request_bytes
from trimtab.arch.presets import preset_config
from trimtab.arch.summary import summarise
from trimtab.config.cluster import load_cluster
from trimtab.plan.job import Job, choose_adapters
from trimtab.plan.question import Question
from trimtab.plan.search import Limits, capacity
from trimtab.plan.serving import ServingModel
from trimtab.plan.serving_plan import COLUMNS, layout_row, plan_serving, serving_as_dict


def serve(model: str, cluster: str, adapters: int = 1, tokens: int = 8192, experts: str = "none") -> ServingModel:
    outline = load_outline(preset_config(model))
    job = Job(adapters=choose_adapters(outline, 32, ("attention",), experts))  # type: ignore[arg-type]
    return ServingModel(outline, job, load_cluster(cluster), adapters, tokens)


@pytest.mark.parametrize("model", ["kimi-k3", "kimi-k3.1", "deepseek-v3.2", "kimi-linear-48b", "glm-5.3-flash"])
def test_caches_are_those_that_inspect_prints(model: str) -> None:
    summary = summarise(load_arch(preset_config(model)))
    request = request_bytes(load_outline(preset_config(model)), 1)
    assert request.per_token == pytest.approx(summary.kv_bytes_per_token)
    fixed = summary.state_bytes_per_sequence + summary.conv_bytes_per_sequence
    assert request.fixed == pytest.approx(fixed)


def test_active_parameters_are_those_that_inspect_prints() -> None:
    summary = summarise(load_arch(preset_config("kimi-k3")))
    active = active_parameters(load_outline(preset_config("kimi-k3")))
    assert active == pytest.approx(summary.active_parameters_per_token, rel=1e-3)


def test_layouts_fit_and_their_lines_hold_the_weights() -> None:
    model = serve("kimi-k3", "ascend-a3")
    found = model.layouts(64)
    assert found
    for layout in found:
        assert layout.tp * layout.dp * layout.replicas == 64
        assert sum(layout.memory.values()) <= capacity(load_cluster("ascend-a3"))
        assert layout.memory["weights"] > 1560860324864 / (layout.tp * layout.dp) * 0.99
    assert [x.tokens_per_second for x in found] == sorted((x.tokens_per_second for x in found), reverse=True)


def test_a_release_that_is_larger_than_the_machine_has_no_layout() -> None:
    assert serve("kimi-k3", "h200").layouts(8) == []


def test_adapters_take_room_from_requests() -> None:
    few = serve("kimi-k3", "ascend-a3", adapters=1).layouts(64)
    many = serve("kimi-k3", "ascend-a3", adapters=32).layouts(64)
    by_degrees = {(x.tp, x.dp): x for x in many}
    both = [(x, by_degrees[(x.tp, x.dp)]) for x in few if (x.tp, x.dp) in by_degrees]
    assert both
    for a, b in both:
        assert b.memory["adapters"] == pytest.approx(32 * a.memory["adapters"])
        assert b.adapter_bytes == a.adapter_bytes and b.requests <= a.requests
    assert any(b.requests < a.requests for a, b in both)


def test_a_longer_request_leaves_fewer_of_them_and_a_fuller_step_takes_longer() -> None:
    short, long = serve("kimi-k3", "h200", tokens=8192), serve("kimi-k3", "h200", tokens=131072)
    assert short.layouts(16)[0].requests > long.layouts(16)[0].requests
    assert sum(short.decode_parts(8, 2, 64).values()) > sum(short.decode_parts(8, 2, 1).values()) > 0


def test_no_token_is_written_faster_than_memory_is_read() -> None:
    model = serve("kimi-linear-48b", "h200", tokens=4096)
    cluster = load_cluster("h200")
    alone = sum(model.decode_parts(1, 1, 1).values())
    # One token reads at least the parameters it touches, in two bytes each.
    floor = 2 * active_parameters(model.outline) / cluster.memory_bandwidth.value
    assert alone > floor


def question(cluster: str, ranks: int, tokens: int = 8192) -> Question:
    outline = load_outline(preset_config("kimi-k3"))
    job = Job(adapters=choose_adapters(outline, 32, ("attention",), "none"), seq_len=tokens)
    return Question(outline, job, load_cluster(cluster), ranks, "fastest", Limits(), tokens)


def test_a_plan_for_serving_names_its_limit_and_sums_its_lines() -> None:
    plan = plan_serving(question("ascend-a3", 64), 4)
    assert plan.headline.startswith("64 ranks = 32 packages") and plan.binding_limit.startswith("time: ")
    found = serving_as_dict(plan)
    for layout in found["layouts"]:  # type: ignore[attr-defined]
        memory = dict(layout["memory_per_rank_bytes"])
        assert memory.pop("total") == pytest.approx(sum(memory.values()))
        assert layout["decode_seconds"] == pytest.approx(sum(layout["decode_parts_s"].values()))
        assert layout["most_adapters"] >= 4 and layout["ep"] == layout["tp"] * layout["dp"]
    assert len(layout_row(plan.layouts[0])) == len(COLUMNS)


def test_as_many_adapters_as_a_layout_says_still_fit_and_one_more_does_not() -> None:
    first = plan_serving(question("ascend-a3", 64), 1).layouts[0]
    most = first.most_adapters
    for count, fits in ((most, True), (most + 2, False)):
        degrees = [(x.tp, x.dp) for x in plan_serving(question("ascend-a3", 64), count).layouts]
        assert ((first.tp, first.dp) in degrees) is fits


def test_what_cannot_be_served_says_by_how_much() -> None:
    plan = plan_serving(question("h200", 8), 1)
    assert plan.layouts == () and "too much" in plan.binding_limit

"""Capacity, load-balancing loss, trained routers and balanced biases, in a step and in a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.unit.train.test_loop import KillAfter, Killed, losses
from tests.unit.train.test_step import adapted, assert_close, packs
from tests.unit.train.tiny_run import recipe_for
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.arch.whole import router_targets
from trimtab.checkpoint.adapter import attach_adapter, load_adapter
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.merge import copy_checkpoint, export_adapter
from trimtab.checkpoint.source import open_source
from trimtab.data.packing import Pack
from trimtab.errors import AdapterError, ConfigError
from trimtab.models.context import Recompute
from trimtab.models.decoder import CausalLM
from trimtab.models.full import full_parameters, train_full
from trimtab.models.lora import disabled, trainable_parameters
from trimtab.train.loop import finetune
from trimtab.train.metrics import read_metrics
from trimtab.train.plan import BatchPlan, plan_run
from trimtab.train.reporter import SilentReporter
from trimtab.train.router_load import RouterLoad, RoutingOptions
from trimtab.train.step import StepOptions, StepResult, train_step

FULL = ("finetune.router.train=full",)
QUANTILE = ("finetune.router.train=bias", "finetune.router.balance=quantile")
AUX = ("finetune.router.train=full", "finetune.router.balance=aux", "finetune.router.aux_loss_coef=0.1")


def step(
    model: CausalLM, batch: list[Pack], micro: int, routing: RoutingOptions, *,
    recompute: Recompute = "none",
) -> tuple[StepResult, dict[str, Tensor], RouterLoad]:
    named = {n: p for n, p in trainable_parameters(model).items() if p.requires_grad}
    options = StepOptions(BatchPlan(64 * len(batch), micro, 64), 17, None, "error", recompute,
                          routing=routing)
    load = RouterLoad(histograms=True)
    result = train_step(model, batch, list(named.values()), torch.optim.SGD(named.values(), lr=0.0),
                        step=0, options=options, load=load)
    return result, {n: p.grad.clone() for n, p in named.items() if p.grad is not None}, load


def with_routers(checkpoint: Path, *, bias: bool = False) -> CausalLM:
    model = adapted(checkpoint)
    train_full(model, [p.name for p in router_targets(model.arch, weight=True, bias=bias)])
    return model


def test_tokens_over_the_capacity_are_dropped_and_counted(tmp_path: Path, checkpoint: Path) -> None:
    model, batch = adapted(checkpoint), packs(tmp_path, checkpoint, 2)
    free, gradient, all_kept = step(model, batch, 128, RoutingOptions())
    assert all_kept.dropped() == {}
    loose, same, none = step(model, batch, 128, RoutingOptions(capacity=4.0))
    assert loose.loss == free.loss and set(none.dropped().values()) == {0}
    assert_close(gradient, same, 0.0)
    tight, _, load = step(model, batch, 128, RoutingOptions(capacity=0.5))
    assert tight.loss != free.loss
    real, active = sum(int(p.valid.sum()) for p in batch), 2
    for layer, dropped in load.dropped().items():
        counts = load.histogram()[layer]
        capacity = -(-real * active // (2 * len(counts)))
        assert dropped == sum(max(0, n - capacity) for n in counts) > 0


@pytest.mark.parametrize("capacity", [None, 0.75])
def test_recomputation_changes_nothing(
    tmp_path: Path, checkpoint: Path, capacity: float | None
) -> None:
    model, batch = with_routers(checkpoint), packs(tmp_path, checkpoint, 2)
    routing = RoutingOptions("aux", 0.5, capacity)
    kept, gradient, load = step(model, batch, 64, routing)
    again, recomputed, second = step(model, batch, 64, routing, recompute="layer")
    assert kept.loss == again.loss and load.balance(100) == second.balance(100)
    assert load.histogram() == second.histogram() and load.dropped() == second.dropped()
    assert_close(gradient, recomputed, 1e-6)


def test_the_balancing_loss_is_that_of_the_batch_however_it_is_cut(
    tmp_path: Path, checkpoint: Path
) -> None:
    model, batch = with_routers(checkpoint), packs(tmp_path, checkpoint, 4)
    routing = RoutingOptions("aux", 5.0)
    whole, gradient, load = step(model, batch, 256, routing)
    _, cut, second = step(model, batch, 64, routing)
    real = sum(int(p.valid.sum()) for p in batch)
    assert load.balance(real) == pytest.approx(second.balance(real), rel=1e-9)
    assert 1.0 < (load.balance(real) or 0.0) < 4.0
    assert_close(gradient, cut, 1e-6)
    plain, without, _ = step(model, batch, 256, RoutingOptions())
    assert plain.loss == whole.loss, "what is reported is the loss of the data"
    name = "layers.1.mlp.router.weight"
    assert not torch.allclose(gradient[name], without[name], rtol=1e-2)


def test_the_balancing_loss_has_the_gradient_of_its_equation(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Against finite differences of the whole step's objective."""
    model, batch = with_routers(checkpoint), packs(tmp_path, checkpoint, 1)
    weight = full_parameters(model)["layers.2.mlp.router.weight"]
    weight.data = weight.data.to(torch.float64)
    routing, real = RoutingOptions("aux", 2.0), int(batch[0].valid.sum())
    _, gradient, _ = step(model, batch, 64, routing)
    direction = gradient["layers.2.mlp.router.weight"]

    def objective(shift: float) -> float:
        start = weight.detach().clone()
        with torch.no_grad():
            weight.add_(direction, alpha=shift)
        result, _, load = step(model, batch, 64, routing)
        with torch.no_grad():
            weight.copy_(start)
        layers = len(load.histogram())
        return result.loss + 2.0 * layers * (load.balance(real) or 0.0)

    size = 1e-6 / float(direction.norm())
    measured = (objective(size) - objective(-size)) / (2 * size)
    assert measured == pytest.approx(float(direction.square().sum()), rel=1e-4)


def test_quantile_balancing_evens_the_load_of_a_batch(tmp_path: Path, checkpoint: Path) -> None:
    model, batch = with_routers(checkpoint, bias=True), packs(tmp_path, checkpoint, 4)
    bias = full_parameters(model)["layers.1.mlp.router.e_score_correction_bias"]
    with torch.no_grad():
        bias.copy_(torch.tensor([0.5, 0.0, 0.0, -0.5]))
    loads = []
    for _ in range(6):
        _, _, load = step(model, batch, 128, RoutingOptions("quantile"))
        loads.append(load.max_over_mean()["1"])
    assert loads[0] > 1.5 and loads[-1] < 1.1
    assert not bias.requires_grad and abs(float(bias.mean())) < 1e-6
    with disabled(model):
        kept = model.get_parameter("layers.1.mlp.router.e_score_correction_bias")
        assert not torch.equal(kept, bias), "the base keeps its own"


@pytest.mark.parametrize("words", [FULL, QUANTILE, AUX])
def test_a_run_trains_routers_resumes_exactly_and_merges(
    tmp_path: Path, checkpoint: Path, words: tuple[str, ...]
) -> None:
    more = (*words, "parallel.capacity_factor=1.25", "finetune.steps=3")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    whole = finetune(recipe_for(tmp_path / "a", checkpoint, *more), SilentReporter())
    assert whole.passed, whole.verdicts
    broken = recipe_for(tmp_path / "b", checkpoint, *more)
    with pytest.raises(Killed):
        finetune(broken, KillAfter(3))
    assert finetune(broken, SilentReporter()).resumed_from == 2
    one, two = (tmp_path / n / "run" for n in "ab")
    assert losses(one) == losses(two)
    files = [load_file(r / "adapter" / "adapter_model.safetensors") for r in (one, two)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][n], files[1][n]) for n in files[0])

    rows = list(read_metrics(one / "metrics.jsonl"))
    assert all(r["dropped_tokens"] == sum(r["dropped_by_layer"].values()) for r in rows)  # type: ignore[attr-defined]
    assert ("router_balance_loss" in rows[0]) == (words is AUX)

    base, arch = load_model(checkpoint)
    adapter = load_adapter(one / "adapter", arch)
    leaf = "e_score_correction_bias" if words is QUANTILE else "weight"
    trained = {n for n in adapter.tensors if ".router." in n}
    assert trained == {f"layers.{i}.mlp.router.{leaf}" for i in (1, 2, 3)}
    for name in trained:
        assert not torch.equal(adapter.tensors[name], base.get_parameter(name).float()), name
    copy_checkpoint(open_source(checkpoint), tmp_path / "merged", adapter=adapter)
    merged, _ = load_model(tmp_path / "merged")
    attach_adapter(base, adapter)
    for name in trained:
        stored = merged.get_parameter(name)
        assert torch.equal(stored, base.get_parameter(name).to(stored.dtype))
    with pytest.raises(AdapterError, match=r"TT503.*router.*trained in full"):
        export_adapter(one / "adapter", tmp_path / "e", str(checkpoint), engine="vllm")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("finetune.router.balance=aux",), "an auxiliary loss trains routers"),
        (("finetune.router.balance=quantile",), "moves selection biases"),
        (("finetune.router.train=bias",), "moved by Quantile Balancing only"),
        (("finetune.router.train=bias", "finetune.router.balance=aux"), "an auxiliary loss trains"),
    ],
)
def test_settings_that_contradict_are_refused(
    tmp_path: Path, checkpoint: Path, words: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"TT105.*{says}"):
        recipe_for(tmp_path, checkpoint, *words)


def test_groups_and_engines_that_cannot_take_trained_routers_are_refused(
    tmp_path: Path, checkpoint: Path
) -> None:
    table = plan_run(recipe_for(tmp_path, checkpoint, *AUX)).table
    assert [(r.leaf, r.kind, r.count) for r in table.rows if r.owner == "router"] == [
        ("router.weight", "full", 3)
    ]
    with pytest.raises(AdapterError, match=r"TT503.*vllm would ignore.*router\.weight"):
        plan_run(recipe_for(tmp_path, checkpoint, *FULL, "finetune.lora.serve_with=vllm"))
    grouped = load_arch(preset_config("deepseek-v3.2-tiny"), "tiny")
    with pytest.raises(AdapterError, match=r"TT503.*knows no groups of experts.* within 4"):
        router_targets(grouped, weight=False, bias=True)
    assert router_targets(grouped, weight=True, bias=False)

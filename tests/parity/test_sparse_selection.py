"""Rotated-MLA families against transformers: selections, and mistakes planted on purpose.

Each mutation changes one function, constant or weight of our model; the logits must then leave the
tolerance that the true ones stay inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracles import random_dsa
from tests.oracles.random_tensors import random_ids
from tests.oracles.run_hf import run_hf
from tests.support.compare import relative_error
from trimtab.arch.spec import MLASpec
from trimtab.checkpoint.load import load_model
from trimtab.models import indexer, mla, moe
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.indexer import Indexer
from trimtab.models.linear import LayerNormWeights, RMSNorm
from trimtab.models.mla import MLA
from trimtab.models.moe import Router
from trimtab.models.tape import ChoiceTape
from trimtab.ops.attention.indexer import index_scores
from trimtab.ops.moe import routing
from trimtab.verify.tolerances import limit

pytestmark = pytest.mark.parity

LIMIT = limit("model.logits.float64")
SEEN = 5 * LIMIT
LENGTH = 70
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def case(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Tensor, Any]:
    """A model, a prompt longer than top_k, and what transformers computes of it."""
    folder: Path = tmp_path_factory.mktemp(family)
    # Groups that a router may close, and layers that take over a selection.
    config = random_dsa.tiny_config(family, n_group=4, topk_group=2, num_experts_per_tok=3)
    random_dsa.write_checkpoint(folder, config, seed=3)
    ids = random_ids(config, LENGTH, seed=3)
    found = run_hf(folder, [ids], grads=False)
    model, _ = load_model(folder, base_dtype="fp64", compute_dtype=torch.float64)
    return model, torch.tensor(ids), found


@torch.no_grad()
def logits(model: CausalLM, ids: Tensor, tape: ChoiceTape | None = None) -> Tensor:
    return model.logits(model(ids, ForwardContext.packed([len(ids)], tape=tape)))


def error_of(case: tuple[CausalLM, Tensor, Any]) -> float:
    model, ids, found = case
    return relative_error(logits(model, ids), found["logits.0"])


def test_the_selections_are_those_of_transformers(case: tuple[CausalLM, Tensor, Any]) -> None:
    model, ids, found = case
    tape = ChoiceTape()
    assert relative_error(logits(model, ids, tape), found["logits.0"]) < LIMIT
    layers = {layer for layer, kind in tape.choices if kind == "selection"}
    assert layers == {int(name.split(".")[2]) for name in found if name.startswith("selection.")}
    for layer in layers:
        theirs = visible_sets(found[f"selection.0.{layer}"])
        assert visible_sets(tape.choices[layer, "selection"].all_positions()) == theirs
        assert len(theirs[-1]) == 12 < LENGTH


def visible_sets(selected: Tensor) -> list[set[int]]:
    """Selected keys of each query without those it may not see and unused slots."""
    return [{s for s in row if 0 <= s <= t} for t, row in enumerate(selected.tolist())]


def test_ties_go_to_the_lowest_position(family: str, tmp_path: Path) -> None:
    """With zero head weights all scores tie; imposed on transformers, our choice gives our logits."""
    config = random_dsa.tiny_config(family)
    tensors = random_dsa.random_checkpoint(config, 4)
    for name, tensor in tensors.items():
        if name.endswith("weights_proj.weight"):
            tensor.zero_()
    random_dsa.save_checkpoint(tmp_path, config, tensors)
    ids = random_ids(config, 40, seed=4)
    model, _ = load_model(tmp_path, base_dtype="fp64", compute_dtype=torch.float64)
    tape = ChoiceTape()
    mine = logits(model, torch.tensor(ids), tape)
    choices = {
        layer: s.all_positions() for (layer, kind), s in tape.choices.items() if kind == "selection"
    }
    for selected in choices.values():
        assert visible_sets(selected) == [set(range(min(t + 1, 12))) for t in range(40)]
    # An unused slot of ours names a key the query may not see, which transformers masks.
    forced = {
        f"selection.0.{layer}": torch.where(selected < 0, 39, selected).to(torch.int32)
        for layer, selected in choices.items()
    }
    found = run_hf(tmp_path, [ids], grads=False, selections=forced)
    assert relative_error(mine, found["logits.0"]) < LIMIT


def test_index_scores_carry_both_factors(case: tuple[CausalLM, Tensor, Any], monkeypatch: Patch) -> None:
    """The factors and the key norm's eps do not change a ranking, so the scores are compared."""
    model, ids, _ = case
    seen: list[tuple[Tensor, ...]] = []
    true = Indexer.select

    def watch(self: Indexer, x: Tensor, q_latent: Tensor, rotation: Any, ctx: Any) -> Tensor:
        q, w = self.queries(x, q_latent, rotation, ctx)
        seen.append((x, q_latent, *rotation, index_scores(q, self.keys(x, rotation, ctx), w)))
        return true(self, x, q_latent, rotation, ctx)

    monkeypatch.setattr(Indexer, "select", watch)
    logits(model, ids)
    module = model.layers[0].self_attn.indexer
    x, q_latent, cos, sin, scores = seen[0]
    half = module.spec.rope_layout == "half"
    turned = cos.shape[1] * 2

    def turn(head: Tensor, t: int) -> Tensor:
        """[K] of one head at position t, pair by pair as complex numbers."""
        out, pairs = head.clone(), turned // 2
        for i in range(pairs):
            a, b = (i, i + pairs) if half else (2 * i, 2 * i + 1)
            z = torch.complex(head[a], head[b]) * torch.complex(cos[t, i], sin[t, i])
            out[a], out[b] = z.real, z.imag
        return out

    k = x @ module.wk.weight.T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    k = k * module.k_norm.weight + module.k_norm.bias
    heads, dim = module.spec.heads, module.spec.dim
    t, s = 50, 17
    q = (q_latent[t] @ module.wq_b.weight.T).view(heads, dim)
    w = x[t] @ module.weights_proj.weight.T * heads**-0.5
    key = turn(k[s], s)
    expected = sum(w[h] * (turn(q[h], t) @ key * dim**-0.5).clamp(min=0) for h in range(heads))
    assert relative_error(scores[t, s], expected) < 1e-13


def each(model: nn.Module, kind: type, name: str, change: Callable[[Any], Any], patch: Patch) -> None:
    """Replace an attribute of every module of a kind."""
    found = [module for module in model.modules() if isinstance(module, kind)]
    assert found
    for module in found:
        patch.setattr(module, name, change(getattr(module, name)))


def respec(**changes: Callable[[MLASpec], Any]) -> Callable[[CausalLM, Patch], None]:
    """Change fields of every MLA spec."""

    def change(model: CausalLM, patch: Patch) -> None:
        each(model, MLA, "spec", lambda s: replace(s, **{k: f(s) for k, f in changes.items()}), patch)

    return change


def eps(names: tuple[str, ...], factor: float) -> Callable[[CausalLM, Patch], None]:
    """Change the eps of the norms of these names."""

    def change(model: CausalLM, patch: Patch) -> None:
        found = [m for n, m in model.named_modules() if n.rpartition(".")[2] in names]
        assert found and all(isinstance(m, RMSNorm) for m in found)
        for module in found:
            patch.setattr(module, "eps", module.eps * factor)

    return change


def rule(**fields: object) -> Callable[[CausalLM, Patch], None]:
    """Change constants of every router."""
    return lambda model, patch: each(
        model, Router, "rule", lambda r: replace(r, **fields), patch
    )


def other_layout(spec: MLASpec) -> Any:
    assert spec.rope is not None
    return replace(spec.rope, layout="half")


def index_layout_swapped(model: CausalLM, patch: Patch) -> None:
    swap = {"half": "interleaved", "interleaved": "half"}
    each(model, Indexer, "spec", lambda s: replace(s, rope_layout=swap[s.rope_layout]), patch)


def index_slice_at_the_end(model: CausalLM, patch: Patch) -> None:
    def last(x: Tensor, cos: Tensor, sin: Tensor, layout: Any) -> Tensor:
        width = 2 * cos.shape[-1]
        return torch.cat((x[..., :-width], mla.rotate(x[..., -width:], cos, sin, layout)), -1)

    patch.setattr(indexer, "rotate_head", last)


def index_not_rotated(model: CausalLM, patch: Patch) -> None:
    patch.setattr(indexer, "rotate_head", lambda x, *_: x)


def relu_dropped(model: CausalLM, patch: Patch) -> None:
    patch.setattr(torch, "relu_", lambda x: x)


def key_norm_without_bias(model: CausalLM, patch: Patch) -> None:
    for module in (m for m in model.modules() if isinstance(m, LayerNormWeights)):
        patch.setitem(module._parameters, "bias", nn.Parameter(torch.zeros_like(module.bias), False))


def query_latent_before_its_norm(model: CausalLM, patch: Patch) -> None:
    true = Indexer.queries

    def raw(self: Indexer, x: Tensor, q_latent: Tensor, *rest: Any) -> Any:
        owner = next(m for m in model.modules() if isinstance(m, MLA) and m.indexer is self)
        return true(self, x, owner.q_a_proj(x, rest[-1]), *rest)

    patch.setattr(Indexer, "queries", raw)


def one_key_more(model: CausalLM, patch: Patch) -> None:
    each(model, Indexer, "rule", lambda r: replace(r, count=r.count + 1), patch)


def shared_layers_dense(model: CausalLM, patch: Patch) -> None:
    true = MLA._selection
    patch.setattr(
        MLA, "_selection",
        lambda self, *args: None if self.indexer is None else true(self, *args),
    )


def selection_of_the_first_layer(model: CausalLM, patch: Patch) -> None:
    kept: list[Tensor] = []
    true = MLA._selection

    def first(self: MLA, *args: Any) -> Any:
        found = true(self, *args)
        kept.append(found)
        return kept[0] if self.layer else found

    patch.setattr(MLA, "_selection", first)


def bias_ignored(model: CausalLM, patch: Patch) -> None:
    true = routing.select_experts
    patch.setattr(moe, "select_experts", lambda s, b, r: true(s, torch.zeros_like(b), r))


def bias_in_the_weights(model: CausalLM, patch: Patch) -> None:
    routers = [m for m in model.modules() if isinstance(m, Router)]
    true = routing.expert_weights
    biases = iter([r.e_score_correction_bias for r in routers])
    patch.setattr(moe, "expert_weights", lambda s, i, r: true(s + next(biases), i, r))


def group_scored_by_its_best(model: CausalLM, patch: Patch) -> None:
    def select(scores: Tensor, bias: Tensor, rule: routing.RouterRule) -> Tensor:
        grouped = (scores + bias).unflatten(-1, (rule.groups, -1))
        kept = routing.top_indices(grouped.amax(-1), rule.topk_groups)
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, kept, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
        return routing.top_indices(choice, rule.top_k).sort(-1).values

    patch.setattr(moe, "select_experts", select)


BOTH: dict[str, Callable[[CausalLM, Patch], None]] = {
    "latent norm eps": eps(("q_a_layernorm", "kv_a_layernorm"), 10.0),
    "layer norm eps": eps(("input_layernorm", "post_attention_layernorm"), 10.0),
    "final norm eps": eps(("norm",), 10.0),
    "rope in halves": respec(rope=other_layout),
    "no rope": respec(rope=lambda s: None),
    "softmax scale": respec(softmax_scale=lambda s: s.softmax_scale * 1.01),
    "index rope layout": index_layout_swapped,
    "index rope slice": index_slice_at_the_end,
    "index not rotated": index_not_rotated,
    "index relu": relu_dropped,
    "index key norm bias": key_norm_without_bias,
    "index query latent": query_latent_before_its_norm,
    "top_k + 1": one_key_more,
    "router bias ignored": bias_ignored,
    "router bias in weights": bias_in_the_weights,
    "router not renormalised": rule(renormalise=False),
    "router scale": rule(scale=1.0),
    "router without groups": rule(groups=1),
    "router keeps one group more": rule(topk_groups=3),
    "group score from one expert": group_scored_by_its_best,
}
ONE: dict[str, dict[str, Callable[[CausalLM, Patch], None]]] = {
    "deepseek_v32": {
        "yarn ignored": respec(rope=lambda s: replace(s.rope, yarn_factor=None)),
        "yarn without softmax factor": respec(softmax_scale=lambda s: s.qk_head_dim**-0.5),
    },
    "glm_moe_dsa": {
        "shared layers dense": shared_layers_dense,
        "selection of the first layer": selection_of_the_first_layer,
    },
}


def test_the_true_model_stays_inside(case: tuple[CausalLM, Tensor, Any]) -> None:
    assert error_of(case) < LIMIT


@pytest.mark.parametrize("name", BOTH)
def test_a_planted_mistake_is_seen(
    name: str, case: tuple[CausalLM, Tensor, Any], monkeypatch: Patch
) -> None:
    BOTH[name](case[0], monkeypatch)
    assert error_of(case) > SEEN


def test_mistakes_of_one_family_are_seen(family: str, case: tuple[CausalLM, Tensor, Any]) -> None:
    for name, plant in ONE[family].items():
        with pytest.MonkeyPatch.context() as patch:
            plant(case[0], patch)
            assert error_of(case) > SEEN, name
    assert error_of(case) < LIMIT

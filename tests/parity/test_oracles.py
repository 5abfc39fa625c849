"""The oracles themselves: against transformers in float64, and against their own invariants."""

from pathlib import Path

import pytest
import torch

from tests.oracles import naive_k3, naive_ops, random_k3, random_kimi_linear
from tests.oracles.random_tensors import random_ids
from tests.oracles.run_hf import run_hf

LOGIT_RTOL = 1e-10  # measured 4e-15
GRAD_RTOL = 1e-9  # measured 8e-14
EXACT = 1e-13  # the same float64 sums in another order
VARIANTS = {
    "direct query": (None, {}),
    "query LoRA, expert groups": (24, {"num_expert_group": 2, "topk_group": 1}),
}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def k3(indexer: bool, **fields) -> tuple[dict, dict[str, torch.Tensor], list[int]]:
    config = random_k3.tiny_config(indexer, **fields)
    return config, random_k3.random_checkpoint(config, seed=1), random_ids(config, 40, seed=2)


@pytest.mark.parity
@pytest.mark.parametrize("variant", VARIANTS)
def test_naive_kimi_linear_equals_transformers(variant: str, tmp_path: Path) -> None:
    rank, fields = VARIANTS[variant]
    config = random_kimi_linear.tiny_config(rank, **fields)
    tensors = random_kimi_linear.write_checkpoint(tmp_path, config, seed=0)
    sequences = [random_ids(config, length, seed=length) for length in (5, 70)]
    hf = run_hf(tmp_path, sequences)

    leaves = naive_k3.float64_leaves(tensors)
    for n, sequence in enumerate(sequences):
        states = naive_k3.hidden_states(config, leaves, sequence)
        for place, state in states.items():
            assert relative(state, hf[f"hidden.{n}.{place}"]) < LOGIT_RTOL, place
        logits = naive_k3.logits(config, leaves, sequence)
        assert relative(logits, hf[f"logits.{n}"]) < LOGIT_RTOL
        loss = naive_k3.loss(config, leaves, sequence)
        assert relative(loss, hf[f"loss.{n}"]) < LOGIT_RTOL
        loss.backward()
    trained = {name for name in leaves if not name.endswith("e_score_correction_bias")}
    assert {f"grad.{name}" for name in trained} == {n for n in hf if n.startswith("grad.")}
    for name in trained:
        assert relative(leaves[name].grad, hf[f"grad.{name}"]) < GRAD_RTOL, name


@pytest.mark.parametrize("indexer", [False, True])
def test_a_future_token_does_not_change_the_past(indexer: bool) -> None:
    config, tensors, ids = k3(indexer)
    changed = [*ids[:25], (ids[25] + 1) % 90, *ids[26:]]
    before = naive_k3.logits(config, tensors, ids)
    after = naive_k3.logits(config, tensors, changed)
    assert torch.equal(before[:25], after[:25])
    assert (before[25:] - after[25:]).abs().amax(dim=-1).min() > 1e-3


def test_the_indexer_is_inert_up_to_index_topk() -> None:
    config, tensors, ids = k3(True, index_topk=12)
    dense, *_ = k3(False)
    sparse_logits = naive_k3.logits(config, tensors, ids)
    dense_logits = naive_k3.logits(dense, tensors, ids)
    assert torch.equal(sparse_logits[:12], dense_logits[:12])
    assert relative(sparse_logits[12:], dense_logits[12:]) > 0.1


def test_the_selection_is_causal_and_breaks_ties_by_position() -> None:
    scores = torch.tensor([[0.0, 9.0, 9.0], [0.0, 0.0, 9.0], [1.0, 1.0, 1.0]])
    assert naive_ops.causal_selection(scores, 2) == [[0], [0, 1], [0, 1]]


def test_expert_groups_restrict_the_choice() -> None:
    choice = [0.9, 0.1, 0.2, 0.6, 0.5, 0.4]
    assert naive_ops.select_experts(choice, 2, groups=1, top_groups=1) == [0, 3]
    assert naive_ops.select_experts(choice, 2, groups=2, top_groups=1) == [0, 2]


def test_packed_and_decoded_experts_are_the_same_model() -> None:
    config, packed, ids = k3(False)
    decoded = random_k3.random_checkpoint(config, seed=1, packed=False)
    assert not any(name.endswith("_packed") for name in decoded)
    want = naive_k3.logits(config, packed, ids[:8])
    assert torch.equal(naive_k3.logits(config, decoded, ids[:8]), want)


def test_mxfp4_low_nibble_is_the_even_element() -> None:
    packed = torch.tensor([[0x72, *[0] * 15, 0x0F, *[0] * 15]], dtype=torch.uint8)
    scale = torch.tensor([[127, 128]], dtype=torch.uint8)
    decoded = naive_ops.decode_mxfp4(packed, scale)[0]
    assert decoded[[0, 1, 32, 33]].tolist() == [1.0, 6.0, -12.0, 0.0]


@pytest.mark.parametrize("indexer", [False, True])
def test_every_released_tensor_reaches_the_loss(indexer: bool) -> None:
    """Only the selection parameters and the mix of an empty bank carry no gradient."""
    config, tensors, ids = k3(indexer, experts=4, top_k=2)
    leaves = naive_k3.float64_leaves(tensors)
    naive_k3.loss(config, leaves, ids).backward()
    dead = {n for n, t in leaves.items() if t.grad is None or not t.grad.abs().max() > 1e-7}
    unused = "language_model.model.layers.0.self_attention_res_"
    selecting = {n for n in leaves if ".indexer." in n or n.endswith("e_score_correction_bias")}
    assert dead == selecting | {f"{unused}norm.weight", f"{unused}proj.weight"}


def test_the_random_checkpoint_closes_the_released_inventory() -> None:
    """Per layer kind as many tensors as the sheet's totals (2,460 plain text tensors) imply."""
    config, tensors, _ = k3(False)
    text = config["text_config"]
    layers, mla = text["num_hidden_layers"], len(text["linear_attn_config"]["full_attn_layers"])
    plain = [name for name in tensors if ".experts." not in name]
    assert len(plain) == 5 + 6 * layers + 14 * (layers - mla) + 8 * mla + 3 + 8 * (layers - 1)
    assert 5 + 6 * 93 + 14 * 69 + 8 * 24 + 3 + 8 * 92 == 2460
    assert len(tensors) - len(plain) == 2 * 3 * text["num_experts"] * (layers - 1)


def test_the_recurrence_continues_from_its_state() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, 2, 4, dtype=torch.float64) for _ in range(3))
    g, beta = -torch.rand(9, 2, 4, dtype=torch.float64), torch.rand(9, 2, dtype=torch.float64)
    parts = (q, naive_ops.l2_norm(k), v, g, beta)
    whole, last = naive_ops.kda_recurrence(*parts)
    first, state = naive_ops.kda_recurrence(*(x[:5] for x in parts))
    second, end = naive_ops.kda_recurrence(*(x[5:] for x in parts), state)
    assert relative(torch.cat([first, second]), whole) < EXACT
    assert relative(end, last) < EXACT


def test_the_gradient_of_the_loss_is_its_slope() -> None:
    """One directional derivative through the whole model, against a central difference."""
    config, tensors, ids = k3(True)
    leaves = naive_k3.float64_leaves(tensors)
    naive_k3.loss(config, leaves, ids[:12]).backward()
    name = "language_model.model.layers.1.self_attn.A_log"
    step = torch.zeros_like(leaves[name])
    step[1] = 1e-5
    with torch.no_grad():
        up, down = (
            naive_k3.loss(config, {**leaves, name: leaves[name] + sign * step}, ids[:12])
            for sign in (1, -1)
        )
    assert (up - down).item() / 2e-5 == pytest.approx(leaves[name].grad[1].item(), rel=1e-5)

"""Chunked and single-step KDA against the recurrence: outputs, states and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.oracles.naive_ops import kda_recurrence
from tests.support.compare import relative_error
from trimtab.ops.kda.chunk import kda_chunk
from trimtab.ops.kda.recurrent import kda_step
from trimtab.ops.kda.reference import kda_reference
from trimtab.ops.norm import l2_norm
from trimtab.verify.tolerances import limit

HEADS, KEY, VALUE, SCALE = 2, 8, 6, 0.3
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def inputs(lengths: list[int], gate: float, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(len(lengths) + sum(lengths))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total = sum(lengths)
    q, k = (l2_norm(draw(1, total, HEADS, KEY)) for _ in range(2))
    v = draw(1, total, HEADS, VALUE)
    g = -gate * torch.rand(1, total, HEADS, KEY, generator=generator, dtype=torch.float64)
    beta = torch.sigmoid(draw(1, total, HEADS))
    state = draw(len(lengths), HEADS, KEY, VALUE)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return [x.to(dtype) for x in (q, k, v, g, beta, state)], cu_seqlens


def run(op, tensors: list[Tensor], cu_seqlens: Tensor, **kwargs) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, final = op(*leaves[:5], SCALE, leaves[5], True, cu_seqlens, **kwargs)
    ramp = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out.mul(ramp).sum() + final.square().sum()).backward()
    grads = {f"d{n}": x.grad for n, x in zip(NAMES, leaves, strict=True)}
    return {"output": out, "final": final, **grads}


PACKS = ([1], [2, 1], [31], [32], [33, 0, 65], [100, 1, 0, 63, 7])


@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("bound", [None, -5.0])
def test_chunked_kda_equals_the_recurrence_in_float64(lengths, bound):
    tensors, cu = inputs(lengths, 5.0, torch.float64)
    expected = run(kda_reference, tensors, cu)
    found = run(kda_chunk, tensors, cu, gate_bound=bound)
    for name, value in expected.items():
        assert relative_error(found[name], value) <= limit("kda.output.float64"), name


@pytest.mark.parametrize(
    ("gate", "bound", "kind"),
    [(0.01, -5.0, ""), (5.0, -5.0, ""), (5.0, None, ""), (60.0, None, ".hard")],
)
def test_chunked_kda_in_float32_stays_in_the_table(gate, bound, kind):
    tensors, cu = inputs([130, 70], gate, torch.float32)
    expected = run(kda_reference, [x.double() for x in tensors], cu)
    found = run(kda_chunk, tensors, cu, gate_bound=bound)
    for name, value in expected.items():
        what = "gradients" if name.startswith("d") else "output"
        assert relative_error(found[name], value) <= limit(f"kda.{what}.float32{kind}"), name


def test_gates_far_below_the_floor_give_finite_gradients():
    tensors, cu = inputs([70], 5.0, torch.float32)
    tensors[3] = tensors[3] * 2000
    for name, value in run(kda_chunk, tensors, cu).items():
        assert torch.isfinite(value).all(), name


def test_the_reference_equals_an_independent_recurrence():
    tensors, _ = inputs([17], 5.0, torch.float64)
    q, k, v, g, beta, state = tensors
    out, final = kda_reference(q, k, v, g, beta, SCALE, state, True)
    other, other_state = kda_recurrence(SCALE * q[0], k[0], v[0], g[0], beta[0], state[0])
    assert relative_error(out[0], other) <= limit("kda.output.float64")
    assert relative_error(final[0], other_state) <= limit("kda.output.float64")


def test_a_batch_without_borders_is_independent_sequences():
    tensors, cu = inputs([40, 40], 5.0, torch.float64)
    flat, _ = kda_chunk(*tensors[:5], SCALE, None, False, cu)
    batched = [x.view(2, 40, *x.shape[2:]) for x in tensors[:5]]
    out, _ = kda_chunk(*batched, SCALE)
    assert torch.equal(out.flatten(0, 1), flat[0])


def test_documents_of_a_pack_do_not_leak():
    tensors, cu = inputs([37, 41], 5.0, torch.float32)
    before, _ = kda_chunk(*tensors[:5], SCALE, None, False, cu)
    tensors[2][:, :37] += 1.0
    after, _ = kda_chunk(*tensors[:5], SCALE, None, False, cu)
    assert torch.equal(before[:, 37:], after[:, 37:])
    assert not torch.equal(before[:, :37], after[:, :37])


def test_prefill_in_pieces_equals_one_pass():
    tensors, _ = inputs([90], 5.0, torch.float64)
    whole, final = kda_chunk(*tensors[:5], SCALE, tensors[5], True)
    state, pieces = tensors[5], []
    for begin, end in ((0, 1), (1, 40), (40, 89), (89, 90)):
        part = [x[:, begin:end] for x in tensors[:5]]
        out, state = kda_chunk(*part, SCALE, state, True)
        pieces.append(out)
    assert relative_error(torch.cat(pieces, 1), whole) <= limit("kda.output.float64")
    assert relative_error(state, final) <= limit("kda.output.float64")


def test_a_single_step_equals_the_recurrence():
    tensors, _ = inputs([3, 3], 5.0, torch.float64)
    state = tensors[5]
    expected, final = kda_reference(
        *(x.view(2, 3, *x.shape[2:]) for x in tensors[:5]), SCALE, state, True
    )
    for t in range(3):
        step = [x.view(2, 3, *x.shape[2:])[:, t] for x in tensors[:5]]
        out, state = kda_step(*step, SCALE, state)
        assert relative_error(out, expected[:, t]) <= limit("kda.output.float64")
    assert relative_error(state, final) <= limit("kda.output.float64")

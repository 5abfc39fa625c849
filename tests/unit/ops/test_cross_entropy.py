"""Cross-entropy in tiles: losses and every gradient, masks, memory, refused arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import MIB, peak_extra_bytes
from benchmarks.ops.cross_entropy import warmed
from tests.support.compare import relative_error
from trimtab.errors import OperatorError
from trimtab.ops.cross_entropy import CROSS_ENTROPY, token_losses_reference
from trimtab.ops.fused import cross_entropy as tiles
from trimtab.verify.tolerances import limit

IGNORED = -100


def draw(
    rows: int, width: int, words: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(words, width, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, words, (rows,), generator=generator)
    labels[::3] = IGNORED
    return hidden, weight, labels


def gradients(op, hidden, weight, labels, z_loss, trained: bool) -> list[Tensor]:
    """Losses, then the gradients of what needs one, under a different weight for every row."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
    losses = op(hidden, weight, labels, z_loss)
    (losses * torch.linspace(-1, 2, len(losses), dtype=losses.dtype)).sum().backward()
    assert (weight.grad is not None) == trained
    return [losses, hidden.grad, *([weight.grad] if trained else [])]


@pytest.mark.parametrize("rows", [1, 63, 65, 100])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_tiles_equal_all_logits_at_once(rows, trained, z_loss, monkeypatch):
    monkeypatch.setattr(tiles, "_ROWS", 16)
    monkeypatch.setattr(tiles, "_TILE_ELEMENTS", 16 * 30)  # neither divides 65 rows or 101 words
    case = (*draw(rows, 8, 101), z_loss)
    found = gradients(CROSS_ENTROPY, *case, trained)
    for mine, expected in zip(found, gradients(token_losses_reference, *case, trained), strict=True):
        assert relative_error(mine, expected) <= limit("cross_entropy.float64")


def test_masked_rows_have_no_loss_and_no_gradient():
    hidden, weight, labels = draw(9, 8, 20)
    losses, gradient = gradients(CROSS_ENTROPY, hidden, weight, labels, 0.01, False)
    masked = labels == IGNORED
    assert losses[masked].abs().max() == 0 and gradient[masked].abs().max() == 0
    assert losses[~masked].abs().min() > 0


def test_bfloat16_rounds_only_what_is_stored():
    hidden, weight, labels = draw(40, 16, 50, torch.bfloat16)
    mine = gradients(CROSS_ENTROPY, hidden, weight, labels, 0.0, True)
    wide = gradients(token_losses_reference, hidden.double(), weight.double(), labels, 0.0, True)
    assert mine[0].dtype is torch.float32 and mine[1].dtype is torch.bfloat16
    assert relative_error(mine[0], wide[0]) <= limit("cross_entropy.float32")
    for found, expected in zip(mine[1:], wide[1:], strict=True):
        assert relative_error(found, expected) <= 2**-8  # one rounding


def test_no_rows_give_no_losses():
    hidden, weight, labels = draw(0, 8, 20)
    losses, gradient = gradients(CROSS_ENTROPY, hidden, weight, labels, 0.0, False)
    assert losses.shape == (0,) and gradient.shape == (0, 8)


def test_logits_that_would_overflow_an_exponential_are_finite():
    hidden, weight, labels = (x for x in draw(5, 8, 20))
    found = gradients(CROSS_ENTROPY, hidden * 1e4, weight, labels, 0.0, False)
    assert all(torch.isfinite(x).all() for x in found)


def test_a_frozen_head_costs_two_products_and_a_trained_one_four():
    hidden, weight, labels = draw(10, 8, 20)
    product = 2 * 10 * 8 * 20
    for trained, products in ((False, 2), (True, 4)):
        with FlopCounterMode(display=False) as counter:
            gradients(CROSS_ENTROPY, hidden, weight, labels, 0.0, trained)
        assert counter.get_total_flops() == products * product


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, y: (h[0], w, y), r"hidden .*\[R, D\]"),
        (lambda h, w, y: (h, w[:, :4], y), r"weight .*\[W, D=8\]"),
        (lambda h, w, y: (h, w, y[:2]), r"labels .*\[R=6\]"),
        (lambda h, w, y: (h, w, y.int()), "labels .*int64"),
        (lambda h, w, y: (h, w, y.clamp(min=20)), "labels .*0..19"),
        (lambda h, w, y: (h.int(), w, y), "hidden .*floating"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(OperatorError, match=message) as caught:
        CROSS_ENTROPY(*change(*draw(6, 8, 20)), 0.0)
    assert caught.value.code == "TT111"


def test_memory_does_not_hold_the_logits():
    # All logits are 640 MiB; a tile is 32 MiB.
    extra = peak_extra_bytes(warmed, "tiles", 1024, 16, 163840, "bfloat16")
    assert extra < 64 * MIB

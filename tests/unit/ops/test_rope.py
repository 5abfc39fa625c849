"""Rotary embedding: frequencies, layouts, and what a dot product of rotated vectors may depend on."""

from __future__ import annotations

import pytest
import torch

from trimtab.arch.spec import RopeSpec
from trimtab.ops.rope import (
    Layout,
    inverse_frequencies,
    rope_tables,
    rotate,
    rotate_head,
    yarn_range,
)

PLAIN = RopeSpec(8e6)
YARN = RopeSpec(10000.0, yarn_factor=40.0, yarn_original=4096)


def test_frequencies_are_float32_powers_of_theta() -> None:
    found = inverse_frequencies(PLAIN, 64)
    exact = 8e6 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=3e-7, atol=0)


def test_yarn_keeps_fast_channels_and_stretches_slow_ones() -> None:
    low, high = yarn_range(YARN, 64)
    assert (low, high) == (10, 23)
    plain = inverse_frequencies(RopeSpec(10000.0), 64)
    ratio = plain / inverse_frequencies(YARN, 64)
    torch.testing.assert_close(ratio[: low + 1], torch.ones(11))
    torch.testing.assert_close(ratio[high:], torch.full((9,), 40.0))
    assert (ratio.diff()[low:high] > 0).all()


def test_equal_betas_do_not_divide_by_zero() -> None:
    found = inverse_frequencies(RopeSpec(50000.0, yarn_factor=32.0, yarn_beta_fast=1.0), 64)
    assert torch.isfinite(found).all() and (found > 0).all()


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotation_is_multiplication_by_a_unit_number(layout: Layout) -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    cos, sin = rope_tables(torch.arange(5), PLAIN, 8, torch.float64)
    pairs = x.unflatten(-1, (-1, 2)) if layout == "interleaved" else x.unflatten(-1, (2, -1)).mT
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(cos, sin).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotate(x, cos, sin, layout), expected)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_products_depend_on_distance_only(layout: Layout) -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64)

    def product(at: int, of: int) -> torch.Tensor:
        cos, sin = rope_tables(torch.tensor([at, of]), YARN, 8, torch.float64)
        a, b = rotate(torch.stack((q, k)), cos, sin, layout)
        return a @ b

    torch.testing.assert_close(product(1009, 1002), product(7, 0))
    assert abs(product(7, 0) - product(8, 0)) > 1e-3


def test_only_the_first_channels_of_an_index_head_turn() -> None:
    x = torch.randn(4, 2, 12)
    cos, sin = rope_tables(torch.arange(4), PLAIN, 8, torch.float32)
    found = rotate_head(x, cos, sin, "half")
    assert torch.equal(found[..., 8:], x[..., 8:])
    assert torch.equal(found[..., :8], rotate(x[..., :8], cos, sin, "half"))


def test_half_precision_is_rotated_in_float32() -> None:
    x = torch.randn(64, 8)
    positions = torch.arange(1_000_000, 1_000_064)
    cos, sin = rope_tables(positions, PLAIN, 8, torch.float32)
    found = rotate(x.bfloat16(), cos, sin, "half")
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, rotate(x.bfloat16().float(), cos, sin, "half").bfloat16())


def test_the_amplitude_scales_both_tables() -> None:
    spec = RopeSpec(10000.0, amplitude=1.5)
    cos, sin = rope_tables(torch.arange(9), spec, 8, torch.float64)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 2.25))

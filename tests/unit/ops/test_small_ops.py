"""MXFP4, short convolution, residual mix and activations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import naive_ops
from tests.support.compare import relative_error
from trimtab.ops import mxfp4
from trimtab.ops.activation import situ, swiglu
from trimtab.ops.conv import short_conv, short_conv_cached


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_low_nibble_is_the_even_element():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x72  # low nibble 2 -> 1.0, high nibble 7 -> 6.0
    packed[0, 1] = 0x9F  # low nibble 15 -> -6.0, high nibble 9 -> -0.5
    scale = torch.tensor([[128]], dtype=torch.uint8)
    decoded = mxfp4.decode(packed, scale, torch.float32)
    assert decoded[0, :4].tolist() == [2.0, 12.0, -12.0, -1.0]


def test_every_code_decodes_as_an_independent_table_says():
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (3, 64), generator=generator, dtype=torch.uint8)
    scale = torch.randint(100, 140, (3, 4), generator=generator, dtype=torch.uint8)
    expected = naive_ops.decode_mxfp4(packed, scale)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(mxfp4.decode(packed, scale, dtype).double(), expected.double())


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(0, 2**31), st.integers(-60, 60))
def test_values_on_the_grid_survive_encoding(seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (4, 32), generator=generator, dtype=torch.uint8)
    scale = torch.full((4, 2), 127 + exponent, dtype=torch.uint8)
    values = mxfp4.decode(packed, scale, torch.float64)
    assert torch.equal(mxfp4.decode(*mxfp4.encode(values), torch.float64), values)


def test_encoding_rounds_to_the_nearest_value():
    values = draw(8, 64) * 3
    rounded = mxfp4.round_to_grid(values)
    _, scale = mxfp4.encode(values)
    step = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    grid = torch.tensor([*mxfp4.MAGNITUDES, *(-m for m in mxfp4.MAGNITUDES)]).double()
    nearest = (values.unsqueeze(-1) - grid * step.unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose((values - rounded).abs(), nearest, atol=1e-12)


def test_zero_blocks_encode_to_zero_and_scale_255_is_nan():
    packed, scale = mxfp4.encode(torch.zeros(1, 32))
    assert mxfp4.decode(packed, scale, torch.float32).abs().max() == 0
    bad = mxfp4.decode(packed, torch.full_like(scale, 255), torch.float32)
    assert torch.isnan(bad).all()


def positions(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    where = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return where, ids


@pytest.mark.parametrize("lengths", [[1], [2, 1, 5], [4, 0, 3]], ids=str)
def test_short_convolution_equals_the_naive_one_per_document(lengths):
    x, weight = draw(sum(lengths), 6), draw(6, 1, 4, seed=1)
    where, _ = positions(lengths)
    expected = [naive_ops.short_conv(p, weight) for p in x.split(lengths) if len(p)]
    assert relative_error(short_conv(x, weight, where), torch.cat(expected)) <= 1e-14


def test_convolution_in_pieces_equals_one_pass():
    x, weight = draw(2, 9, 6), draw(6, 1, 4, seed=1)
    whole = torch.stack([naive_ops.short_conv(row, weight) for row in x])
    tail = torch.zeros(2, 3, 6, dtype=torch.float64)
    pieces = []
    for begin, end in ((0, 2), (2, 3), (3, 8), (8, 9)):
        where, ids = positions([end - begin] * 2)
        out, tail = short_conv_cached(x[:, begin:end].flatten(0, 1), weight, tail, where, ids)
        pieces.append(out.view(2, end - begin, 6))
    assert relative_error(torch.cat(pieces, 1), whole) <= 1e-14


def test_situ_has_its_known_values():
    one = torch.ones(1, dtype=torch.float64)
    up = torch.full((1,), 1e9, dtype=torch.float64)
    assert situ(one * 1e9, up, 4.0, 25.0).item() == pytest.approx(100.0)
    assert situ(one, one, 4.0, None).item() == pytest.approx(0.716, abs=1e-3)
    assert situ(-one * 1.219, one, 4.0, None).item() == pytest.approx(-0.2698, abs=1e-4)


def test_the_swiglu_clamp_bounds_both_branches():
    big = torch.tensor([30.0])
    assert swiglu(big, -big, 10.0).item() == pytest.approx(-100.0, rel=1e-4)
    assert swiglu(-big, big, 10.0).item() == pytest.approx(0.0, abs=1e-10)

"""Block-scaled FP8: what is written is what is read, edges included."""

from __future__ import annotations

import pytest
import torch

from trimtab.ops import fp8

BLOCK = (128, 128)


@pytest.mark.parametrize("shape", [(128, 128), (5, 300), (257, 129), (1, 1)])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_encoding_is_within_half_a_step_of_its_block(shape: tuple[int, int], power_of_two: bool) -> None:
    matrix = torch.randn(shape) * torch.logspace(-6, 3, shape[1])
    values, scale = fp8.encode(matrix, BLOCK, power_of_two=power_of_two)
    assert values.dtype is torch.float8_e4m3fn and scale.dtype is torch.float32
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    found = fp8.decode(values, scale, BLOCK, torch.float32)
    largest = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    # E4M3 has three mantissa bits and a smallest step of 2^-9.
    step = torch.maximum(matrix.abs() * 2.0**-4, largest * 2.0**-10)
    assert ((found - matrix).abs() <= step * 1.0001).all()
    assert (scale.log2() == scale.log2().round()).all() == power_of_two


def test_the_largest_value_of_a_block_uses_the_range() -> None:
    matrix = torch.randn(256, 256)
    values, scale = fp8.encode(matrix, BLOCK, power_of_two=False)
    blocks = values.float().view(2, 128, 2, 128).abs().amax((1, 3))
    assert (blocks == fp8.E4M3_MAX).all()
    _, rounded = fp8.encode(matrix, BLOCK, power_of_two=True)
    assert (rounded >= scale).all() and (rounded < 2 * scale).all()


def test_an_exact_power_of_two_is_not_doubled() -> None:
    _, scale = fp8.encode(torch.full((2, 2), fp8.E4M3_MAX * 4), BLOCK, power_of_two=True)
    assert scale.item() == 4.0


@pytest.mark.parametrize("power_of_two", [True, False])
def test_a_decoded_matrix_is_encoded_to_the_same_numbers(power_of_two: bool) -> None:
    values, scale = fp8.encode(torch.randn(200, 300), BLOCK, power_of_two=power_of_two)
    matrix = fp8.decode(values, scale, BLOCK, torch.float32)
    again = fp8.encode(matrix, BLOCK, power_of_two=power_of_two)
    assert torch.equal(fp8.decode(*again, BLOCK, torch.float32), matrix)


def test_zeros_stay_zero_and_have_a_finite_scale() -> None:
    values, scale = fp8.encode(torch.zeros(3, 200), BLOCK, power_of_two=True)
    assert torch.equal(scale, torch.ones(1, 2)) and not values.float().any()


def test_power_of_two_scales_lose_nothing_in_bfloat16() -> None:
    values, scale = fp8.encode(torch.randn(64, 64), BLOCK, power_of_two=True)
    wide = fp8.decode(values, scale, BLOCK, torch.float32)
    assert torch.equal(fp8.decode(values, scale, BLOCK, torch.bfloat16).float(), wide)


def test_nan_is_found_in_both_signs() -> None:
    raw = torch.tensor([0x7F, 0xFF, 0x7E, 0x00], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert fp8.is_nan(raw).tolist() == [True, True, False, False]

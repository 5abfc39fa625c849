"""Packed matrices: every form comes back bit for bit, native kernels like the reference."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.arch.quantization import PackedForm
from trimtab.ops import int4
from trimtab.ops.native.library import unavailable
from trimtab.ops.packed import (
    DECODE,
    ENCODE,
    NATIVE,
    PackedMatrices,
    decode_reference,
    encode_reference,
)

MXFP4, INT4, FP8 = (
    PackedForm("mxfp4", (1, 32)), PackedForm("int4", (1, 32)), PackedForm("fp8", (128, 128)),
)
FORMS = [MXFP4, INT4, PackedForm("int4", (1, 24)), FP8, PackedForm("fp8", (3, 7), True)]
native = pytest.mark.skipif(unavailable(NATIVE) is not None, reason=str(unavailable(NATIVE)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def matrix(form: PackedForm, rows: int = 33, seed: int = 0) -> torch.Tensor:
    """Rows of every magnitude, one of zeros, and one whose maximum is negative."""
    draw = torch.Generator().manual_seed(seed)
    columns = 3 * form.block[1] if form.kind != "fp8" else 150
    values = torch.randn(rows, columns, generator=draw) * torch.logspace(-36, 30, rows).unsqueeze(1)
    values[1] = 0
    values[2] = -values[2].abs()
    return values


@native
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_native_kernels_give_the_bits_of_the_reference(form: PackedForm, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = matrix(form)
        expected = encode_reference(values, form)
        if form.kind != "fp8":  # PyTorch itself rounds to FP8
            pairs = zip(ENCODE.force("native")(values, form), expected, strict=True)
            assert all(torch.equal(bits(found), bits(wanted)) for found, wanted in pairs)
        out = torch.full_like(values, torch.nan)
        DECODE.force("native")(*expected, form, out)
        wide = decode_reference(*expected, form, torch.empty_like(values))
        assert torch.equal(bits(out), bits(wide))
    finally:
        torch.set_num_threads(before)


@native
@pytest.mark.parametrize("form", [MXFP4, INT4, FP8], ids=str)
def test_every_code_under_extreme_scales(form: PackedForm) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(4, 1)
    if form.kind == "fp8":
        scale = torch.tensor([[2.0**-140, 3.0], [0.0, 1e38]])
        form = PackedForm("fp8", (2, 128))
    elif form.kind == "int4":
        scale = torch.tensor([1e-40, 1.5, 3e38, -2.0]).view(4, 1).repeat(1, 16).to(torch.bfloat16)
    else:
        scale = torch.tensor([0, 1, 254, 255], dtype=torch.uint8).view(4, 1).repeat(1, 16)
    columns = 256 * form.per_byte
    found, wanted = (torch.empty(4, columns) for _ in range(2))
    DECODE.force("native")(codes, scale, form, found)
    decode_reference(codes, scale, form, wanted)
    both_nan = found.isnan() & wanted.isnan()
    assert torch.equal(found.view(torch.int32).masked_fill(both_nan, 0),
                       wanted.view(torch.int32).masked_fill(both_nan, 0))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_on_the_grid_survive_encoding(form: PackedForm) -> None:
    values = matrix(form)[:20]
    coarse = decode_reference(*encode_reference(values, form), form, torch.empty_like(values))
    again = decode_reference(*encode_reference(coarse, form), form, torch.empty_like(values))
    assert torch.equal(coarse, again)


def test_int4_by_hand() -> None:
    packed = torch.tensor([[0xF0, 0x98]], dtype=torch.uint8)  # nibbles 0 15 | 8 9
    scale = torch.tensor([[0.5]], dtype=torch.bfloat16)
    assert int4.decode(packed, scale, torch.float32).tolist() == [[-4.0, 3.5, 0.0, 0.5]]


@pytest.mark.parametrize("largest", [1, 5, 7, -8])
def test_int4_finds_the_grid_whatever_the_largest_code_is(largest: int) -> None:
    draw = torch.Generator().manual_seed(largest)
    codes = torch.randint(-abs(largest) + 1, abs(largest), (64, 32), generator=draw)
    codes[:, 3] = largest
    scale = torch.rand(64, 1, generator=draw).to(torch.bfloat16).float() + 2.0**-7
    values = codes * scale.to(torch.bfloat16).float()
    assert torch.equal(int4.decode(*int4.encode(values, 32), torch.float32), values)


def test_int4_error_is_within_half_a_step() -> None:
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    packed, scale = int4.encode(values, 32)
    step = scale.float().repeat_interleave(32, -1)
    found = int4.decode(packed, scale, torch.float32)
    inside = (values >= -8.5 * step) & (values <= 7.5 * step)
    assert inside.float().mean() > 0.97
    assert ((found - values).abs() <= 0.5 * step * 1.0001)[inside].all()


def expert_matrices(form: PackedForm, rows: int, columns: int) -> tuple[PackedMatrices, torch.Tensor]:
    """Three experts of two parts, and their values [3, 2 * rows, columns]."""
    draw = torch.Generator().manual_seed(4)
    parts = [torch.randn(rows, columns, generator=draw) for _ in range(6)]
    pairs = [encode_reference(part, form) for part in parts]
    packed, scale = (torch.stack([pair[side] for pair in pairs]) for side in range(2))
    decoded = torch.stack(
        [decode_reference(*pair, form, torch.empty(rows, columns)) for pair in pairs]
    )
    whole = PackedMatrices(
        packed.view(3, 2 * rows, -1), scale.reshape(3, -1, scale.shape[-1]), form, 2
    )
    return whole, decoded.view(3, 2 * rows, columns)


@pytest.mark.parametrize("form", [MXFP4, INT4, FP8, PackedForm("fp8", (5, 16))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_expert_is_read_into_the_buffer_given(form: PackedForm, dtype: torch.dtype) -> None:
    matrices, values = expert_matrices(form, 17, 64)
    again = PackedMatrices.from_key(matrices.key, matrices.packed, matrices.scale)
    buffer = torch.full((34, 64), torch.nan, dtype=dtype)
    for expert in (2, 0):
        found = again.matrix(expert, dtype, buffer)
        assert found is buffer and torch.equal(buffer, values[expert].to(dtype))
    assert torch.equal(matrices.matrix(1, dtype), values[1].to(dtype))


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    matrices, _ = expert_matrices(MXFP4, 4, 32)
    with pytest.raises(ValueError, match=r"must be torch.float32 \[8, 32\]"):
        matrices.matrix(0, torch.float32, torch.empty(4, 32))
    with pytest.raises(ValueError, match="float64"):
        matrices.matrix(0, torch.float32, torch.empty(8, 32, dtype=torch.float64))


def test_tensors_without_memory_keep_their_shape() -> None:
    with FakeTensorMode():
        packed, scale = (torch.empty(2, 8, n, dtype=torch.uint8) for n in (32, 2))
        found = PackedMatrices(packed, scale, MXFP4, 2).matrix(1, torch.float32)
    assert tuple(found.shape) == (8, 64)


def test_why_native_does_not_run_is_said() -> None:
    values, scale = encode_reference(torch.randn(4, 64), MXFP4)
    case = DECODE.case(values, scale, MXFP4, torch.empty(4, 64, dtype=torch.float64))
    (first, last) = DECODE.explain(case)
    assert not first.chosen and "float32" in str(first.reason) and last.chosen
    across = DECODE.case(values, scale, MXFP4, torch.empty(64, 4).mT)
    assert "contiguous" in str(DECODE.explain(across)[0].reason)

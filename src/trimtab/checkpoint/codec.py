"""Codec: the rules of StoredTensor executed on tensors, in both directions.

Knows: bytes <-> tensors, stored form <-> the part of a parameter. Does not know: files, models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trimtab.arch.maps import stored_tensors
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.quantization import PackedForm, PackedKind, Quantization
from trimtab.arch.spec import ArchSpec
from trimtab.arch.stored import StoredTensor
from trimtab.errors import CheckpointError
from trimtab.ops import fp8, mxfp4
from trimtab.ops.packed import DECODE, ENCODE

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}
_E8M0_NAN = 255

PackedTensor = Literal["packed", "scale", "shape"]
PartFor = Callable[[ParamSpec, tuple[int, ...]], Tensor]
TensorFor = Callable[[StoredTensor], Tensor]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part `param[index]` of a parameter with the one or two stored tensors that hold it."""

    param: ParamSpec
    index: tuple[int, ...]
    stored: tuple[StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape of the part."""
        return self.param.shape[len(self.index):]

    @property
    def numel(self) -> int:
        """Elements of the part."""
        total = 1
        for extent in self.shape:
            total *= extent
        return total


def parts(arch: ArchSpec) -> tuple[Part, ...]:
    """Every part of every parameter, in the order of the stored tensors."""
    params = {param.name: param for param in inventory(arch)}
    grouped: dict[tuple[str, tuple[int, ...]], list[StoredTensor]] = {}
    for stored in stored_tensors(arch):
        grouped.setdefault((stored.param, stored.index), []).append(stored)
    return tuple(
        Part(params[name], index, tuple(stored)) for (name, index), stored in grouped.items()
    )


def to_tensor(raw: bytearray, dtype: str, shape: Sequence[int]) -> Tensor:
    """Tensor over the bytes of `raw`, which it keeps; `dtype` is the safetensors name."""
    if not raw:
        return torch.empty(tuple(shape), dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(raw, dtype=TORCH_DTYPES[dtype]).reshape(tuple(shape))


def to_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as a safetensors file holds them (row-major, little-endian)."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def check_finite(tensor: Tensor, stored: StoredTensor, where: str) -> None:
    """Raise TT310 if a stored tensor holds NaN, infinity or a NaN scale."""
    check_values(tensor, f"{where}: {stored.name}", stored.transform == "mxfp4_scale")


def check_values(tensor: Tensor, where: str, is_e8m0: bool) -> None:
    """Raise TT310 for NaN or infinity.

    Args:
        tensor: as a file holds it.
        where: file and tensor, for the message.
        is_e8m0: the bytes are exponents of MXFP4 blocks.
    """
    if is_e8m0:
        bad, rule = tensor == _E8M0_NAN, "a block scale of 255 is NaN"
    elif tensor.dtype is torch.float8_e4m3fn:
        bad, rule = fp8.is_nan(tensor), "must be finite"
    elif tensor.is_floating_point():
        bad, rule = ~torch.isfinite(tensor), "must be finite"
    else:
        return
    count = int(bad.sum())
    if count:
        first = bad.nonzero()[0].tolist()
        raise CheckpointError(
            "TT310", where, f"{rule}; {count} such values, first at {first}",
            hint="copy the file again; if the source has it too, report it there",
        )


def decode_part(part: Part, read: TensorFor, dtype: torch.dtype | None = None) -> Tensor:
    """The logical part from its stored tensors.

    Args:
        part: what to decode.
        read: gives a stored tensor in its stored dtype and shape.
        dtype: of the result; None keeps the stored dtype, BF16 for MXFP4 and F32 for FP8 and INT4,
            which lose nothing.

    Returns:
        Tensor of shape `part.shape`.
    """
    kinds = {packed_kind(stored): stored for stored in part.stored}
    if "packed" in kinds:
        form = form_of(kinds["scale"])
        values, scale = read(kinds["packed"]).view(torch.uint8), read(kinds["scale"])
        exact = torch.bfloat16 if form.kind == "mxfp4" else torch.float32
        out = torch.empty(part.shape, dtype=dtype or exact)
        return DECODE(values, scale, form, out)
    (stored,) = part.stored
    value = read(stored)
    if stored.transform == "pad_tail":
        value = value.reshape(-1)[: part.numel]
    value = value.reshape(part.shape)
    return value if dtype is None else value.to(dtype)


def packed_kind(stored: StoredTensor) -> PackedTensor | None:
    """What a stored tensor is to a packed matrix; None for a plain one."""
    if not stored.transform.startswith(("mxfp4", "fp8", "int4")):
        return None
    word = stored.transform.rpartition("_")[2]
    return "scale" if word == "scale" else "shape" if word == "shape" else "packed"


def form_of(scale: StoredTensor) -> PackedForm:
    """The packed form that a stored tensor of block scales belongs to."""
    kinds: dict[str, PackedKind] = {"mxfp4": "mxfp4", "fp8": "fp8", "int4": "int4"}
    return PackedForm(kinds[scale.transform.partition("_")[0]], scale.block)


def encode_plain(stored: StoredTensor, value: Tensor) -> Tensor:
    """The stored form of a part that is not packed."""
    value = value.to(TORCH_DTYPES[stored.dtype])
    if stored.transform == "pad_tail":
        padded = torch.zeros(stored.shape, dtype=value.dtype)
        padded.view(-1)[: value.numel()] = value.reshape(-1)
        return padded
    return value.reshape(stored.shape)


class StoredFromParts:
    """Gives stored tensors from logical parts; values and scale of one part are encoded once.

    Args:
        arch: the architecture that is written.
        part_for: gives `param[index]`, floating, of shape `Part.shape`.
        params: what is written; None is the inventory.
    """

    def __init__(
        self, arch: ArchSpec, part_for: PartFor, params: Iterable[ParamSpec] | None = None
    ) -> None:
        self._params = {param.name: param for param in params or inventory(arch)}
        self._part_for = part_for
        self._quantization = arch.quantization
        self._last: tuple[tuple[str, tuple[int, ...]], dict[PackedTensor, Tensor]] | None = None

    def __call__(self, stored: StoredTensor) -> Tensor:
        """The stored tensor in its stored dtype and shape."""
        param = self._params[stored.param]
        kind = packed_kind(stored)
        if kind is None:
            return encode_plain(stored, self._part_for(param, stored.index))
        key = (stored.param, stored.index)
        if self._last is None or self._last[0] != key:
            form = written_form(stored, self._quantization)
            self._last = (key, encode_packed(self._part_for(param, stored.index), form))
        return as_stored(self._last[1][kind], stored)


def written_form(stored: StoredTensor, quantization: Quantization | None) -> PackedForm:
    """The form that a packed matrix is written in.

    Args:
        stored: one of its tensors.
        quantization: what the written config declares.
    """
    if stored.transform.startswith("mxfp4"):
        return PackedForm("mxfp4", (1, mxfp4.BLOCK))
    assert quantization is not None, "fp8 and int4 tensors come from a quantised architecture"
    block = next(part.block for part in quantization.parts if part.kind == "scale")
    kind: PackedKind = "fp8" if stored.transform.startswith("fp8") else "int4"
    return PackedForm(kind, block, quantization.power_of_two_scales)


def encode_packed(value: Tensor, form: PackedForm) -> dict[PackedTensor, Tensor]:
    """The stored tensors of a packed matrix [rows, columns], by their kind.

    Values that lie on the grid of the form come back from them unchanged.
    """
    packed, scale = ENCODE(value, form)
    if form.kind != "fp8" or form.power_of_two:
        # The scale of a rounded matrix can be smaller. Taking that one makes a tensor that is
        # loaded and written again keep its bytes.
        rounded = torch.empty(value.shape, dtype=torch.promote_types(value.dtype, torch.float32))
        packed, scale = ENCODE(DECODE(packed, scale, form, rounded), form)
    return {"packed": packed, "scale": scale, "shape": torch.tensor(value.shape)}


def as_stored(tensor: Tensor, stored: StoredTensor) -> Tensor:
    """A tensor of a packed matrix in its stored dtype and shape; bytes are viewed, not changed."""
    dtype = TORCH_DTYPES[stored.dtype]
    same = tensor.dtype is dtype or packed_kind(stored) == "shape"
    return (tensor.to(dtype) if same else tensor.contiguous().view(dtype)).reshape(stored.shape)

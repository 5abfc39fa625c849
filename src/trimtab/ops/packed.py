"""Packed matrices: one entry to the stored forms MXFP4, FP8 and INT4, decoded into a given buffer.

Knows: which implementation decodes or encodes a form here. Does not know: files, experts.
The equations stand in `mxfp4`, `fp8` and `int4`; the native kernels give the same bits in float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.arch.quantization import PackedForm, PackedKind
from trimtab.ops import fp8, int4, mxfp4
from trimtab.ops.checks import check_shape, require
from trimtab.ops.native.library import library, unavailable
from trimtab.ops.registry import Implementation, OpCase, Operator

# Fills `out` [rows, in] from values and scales of one matrix, and returns it.
DecodeOp = Operator[[Tensor, Tensor, PackedForm, Tensor], Tensor]
NATIVE = "packed"
_KINDS: dict[str, PackedKind] = {"mxfp4": "mxfp4", "fp8": "fp8", "int4": "int4"}
SCALE_DTYPES: dict[PackedKind, torch.dtype] = {"mxfp4": torch.uint8, "fp8": torch.float32, "int4": torch.bfloat16}


def decode_reference(values: Tensor, scale: Tensor, form: PackedForm, out: Tensor) -> Tensor:
    """`decode` in plain PyTorch, for any device and dtype."""
    if form.kind == "mxfp4":
        return out.copy_(mxfp4.decode(values, scale, out.dtype))
    if form.kind == "int4":
        return out.copy_(int4.decode(values, scale, out.dtype))
    return out.copy_(fp8.decode(values.view(torch.float8_e4m3fn), scale, form.block, out.dtype))


def encode_reference(matrix: Tensor, form: PackedForm) -> tuple[Tensor, Tensor]:
    """`encode` in plain PyTorch."""
    if form.kind == "mxfp4":
        return mxfp4.encode(matrix)
    if form.kind == "int4":
        return int4.encode(matrix, form.block[1])
    values, scale = fp8.encode(matrix, form.block, power_of_two=form.power_of_two)
    return values.view(torch.uint8), scale


def _decode_native(values: Tensor, scale: Tensor, form: PackedForm, out: Tensor) -> Tensor:
    # The dispatcher costs more than a small expert; only tensors without memory need it.
    decode = _decode if type(out) is Tensor else _decode_op
    decode(values, scale, form.kind, *form.block, out)
    return out


def _encode_native(matrix: Tensor, form: PackedForm) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    matrix = matrix.contiguous()
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scale = torch.empty(rows, columns // form.block[1], dtype=SCALE_DTYPES[form.kind])
    sizes = [rows, columns] if form.kind == "mxfp4" else [rows, columns, form.block[1]]
    _call(f"{form.kind}_encode", (matrix, packed, scale), sizes)
    return packed, scale


def _decode(
    values: Tensor, scale: Tensor, kind: str, height: int, width: int, out: Tensor
) -> None:
    rows, columns = out.shape
    blocks = {"mxfp4": [], "int4": [width], "fp8": [height, width]}[kind]
    _call(f"{kind}_decode", (values, scale, out), [rows, columns, *blocks])


_decode_op = torch.library.custom_op("trimtab::packed_decode", _decode, mutates_args=("out",))


@_decode_op.register_fake
def _(values: Tensor, scale: Tensor, kind: str, height: int, width: int, out: Tensor) -> None:
    del values, scale, kind, height, width, out  # nothing is allocated


def _call(name: str, tensors: tuple[Tensor, ...], sizes: list[int]) -> None:
    function = getattr(library(NATIVE), name)
    function.restype = None
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    function(*pointers, *map(ctypes.c_int64, sizes), ctypes.c_int(torch.get_num_threads()))


def _native_decodes(case: OpCase) -> str | None:
    if case.device != "cpu":
        return "is for the CPU"
    if case.dtype is not torch.float32:
        return f"decodes to float32, not {str(case.dtype).removeprefix('torch.')}"
    if "strided" in case.shapes:
        return "needs contiguous tensors"
    return unavailable(NATIVE)


def _native_encodes(case: OpCase) -> str | None:
    if "fp8" in case.shapes:
        return "FP8 is rounded by PyTorch itself"
    return _native_decodes(case)


def _decode_case(values: Tensor, scale: Tensor, form: PackedForm, out: Tensor) -> OpCase:
    del form
    whole = values.is_contiguous() and scale.is_contiguous() and out.is_contiguous()
    sizes = {"F": out.shape[0], "D": out.shape[1]}
    return OpCase(out.device.type, out.dtype, sizes if whole else {**sizes, "strided": 1})


def _encode_case(matrix: Tensor, form: PackedForm) -> OpCase:
    sizes = {"F": matrix.shape[0], "D": matrix.shape[1]}
    return OpCase(
        matrix.device.type, matrix.dtype, {**sizes, "fp8": 1} if form.kind == "fp8" else sizes
    )


DECODE: DecodeOp = Operator(
    "packed_decode", _decode_case,
    (Implementation("native", _decode_native, _native_decodes),
     Implementation("reference", decode_reference)),
    {"F": 3072, "D": 3584},
)
ENCODE = Operator(
    "packed_encode", _encode_case,
    (Implementation("native", _encode_native, _native_encodes),
     Implementation("reference", encode_reference)),
    {"F": 3072, "D": 3584},
)


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """The packed matrices of all experts of a layer, handed out one at a time.

    Args:
        packed: [E, out, bytes of a row] uint8.
        scale: [E, rows of scales, in / width] uint8, float32 or bfloat16.
        form: how they are packed.
        num_parts: matrices that lie above one another in `out`, such as 2 for gate and up; where a
            scale stands for several rows, it never spans two of them.
        decode: the operator.
    """

    packed: Tensor
    scale: Tensor
    form: PackedForm
    num_parts: int
    decode: DecodeOp = DECODE

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Values and scales."""
        return (self.packed, self.scale)

    @property
    def out_features(self) -> int:
        """Rows of one expert's matrix, all parts together."""
        return self.packed.shape[1]

    @property
    def in_features(self) -> int:
        """Columns of one expert's matrix."""
        return self.packed.shape[2] * self.form.per_byte

    @property
    def key(self) -> str:
        """All but the tensors as a word, for operators that take tensors and plain values only.

        See `from_key`.
        """
        form, ways = self.form, self.decode.implementations
        forced = ways[0].name if len(ways) == 1 else ""
        return f"{form.kind}:{form.block[0]}x{form.block[1]}:{self.num_parts}:{forced}"

    @classmethod
    def from_key(cls, key: str, packed: Tensor, scale: Tensor) -> PackedMatrices:
        """What `key` says of these tensors."""
        kind, block, parts, forced = key.split(":")
        height, width = (int(size) for size in block.split("x"))
        decode = DECODE.force(forced) if forced else DECODE
        return cls(packed, scale, PackedForm(_KINDS[kind], (height, width)), int(parts), decode)

    def check(self, argument: str) -> None:
        """Fail with TT111 unless values and scales have the shapes and dtypes of the form."""
        check_shape(f"{argument}.packed", self.packed, "E out bytes")
        require(
            self.packed.dtype is torch.uint8, f"{argument}.packed", "must be uint8", self.packed.dtype
        )
        experts, rows, columns = self.packed.shape[0], self.out_features, self.in_features
        height, width = self.form.block
        require(
            rows % self.num_parts == 0, f"{argument}.packed",
            f"must have rows of {self.num_parts} equal parts", rows,
        )
        if self.form.kind != "fp8":
            require(columns % width == 0, f"{argument}.packed", f"must have rows of whole {width}", columns)
        of_scale = self.num_parts * -(-rows // self.num_parts // height), -(-columns // width)
        sizes = {"E": experts, "rows": of_scale[0], "columns": of_scale[1]}
        check_shape(f"{argument}.scale", self.scale, "E rows columns", sizes)
        wanted = SCALE_DTYPES[self.form.kind]
        require(
            self.scale.dtype is wanted, f"{argument}.scale", f"must be {wanted}", self.scale.dtype
        )

    def views(self, dtype: torch.dtype) -> None:
        """None: every matrix has to be decoded."""
        del dtype

    def matrix(self, expert: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[out, in] of one expert, decoded into `out` where it is given.

        Args:
            expert: its number.
            dtype: of the result.
            out: [out, in] of that dtype, overwritten; what is returned then is `out`.

        Raises:
            ValueError: `out` has another shape or dtype.
        """
        wanted = (self.out_features, self.in_features)
        packed, scale = self.packed[expert], self.scale[expert]
        if out is None:
            out = torch.empty(wanted, dtype=dtype, device=packed.device)
        elif tuple(out.shape) != wanted or out.dtype is not dtype:
            raise ValueError(f"out ({out.dtype} {list(out.shape)}): must be {dtype} {list(wanted)}")
        if wanted[0] // self.num_parts % self.form.block[0] == 0:
            return self.decode(packed, scale, self.form, out)
        # The last scale of a part stands for fewer rows than the others.
        parts = (tensor.chunk(self.num_parts) for tensor in (packed, scale, out))
        for values, scales, target in zip(*parts, strict=True):
            self.decode(values, scales, self.form, target)
        return out

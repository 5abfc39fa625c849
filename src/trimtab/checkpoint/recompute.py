"""Stored matrices computed anew, a block of rows at a time: decoded, changed, and written again.

Knows: how rows of a stored form are read and encoded, and the error that encoding makes. Does not
know: files, which matrices change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt

import torch
from torch import Tensor

from trimtab.arch.quantization import PackedForm, Quantization
from trimtab.arch.stored import StoredTensor
from trimtab.checkpoint.codec import (
    TORCH_DTYPES,
    PackedTensor,
    Part,
    check_finite,
    encode_packed,
    form_of,
    packed_kind,
    to_bytes,
    to_tensor,
    written_form,
)
from trimtab.checkpoint.copy_plan import PartKey
from trimtab.checkpoint.deltas import Deltas
from trimtab.checkpoint.rewrite import Put
from trimtab.checkpoint.source import Source
from trimtab.ops.packed import DECODE

_ByKind = Mapping[PackedTensor | None, StoredTensor]
# Elements of a block of rows; a few such blocks in float32 exist at a time.
_BLOCK_ELEMENTS = 2**21


@dataclass(slots=True)
class KindError:
    """The error of writing merged values in their stored form, over all matrices of a kind.

    Args:
        kind: parameter name without the layer, such as `mlp.experts.gate_up`.
        form: stored form, such as `MXFP4` or `BF16`.
        count: matrices.
    """

    kind: str
    form: str
    count: int = 0
    largest: float = 0.0
    _error: float = field(default=0.0, repr=False)
    _value: float = field(default=0.0, repr=False)
    _change: float = field(default=0.0, repr=False)

    def add(self, written: Tensor, exact: Tensor, base: Tensor) -> None:
        """Take in some rows.

        Args:
            written: what a reader of the new file sees.
            exact: what it should be.
            base: what it was before.
        """
        error = (written - exact).double()
        self._error += float(error.square().sum())
        self._value += float(exact.double().square().sum())
        self._change += float((exact - base).double().square().sum())
        self.largest = max(self.largest, float(error.abs().max()) if error.numel() else 0.0)

    @property
    def relative_rms(self) -> float:
        """RMS of the error over RMS of the merged values."""
        return sqrt(self._error / self._value) if self._value else 0.0

    @property
    def share_of_change(self) -> float:
        """RMS of the error over RMS of what the adapter changes; 1 means that nothing of it is left."""
        return sqrt(self._error / self._change) if self._change else 0.0

    def as_dict(self) -> dict[str, object]:
        """Plain values for reports and manifests."""
        return {
            "kind": self.kind, "form": self.form, "matrices": self.count,
            "relative_rms": self.relative_rms, "largest": self.largest,
            "share_of_change": self.share_of_change,
        }


class Recompute:
    """Computes parts of a checkpoint and writes them through `Put`.

    Args:
        source: the checkpoint.
        deltas: what is added to which parameter.
        written: the stored tensors that hold each part in the output.
        quantization: what the output's config declares.

    `errors` has an entry per kind of matrix that the deltas changed.
    """

    def __init__(
        self, source: Source, deltas: Deltas,
        written: Mapping[PartKey, Sequence[StoredTensor]], quantization: Quantization | None,
    ) -> None:
        self._source, self._deltas, self._written = source, deltas, written
        self._quantization = quantization
        self.errors: dict[tuple[str, str], KindError] = {}

    def run(self, parts: Iterable[Part], put: Put) -> None:
        """Compute and write all rows of these parts.

        Raises:
            CheckpointError: TT310 for NaN, infinity or a NaN scale in the source.
        """
        for part in parts:
            outputs = {packed_kind(stored): stored for stored in self._written[part.param.name, part.index]}
            form = None
            if None not in outputs:
                form = written_form(outputs["scale"], self._quantization)
            error = self._error_of(part, form, outputs)
            rows, columns = self._matrix(part)
            height = form.block[0] if form is not None else 1
            step = max(1, _BLOCK_ELEMENTS // max(columns, 1))
            step = -(-step // height) * height
            for begin in range(0, rows, step):
                span = slice(begin, min(begin + step, rows))
                base = self._read(part, span, columns)
                exact = self._deltas.applied(part.param.name, part.index, span, base)
                seen = self._write(outputs, form, span, exact, put)
                if error is not None:
                    error.add(seen.to(exact.dtype), exact, base)

    def _matrix(self, part: Part) -> tuple[int, int]:
        """Rows and columns; a plain tensor has those of the file, padding included."""
        if len(part.stored) == 1:
            shape = self._source.entries()[part.stored[0].name].shape
            return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        return part.shape[0], prod(part.shape[1:])

    def _read(self, part: Part, rows: slice, columns: int) -> Tensor:
        """Rows of the base in at least float32."""
        by_kind = {packed_kind(stored): stored for stored in part.stored}
        if None in by_kind:
            values = self._rows(by_kind[None], rows)
            wide = torch.promote_types(values.dtype, torch.float32)
            return values.reshape(rows.stop - rows.start, columns).to(wide)
        form = form_of(by_kind["scale"])
        height = form.block[0]
        scales = slice(rows.start // height, -(-rows.stop // height))
        values = self._rows(by_kind["packed"], rows)
        scale = self._rows(by_kind["scale"], scales)
        out = torch.empty(rows.stop - rows.start, columns, dtype=torch.float32)
        return DECODE(values.view(torch.uint8), scale, form, out)

    def _rows(self, stored: StoredTensor, rows: slice) -> Tensor:
        """Some rows of a stored tensor, checked for NaN and infinity."""
        entry = self._source.entries()[stored.name]
        shape = entry.shape if len(entry.shape) > 1 else (1, *entry.shape)
        row_bytes = entry.num_bytes // max(shape[0], 1)
        count = rows.stop - rows.start
        raw = self._source.read(stored.name, rows.start * row_bytes, count * row_bytes)
        tensor = to_tensor(raw, entry.dtype, (count, *shape[1:]))
        check_finite(tensor, stored, self._source.where)
        return tensor

    def _write(
        self, outputs: _ByKind, form: PackedForm | None, rows: slice,
        exact: Tensor, put: Put,
    ) -> Tensor:
        """Write rows in their output form; returns what a reader will see."""
        if form is None:
            stored = outputs[None]
            value = exact.to(TORCH_DTYPES[stored.dtype])
            put(stored.name, rows.start * exact.shape[1] * value.element_size(), to_bytes(value))
            return value
        tensors = encode_packed(exact, form)
        kinds: tuple[tuple[PackedTensor, int], ...] = (
            ("packed", rows.start), ("scale", rows.start // form.block[0]),
        )
        for kind, begin in kinds:
            tensor = tensors[kind]
            row_bytes = tensor[0].numel() * tensor.element_size()
            put(outputs[kind].name, begin * row_bytes, to_bytes(tensor))
        return DECODE(tensors["packed"], tensors["scale"], form, torch.empty_like(exact))

    def _error_of(
        self, part: Part, form: PackedForm | None, outputs: _ByKind
    ) -> KindError | None:
        if part.param.name not in self._deltas.names:
            return None
        kind = part.param.name.removeprefix(f"layers.{part.param.layer}.").removesuffix(".weight")
        name = outputs[None].dtype if form is None else form.kind.upper()
        error = self.errors.setdefault((kind, name), KindError(kind, name))
        error.count += 1
        return error

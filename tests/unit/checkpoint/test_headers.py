"""A safetensors header is taken only if it describes exactly the file it stands in."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trimtab.checkpoint.headers import read_header, read_header_file
from trimtab.errors import CheckpointError


def _file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _read(raw: bytes) -> dict[str, object]:
    return dict(read_header(lambda offset, n: raw[offset : offset + n], len(raw), "x.safetensors"))


def _tensor(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2, 3, dtype=torch.bfloat16), "a": torch.ones(5), "s": torch.tensor(1)}
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    entries = read_header_file(path)
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == {
        "b": ("BF16", (2, 3)), "a": ("F32", (5,)), "s": ("I64", ())
    }
    raw = path.read_bytes()
    assert raw[entries["a"].begin : entries["a"].end] == tensors["a"].numpy().tobytes()


def test_truncated_file_names_file_and_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(100)}, path)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError) as caught:
        read_header_file(path)
    assert caught.value.code == "TT301"
    for part in ("m.safetensors", "truncated", str(size), str(size - 10)):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"1234", "the file has 4 bytes"),
        (_file({}, length=10**12), "above the limit"),
        (_file({}, length=5000), "header needs 5008 bytes"),
        (_file(b"{nonsense"), "not valid JSON"),
        (_file([]), "must be a JSON object"),
        (_file({"a": {"dtype": "U8"}}), "exactly dtype, shape and data_offsets"),
        (_file({"a": _tensor(0, 1, [1], "F7")}, b"1"), "dtype must be one of"),
        (_file({"a": _tensor(0, 1, [-1])}, b"1"), "shape must be"),
        (_file({"a": _tensor(0, 1, [True])}, b"1"), "shape must be"),
        (_file({"a": _tensor(1, 0, [1])}, b"1"), "begin <= end"),
        (_file({"a": _tensor(0, 3, [2])}, b"123"), "needs 2 bytes"),
        (_file({"a": _tensor(1, 2, [1])}, b"12"), "gaps and overlaps"),
        (_file({"a": _tensor(0, 2, [2]), "b": _tensor(1, 3, [2])}, b"123"), "gaps and overlaps"),
        (_file({"a": _tensor(0, 1, [1])}, b"12"), "too long"),
    ],
)
def test_each_broken_rule_is_named(raw: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        _read(raw)
    assert caught.value.code == "TT301"
    assert "x.safetensors" in str(caught.value)


def test_name_twice_in_one_header() -> None:
    one = json.dumps(_tensor(0, 1, [1]))
    with pytest.raises(CheckpointError) as caught:
        _read(_file(f'{{"a": {one}, "a": {one}}}'.encode(), b"1"))
    assert caught.value.code == "TT308"


def test_empty_tensors_take_no_room() -> None:
    entries = _read(_file({"a": _tensor(0, 0, [0]), "b": _tensor(0, 1, [1])}, b"1"))
    assert list(entries) == ["a", "b"]

"""A checkpoint's tensors are held against the inventory; every deviation is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.checkpoint.tiny import k3_config, linear_config
from trimtab.arch.load import load_arch
from trimtab.arch.maps import stored_tensors
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.structure import compare, require_equal, summarize
from trimtab.errors import CheckpointError

EXPERT = "language_model.model.layers.3.block_sparse_moe.experts.2."
A_LOG = "language_model.model.layers.0.self_attn.A_log"


@pytest.fixture
def arch() -> ArchSpec:
    return load_arch(k3_config(), "test")


@pytest.fixture
def entries(arch: ArchSpec) -> dict[str, TensorEntry]:
    return {s.name: TensorEntry(s.dtype, s.shape, "f", 0, s.num_bytes) for s in stored_tensors(arch)}


def test_exact_checkpoint_has_no_difference(
    arch: ArchSpec, entries: dict[str, TensorEntry]
) -> None:
    assert compare(arch, entries) == []
    require_equal(arch, entries, "here")


def test_missing_expert_is_one_line(arch: ArchSpec, entries: dict[str, TensorEntry]) -> None:
    for name in [n for n in entries if n.startswith(EXPERT)]:
        del entries[name]
    assert {d.kind for d in compare(arch, entries)} == {"missing"}
    with pytest.raises(CheckpointError, match="layers 3: expert 2 missing") as caught:
        require_equal(arch, entries, "here")
    assert caught.value.code == "TT302"


def test_neighbouring_experts_and_whole_layers_are_drawn_together(
    arch: ArchSpec, entries: dict[str, TensorEntry]
) -> None:
    kept = {
        n: e for n, e in entries.items()
        if "layers.1." not in n and not any(f"layers.3.block_sparse_moe.experts.{i}." in n for i in (0, 1, 3))
    }
    lines = summarize(arch, compare(arch, kept))
    assert lines[0].startswith("layers 1: missing entirely")
    assert lines[1:] == ["layers 3: experts 0-1, 3 missing"]


def test_partly_missing_expert_is_named_by_tensor(
    arch: ArchSpec, entries: dict[str, TensorEntry]
) -> None:
    del entries[EXPERT + "w1.weight_scale"]
    (line,) = summarize(arch, compare(arch, entries))
    assert line == f"{EXPERT}w1.weight_scale: missing, expected U8 [32, 1]"


def test_dtype_shape_and_left_over(arch: ArchSpec, entries: dict[str, TensorEntry]) -> None:
    name = "language_model.model.norm.weight"
    entries[name] = replace(entries[name], dtype="F16", shape=(65,))
    entries["strange"] = TensorEntry("BF16", (1,), "f", 0, 2)
    kinds = [(d.kind, d.expected, d.found) for d in compare(arch, entries)]
    assert kinds == [("shape", "[64]", "[65]"), ("dtype", "BF16", "F16"), ("extra", "", "BF16 [1]")]
    with pytest.raises(CheckpointError) as caught:
        require_equal(arch, entries, "here")
    assert caught.value.code == "TT304"


def test_left_over_alone(arch: ArchSpec, entries: dict[str, TensorEntry]) -> None:
    entries["strange"] = TensorEntry("BF16", (1,), "f", 0, 2)
    with pytest.raises(CheckpointError) as caught:
        require_equal(arch, entries, "here")
    assert caught.value.code == "TT303"


@pytest.mark.parametrize(("length", "fits"), [(1, False), (2, True), (128, True), (200, True)])
def test_padded_vector_may_have_any_tail(
    arch: ArchSpec, entries: dict[str, TensorEntry], length: int, fits: bool
) -> None:
    entries[A_LOG] = replace(entries[A_LOG], shape=(length,))
    assert (compare(arch, entries) == []) == fits


def test_message_stops_at_ten(arch: ArchSpec, entries: dict[str, TensorEntry]) -> None:
    changed = {n: replace(e, dtype="I64") for n, e in entries.items()}
    with pytest.raises(CheckpointError, match=rf"and {len(entries) - 10} more"):
        require_equal(arch, changed, "here")


def test_kimi_linear_takes_either_float_form_but_no_other() -> None:
    arch = load_arch(linear_config(), "test")
    stored = stored_tensors(arch)
    table = {s.name: TensorEntry("F32", s.shape, "f", 0, 1) for s in stored}
    assert compare(arch, table) == []
    table = {s.name: TensorEntry("F16", s.shape, "f", 0, 1) for s in stored}
    assert len(compare(arch, table)) == len(stored)

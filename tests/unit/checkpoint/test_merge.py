"""Merging streams: adapted matrices change, all others keep their bytes, and logits agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.checkpoint.test_adapter import random_tensors, targets_of
from tests.unit.checkpoint.tiny import bit_equal, k3_config, linear_config, make
from trimtab.arch.adapter import resolve_targets
from trimtab.arch.load import read_arch
from trimtab.checkpoint.adapter import AdapterFile, AdapterMeta, load_adapter, save_adapter
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.manifest import read_manifest, verify_files
from trimtab.checkpoint.merge import copy_checkpoint
from trimtab.checkpoint.source import open_source
from trimtab.verify.logits import sequence_logits
from trimtab.verify.merged import check_merge


def _adapter(tmp_path: Path, config: dict[str, object], scale: float = 0.1) -> AdapterFile:
    arch = make(tmp_path / "m", config)
    targets = targets_of(arch)
    meta = AdapterMeta(str(tmp_path / "m"))
    save_adapter(tmp_path / "a", arch, targets, random_tensors(targets, scale=scale), meta)
    return load_adapter(tmp_path / "a", arch)


@pytest.mark.parametrize("config", [k3_config(), linear_config()], ids=["k3", "linear"])
@pytest.mark.parametrize("dtype", ["native", "bf16", "fp32"])
def test_merged_logits_equal_base_plus_adapter(
    tmp_path: Path, config: dict[str, object], dtype: str
) -> None:
    adapter = _adapter(tmp_path, config)
    source = open_source(tmp_path / "m")
    copy_checkpoint(source, tmp_path / "out", adapter=adapter, dtype=dtype)  # type: ignore[arg-type]
    verdicts = check_merge(tmp_path / "m", adapter, tmp_path / "out")
    assert len(verdicts) == 2
    assert all(v.passed for v in verdicts), [str(v) for v in verdicts]
    assert all(v.passed for v in verify_files(tmp_path / "out"))
    assert read_arch(tmp_path / "out").dtype == ("F32" if dtype == "fp32" else "BF16")


def test_untouched_tensors_keep_their_bytes(tmp_path: Path) -> None:
    adapter = _adapter(tmp_path, k3_config())
    copied = copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "out", adapter=adapter)
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("m", "out"))
    changed = {n for n in before if not bit_equal(before[n], after[n])}
    assert len(changed) == len(adapter.targets) == copied.tensors.changed
    assert copied.tensors.identical == len(before) - len(changed)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.source_fingerprint == open_source(tmp_path / "m").fingerprint()


def test_skipped_and_doubled_merges_are_caught(tmp_path: Path) -> None:
    adapter = _adapter(tmp_path, k3_config())
    source = open_source(tmp_path / "m")
    copy_checkpoint(source, tmp_path / "plain")
    assert not all(v.passed for v in check_merge(tmp_path / "m", adapter, tmp_path / "plain"))
    copy_checkpoint(source, tmp_path / "once", adapter=adapter)
    copy_checkpoint(open_source(tmp_path / "once"), tmp_path / "twice", adapter=adapter)
    assert not all(v.passed for v in check_merge(tmp_path / "m", adapter, tmp_path / "twice"))


@pytest.mark.parametrize("full", [False, True])
def test_the_check_sees_a_projector_that_was_not_merged(tmp_path: Path, full: bool) -> None:
    arch = make(tmp_path / "m")
    targets = targets_of(arch) if full else list(
        resolve_targets(arch, target_modules=["projector"], rank=4, alpha=8)
    )
    tensors = random_tensors(targets, scale=1e-3 if full else 0.3)
    if full:
        base, _ = load_model(tmp_path / "m")
        for name, value in base.named_parameters():
            if name.startswith("projector."):
                tensors[name] = value.detach().float().flip(0)
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta("m"))
    adapter = load_adapter(tmp_path / "a", arch)
    source = open_source(tmp_path / "m")
    copy_checkpoint(source, tmp_path / "out", adapter=adapter)
    assert all(v.passed for v in check_merge(tmp_path / "m", adapter, tmp_path / "out"))
    copy_checkpoint(source, tmp_path / "plain")
    assert not all(v.passed for v in check_merge(tmp_path / "m", adapter, tmp_path / "plain"))


def test_copy_without_adapter_is_byte_equal(tmp_path: Path) -> None:
    make(tmp_path / "m")
    (tmp_path / "m/tokenizer.json").write_text("{}")
    copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "out")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize("dtype", ["native", "fp32"])
def test_foreign_padding_is_kept(tmp_path: Path, dtype: str) -> None:
    make(tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    name = "language_model.model.layers.0.self_attn.A_log"
    tensors[name] = torch.tensor([0.5, -0.5])
    save_file(tensors, tmp_path / "m/model.safetensors")
    copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "out", dtype=dtype)  # type: ignore[arg-type]
    found = load_file(tmp_path / "out/model.safetensors")[name]
    assert found.tolist() == [0.5, -0.5]


def test_decoded_checkpoint_computes_the_same(tmp_path: Path) -> None:
    arch = make(tmp_path / "m")
    copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "out", dtype="bf16")
    assert "weight_packed" not in " ".join(open_source(tmp_path / "out").entries())
    ids = list(range(arch.vocab_size))[:40]
    one, two = (sequence_logits(load_model(tmp_path / n)[0], ids) for n in ("m", "out"))
    assert torch.equal(one, two)

"""Checkpoints are written in the released format, the same bytes for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoint.tiny import bit_equal, k3_config, linear_config, make
from trimtab.arch.load import load_arch
from trimtab.arch.stored import StoredTensor
from trimtab.checkpoint.codec import StoredFromParts, decode_part, parts
from trimtab.checkpoint.init import random_parts
from trimtab.checkpoint.manifest import verify_files
from trimtab.checkpoint.marker import MARKER_NAME
from trimtab.checkpoint.save import save_checkpoint
from trimtab.checkpoint.source import open_source
from trimtab.checkpoint.structure import require_equal
from trimtab.errors import CheckpointError


@pytest.mark.parametrize("config", [k3_config(), linear_config()], ids=["k3", "linear"])
def test_random_checkpoint_is_what_its_config_says(tmp_path: Path, config: dict[str, object]) -> None:
    arch = make(tmp_path / "m", config)
    source = open_source(tmp_path / "m")
    assert source.config() == config
    require_equal(arch, source.entries(), "m")
    assert all(v.passed for v in verify_files(tmp_path / "m"))
    tensors = load_file(tmp_path / "m/model.safetensors")
    assert len(tensors) == len(source.entries())
    for entry in source.entries().values():
        assert entry.begin % 4 == 0 or entry.dtype != "F32", "F32 data must be aligned"


def test_seed_decides_every_byte(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make(tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b
    assert a != c


def test_part_values_do_not_depend_on_the_rest(tmp_path: Path) -> None:
    config = k3_config()
    small = load_arch(config, "t")
    config["text_config"]["vocab_size"] = 128
    large = load_arch(config, "t")
    one, two = random_parts(small, 5), random_parts(large, 5)
    for part in parts(small)[4:20]:
        assert torch.equal(one(part.param, part.index), two(part.param, part.index))


def test_init_values_are_sane() -> None:
    arch = load_arch(k3_config(), "t")
    value = random_parts(arch, 1)
    by_name = {p.param.name: value(p.param, p.index) for p in parts(arch)}
    step = torch.nn.functional.softplus(by_name["layers.0.self_attn.dt_bias"])
    assert 1e-3 <= float(step.min()) <= float(step.max()) <= 0.1001
    assert torch.equal(by_name["layers.0.self_attn.A_log"], torch.zeros(2))
    assert torch.equal(by_name["norm.weight"], torch.ones(64))
    assert float(by_name["layers.0.self_attn.q_proj.weight"].std()) == pytest.approx(1 / 8, rel=0.05)
    linear = load_arch(linear_config(), "t")
    rates = [random_parts(linear, 1)(p.param, p.index) for p in parts(linear) if p.param.name.endswith("A_log")]
    assert all(float(r.min()) >= 0 and float(r.max()) <= 2.7726 for r in rates)
    assert float(rates[0].std()) > 0


def test_sharded_by_layer_equals_single_file(tmp_path: Path) -> None:
    config = k3_config()
    arch = make(tmp_path / "one", config)
    tensor_for = StoredFromParts(arch, random_parts(arch, 3))
    save_checkpoint(tmp_path / "many", arch, config, tensor_for, single_file_bytes=1)
    source = open_source(tmp_path / "many")
    assert source.files() == tuple(f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6))
    one = open_source(tmp_path / "one")
    assert {n: bytes(one.read(n)) for n in one.entries()} == {
        n: bytes(source.read(n)) for n in source.entries()
    }
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(e.num_bytes for e in one.entries().values())


def test_stored_form_survives_decoding_and_encoding(tmp_path: Path) -> None:
    arch = make(tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    values = {
        (p.param.name, p.index): decode_part(p, lambda s: tensors[s.name]) for p in parts(arch)
    }
    again = StoredFromParts(arch, lambda param, index: values[param.name, index])
    for part in parts(arch):
        for stored in part.stored:
            assert bit_equal(again(stored), tensors[stored.name]), stored.name


def test_crash_half_way_leaves_a_marker_and_the_next_run_succeeds(tmp_path: Path) -> None:
    config = k3_config()
    arch = load_arch(config, "t")
    good = StoredFromParts(arch, random_parts(arch, 3))
    calls = 0

    def crashing(stored: StoredTensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise KeyboardInterrupt
        return good(stored)

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "m", arch, config, crashing)
    assert (tmp_path / "m" / MARKER_NAME).exists()
    assert not (tmp_path / "m/model.safetensors").exists()
    with pytest.raises(CheckpointError, match="TT305"):
        open_source(tmp_path / "m")
    save_checkpoint(tmp_path / "m", arch, config, good)
    require_equal(arch, open_source(tmp_path / "m").entries(), "m")
    assert not list((tmp_path / "m").glob("*.tmp"))


def test_wrong_tensor_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    config = k3_config()
    arch = load_arch(config, "t")
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path / "m", arch, config, lambda s: torch.zeros(s.shape, dtype=torch.float64))
    assert caught.value.code == "TT304"
    assert not (tmp_path / "m").exists()

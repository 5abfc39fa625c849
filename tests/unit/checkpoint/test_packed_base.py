"""Routed experts stay as released: MXFP4, FP8 and INT4 in memory, through load, forward and save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.checkpoint import tiny
from trimtab.arch.load import load_arch
from trimtab.arch.maps import packed_forms, stored_tensors
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.save import save_checkpoint, tensors_from_model
from trimtab.checkpoint.source import open_source
from trimtab.checkpoint.structure import compare
from trimtab.errors import ArchError, CheckpointError
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.packed import PackedWeight


def small(name: str, **text: Any) -> dict[str, Any]:
    config = preset_config(name)
    part = config.get("text_config", config)
    assert isinstance(part, dict)
    part.update(num_hidden_layers=2, n_routed_experts=8, **text)
    return config


CONFIGS: dict[str, dict[str, Any]] = {
    "mxfp4": tiny.k3_config(),
    "fp8": small("deepseek-v3.2-tiny", moe_intermediate_size=130),  # the last block is cut off
    "int4": small("kimi-k2.5-tiny"),
}


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param) / "model"
    config = CONFIGS[request.param]
    init_checkpoint(load_arch(config), config, folder, seed=3)
    return folder


@torch.no_grad()
def logits(model: CausalLM) -> Tensor:
    tokens = torch.arange(12) + 10
    return model.logits(model(tokens, ForwardContext.packed([12])))


def experts(model: CausalLM) -> list[PackedWeight]:
    return [module for module in model.modules() if isinstance(module, PackedWeight)]


def test_the_files_are_as_the_map_says(checkpoint: Path) -> None:
    source = open_source(checkpoint)
    arch = load_arch(source.config())
    assert compare(arch, source.entries()) == []
    assert len(source.entries()) == len(stored_tensors(arch))


def test_native_experts_keep_the_released_bytes_in_memory(checkpoint: Path) -> None:
    model, arch = load_model(checkpoint, base_dtype="native", vision=False)
    forms = packed_forms(arch)
    found = {name for name, m in model.named_modules() if isinstance(m, PackedWeight)}
    assert found == set(forms) and found
    kept = sum(p.numel() * p.element_size() for m in experts(model) for p in m.parameters())
    entries = open_source(checkpoint).entries()
    released = [
        entries[t.name].num_bytes for t in stored_tensors(arch)
        if t.param in forms and not t.transform.endswith("_shape")
    ]
    assert kept == sum(released)


def test_native_experts_compute_what_decoded_ones_do(checkpoint: Path) -> None:
    native, _ = load_model(checkpoint, base_dtype="native", vision=False)
    decoded, _ = load_model(checkpoint, base_dtype="fp32", vision=False)
    assert experts(native) and not experts(decoded)
    assert torch.equal(logits(native), logits(decoded))


@pytest.mark.parametrize("base_dtype", ["native", "fp32"])
def test_a_loaded_model_is_saved_with_the_same_bytes(
    checkpoint: Path, tmp_path: Path, base_dtype: Any
) -> None:
    model, arch = load_model(checkpoint, base_dtype=base_dtype)
    config = open_source(checkpoint).config()
    save_checkpoint(tmp_path / "again", arch, config, tensors_from_model(model, arch))
    first, second = (load_file(p / "model.safetensors") for p in (checkpoint, tmp_path / "again"))
    assert first.keys() == second.keys()
    differing = [name for name in first if not tiny.bit_equal(first[name], second[name])]
    assert differing == []


def test_a_nan_scale_is_refused_with_its_tensor(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = next(n for n in tensors if ".experts." in n and "scale" in n)
    flat = tensors[name].view(-1)
    flat[5 % flat.numel()] = 255 if tensors[name].dtype is torch.uint8 else torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    for base_dtype in ("native", "bf16"):
        with pytest.raises(CheckpointError, match="TT310") as caught:
            load_model(tmp_path, base_dtype=base_dtype)  # type: ignore[arg-type]
        assert caught.value.where.endswith(name)


def test_a_tower_that_is_carried_along_is_no_difference(tmp_path: Path) -> None:
    """Kimi K2.5's tower is kept in the files and read by nothing."""
    config = CONFIGS["int4"] | {"vision_config": {"patch_size": 14}}
    arch = load_arch(config)
    assert any("images" in line for line in arch.unsupported)
    init_checkpoint(arch, config, tmp_path / "model", seed=1)
    tiny.spoil(tmp_path / "model", lambda tensors: tensors.update(
        {"vision_tower.patch_embed.proj.weight": torch.zeros(2, 3), "mm_projector.x": torch.ones(1)}
    ))
    assert compare(arch, open_source(tmp_path / "model").entries()) == []
    tiny.spoil(tmp_path / "model", lambda tensors: tensors.update({"other": torch.ones(1)}))
    (left,) = compare(arch, open_source(tmp_path / "model").entries())
    assert left.kind == "extra" and left.name == "other"


def test_the_sizes_of_an_int4_matrix_may_be_64_bit(tmp_path: Path) -> None:
    config = CONFIGS["int4"]
    arch = tiny.make(tmp_path / "model", json.loads(json.dumps(config)))

    def widen(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("weight_shape")]:
            tensors[name] = tensors[name].long()

    tiny.spoil(tmp_path / "model", widen)
    assert compare(arch, open_source(tmp_path / "model").entries()) == []
    assert experts(load_model(tmp_path / "model", base_dtype="native")[0])


def test_a_group_that_does_not_divide_a_row_is_refused() -> None:
    config = small("kimi-k2.5-tiny", moe_intermediate_size=40)
    with pytest.raises(ArchError, match="group_size") as caught:
        stored_tensors(load_arch(config))
    assert "40 columns" in caught.value.rule

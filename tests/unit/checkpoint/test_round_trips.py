"""Every family and stored form, from files to a model and back: the same names, shapes and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.checkpoint.tiny import bit_equal
from trimtab.arch.load import load_arch
from trimtab.arch.maps import stored_tensors
from trimtab.arch.presets import preset_config, preset_names
from trimtab.checkpoint.init import init_checkpoint
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.save import save_checkpoint, tensors_from_model
from trimtab.checkpoint.source import open_source

TINY = [name for name in preset_names() if name.endswith("-tiny")]


def scramble(root: Path) -> None:
    """Give the packed experts codes and scales that no encoder would choose together."""
    tensors = load_file(root / "model.safetensors")
    draw = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if ".experts." not in name:
            continue
        if tensor.dtype is torch.float8_e4m3fn:
            codes = torch.randint(0, 127, tensor.shape, generator=draw, dtype=torch.uint8)
            tensors[name] = (codes | (codes & 1) << 7).view(torch.float8_e4m3fn)
        elif name.endswith("_packed"):
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=draw, dtype=torch.uint8))
        elif tensor.dtype is torch.uint8:
            tensors[name] = torch.randint(90, 120, tensor.shape, generator=draw, dtype=torch.uint8)
        elif "scale" in name:
            tensors[name] = (torch.rand(tensor.shape, generator=draw) + 0.1).to(tensor.dtype)
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("base_dtype", ["native", "fp32"])
@pytest.mark.parametrize("name", TINY)
def test_what_is_loaded_is_written_with_the_same_bytes(
    tmp_path: Path, name: str, base_dtype: str
) -> None:
    config = preset_config(name)
    arch = load_arch(config)
    init_checkpoint(arch, config, tmp_path / "m", seed=11)
    if base_dtype == "native":
        scramble(tmp_path / "m")
    before: dict[str, Tensor] = load_file(tmp_path / "m" / "model.safetensors")
    assert len(before) == len(stored_tensors(arch)) == len(open_source(tmp_path / "m").entries())
    model, _ = load_model(tmp_path / "m", base_dtype=base_dtype)  # type: ignore[arg-type]
    save_checkpoint(tmp_path / "again", arch, config, tensors_from_model(model, arch))
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert after.keys() == before.keys()
    assert [n for n in before if not bit_equal(before[n], after[n])] == []


def test_every_family_has_a_tiny_preset() -> None:
    families = {load_arch(preset_config(name)).family for name in TINY}
    assert families >= {
        "deepseek_v32", "glm5_next", "glm_moe_dsa", "kimi_k25", "kimi_k3", "kimi_linear",
    }

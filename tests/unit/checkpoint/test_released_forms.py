"""FP8 checkpoints, layers that are skipped, and forms that are only recognised, through the verbs."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracles import random_dsa
from trimtab.arch.load import load_arch, read_arch
from trimtab.arch.params import inventory
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.gguf import read_gguf
from trimtab.checkpoint.init import init_checkpoint, random_parts
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.merge import copy_checkpoint
from trimtab.checkpoint.save import save_checkpoint, tensors_from_model
from trimtab.checkpoint.source import open_source
from trimtab.checkpoint.structure import compare
from trimtab.cli.main import run
from trimtab.errors import ArchError, CheckpointError
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM


def fp8_config(**changes: Any) -> dict[str, Any]:
    config = preset_config("deepseek-v3.2-tiny")
    return config | {"num_hidden_layers": 2, "n_routed_experts": 8} | changes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("fp8") / "model"
    init_checkpoint(load_arch(fp8_config()), fp8_config(), folder, seed=3)
    return folder


@torch.no_grad()
def logits(model: CausalLM) -> Tensor:
    tokens = torch.arange(12)
    return model.logits(model(tokens, ForwardContext.packed([12])))


def test_an_fp8_checkpoint_has_the_released_tensors(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    assert tensors[name].dtype is torch.float8_e4m3fn
    scale = tensors[f"{name}_scale_inv"]
    assert scale.dtype is torch.float32 and scale.shape == (1, 1)
    assert tensors["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16
    powers = torch.cat([t.flatten() for n, t in tensors.items() if n.endswith("_scale_inv")]).log2()
    assert torch.equal(powers, powers.round())
    assert compare(read_arch(checkpoint), open_source(checkpoint).entries()) == []


def test_loading_decodes_every_matrix(checkpoint: Path) -> None:
    model, arch = load_model(checkpoint, base_dtype="fp32")
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.q_b_proj.weight"  # 192 rows: a whole block and half of one
    high, low = tensors[f"{name}_scale_inv"].flatten().tolist()
    rows = torch.tensor([high] * 128 + [low] * 64).unsqueeze(1)
    assert torch.equal(model.layers[0].self_attn.q_b_proj.weight, tensors[name].float() * rows)
    drawn = random_parts(arch, 3)
    for param in inventory(arch):
        if param.owner != "mla" or len(param.shape) != 2:
            continue
        error = model.get_parameter(param.name) - drawn(param, ())
        assert error.abs().max() <= drawn(param, ()).abs().max() * 2.0**-4


def test_a_loaded_model_is_saved_with_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    model, arch = load_model(checkpoint, base_dtype="bf16")
    again = tmp_path / "again"
    save_checkpoint(again, arch, fp8_config(), tensors_from_model(model, arch))
    first, second = (load_file(p / "model.safetensors") for p in (checkpoint, again))
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)), name


def test_a_copy_in_bf16_computes_the_same(checkpoint: Path, tmp_path: Path) -> None:
    copy_checkpoint(open_source(checkpoint), tmp_path / "bf16", dtype="bf16")
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert "quantization_config" not in config
    assert compare(read_arch(tmp_path / "bf16"), open_source(tmp_path / "bf16").entries()) == []
    assert torch.equal(logits(load_model(tmp_path / "bf16")[0]), logits(load_model(checkpoint)[0]))


@pytest.mark.parametrize("what", ["values", "scale"])
def test_nan_in_either_tensor_is_named(checkpoint: Path, tmp_path: Path, what: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    if what == "scale":
        name += "_scale_inv"
        tensors[name][0, 0] = float("nan")
    else:
        tensors[name].view(torch.uint8)[1, 2] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fp8_config()))
    with pytest.raises(CheckpointError, match="TT310") as caught:
        load_model(tmp_path)
    assert caught.value.where.endswith(name)


def write_with_mtp(folder: Path) -> dict[str, Any]:
    """A DeepSeek-V3.2 checkpoint with one multi-token prediction layer."""
    config = random_dsa.tiny_config("deepseek_v32", layers=2, num_nextn_predict_layers=1)
    tensors = random_dsa.random_checkpoint(config, 1, dtype=torch.bfloat16)
    tensors |= random_dsa.mtp_tensors(config, 2)
    random_dsa.save_checkpoint(folder, config, tensors)
    return config


def test_mtp_layers_are_recognised_reported_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    write_with_mtp(folder)
    assert run(["inspect", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [] and found["mtp"]["layers"] == [2]
    skipped = found["weights"]["skipped_tensors"]
    assert skipped == found["mtp"]["num_tensors"]
    assert found["weights"]["num_tensors"] == found["num_tensors"] + skipped
    assert any("layer 2" in line for line in found["unsupported"])
    with_mtp = logits(load_model(folder)[0])
    assert run(["verify", "structure", str(folder)]) == 0
    line = f"layers 2: multi-token prediction, {skipped} tensors, skipped"
    assert line in capsys.readouterr().out
    copy, wide = tmp_path / "copy", tmp_path / "fp32"
    assert run(["export", str(folder), "--to", "hf", "--out", str(copy)]) == 0
    assert f"{found['num_tensors'] + skipped} tensors written" in capsys.readouterr().out
    for name in ("model.safetensors", "config.json"):
        assert (copy / name).read_bytes() == (folder / name).read_bytes()
    # A cast keeps the layers that are not read, and casts them too.
    copy_checkpoint(open_source(folder), wide, dtype="fp32")
    entries = open_source(wide).entries()
    assert {e.dtype for n, e in entries.items() if ".layers.2." in n} == {"F32"}
    assert len(entries) == found["num_tensors"] + skipped
    model, _ = load_model(wide, base_dtype="bf16")
    assert torch.equal(logits(model), with_mtp)


def test_a_layer_beyond_the_announced_ones_is_left_over(tmp_path: Path) -> None:
    config = write_with_mtp(tmp_path)
    arch = load_arch(config | {"num_nextn_predict_layers": 0})
    differences = compare(arch, open_source(tmp_path).entries())
    assert differences and {d.kind for d in differences} == {"extra"}


def test_a_foreign_form_is_shown_and_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = fp8_config(quantization_config={"quant_algo": "NVFP4", "quant_method": "modelopt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quantization"] == "NVFP4" and found["weights"]["bytes"] == 48
    assert found["total_parameters"] > 0 and found["differences"] == []
    ids = tmp_path / "ids.json"
    ids.write_text('{"sequences": [[1, 2, 3]]}')
    out = ["--out", str(tmp_path / "out")]
    for verb in (
        ["verify", "structure"], ["export", "--to", "hf", *out],
        ["verify", "dump", "--input-ids", str(ids), *out],
    ):
        assert run([*verb, str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert "[TT205]" in error and "NVFP4" in error
    with pytest.raises(ArchError, match="TT205"):
        init_checkpoint(load_arch(config), config, tmp_path / "out", seed=0)
    assert not (tmp_path / "out").exists()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path) -> None:
    """Two tensors, Q4_K [512, 2] and F32 [3], and metadata of every shape."""
    words = struct.pack("<IIQ", 9, 8, 3) + text("a") + text("bb") + text("")
    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("deepseek2"),
        text("tokenizer.ggml.tokens") + words,
        text("block_count") + struct.pack("<II", 4, 61),
        text("flag") + struct.pack("<I?", 7, True),
    ]
    tables = [
        text("blk.0.w") + struct.pack("<IQQIQ", 2, 512, 2, 12, 0),
        text("norm") + struct.pack("<IQIQ", 1, 3, 0, 576),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tables), len(pairs))
    path.write_bytes(head + b"".join(pairs) + b"".join(tables) + b"\0" * 600)


def test_gguf_is_shown_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    for target in (file, tmp_path):
        assert run(["inspect", str(target), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["model_type"] == "deepseek2" and found["quantization"] == "GGUF"
        assert (found["total_parameters"], found["num_tensors"]) == (1027, 2)
        assert found["bytes_by_dtype"] == {"Q4_K": 576, "F32": 12}
        assert found["stored_bytes"] == 588
    assert run(["inspect", str(file)]) == 0
    assert "1,027" in (page := capsys.readouterr().out) or "1.03K" in page
    for command in (["verify", "structure", str(file)], ["generate", str(file), "--prompt", "a"]):
        assert run(command) == 2
        assert "[TT205]" in capsys.readouterr().err


def test_a_directory_of_gguf_files_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    with pytest.raises(ArchError, match="GGUF"):
        open_source(tmp_path).entries()


@pytest.mark.parametrize("length", [3, 20, 60, 150])
def test_a_truncated_gguf_header_is_an_error(tmp_path: Path, length: int) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    raw = file.read_bytes()[:length]
    with pytest.raises(CheckpointError, match="TT301"):
        read_gguf(lambda offset, count: raw[offset : offset + count], length, "model.gguf")

"""`trimtab inspect` says what a model is, and every way in which a checkpoint differs from it."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from trimtab.__main__ import main
from trimtab.arch.load import load_arch
from trimtab.arch.maps import stored_tensors
from trimtab.arch.presets import preset_config, preset_names

Specs = dict[str, tuple[str, tuple[int, ...]]]


def write_checkpoint(path: Path, name: str, change: Callable[[Specs], None] | None = None) -> None:
    """A checkpoint of zero bytes with the released names, shapes and dtypes of a preset."""
    path.mkdir()
    config = preset_config(name)
    (path / "config.json").write_text(json.dumps(config))
    specs: Specs = {t.name: (t.dtype, t.shape) for t in stored_tensors(load_arch(config))}
    if change is not None:
        change(specs)
    header: dict[str, Any] = {}
    end = 0
    for tensor, (dtype, shape) in specs.items():
        begin, size = end, {"BF16": 2, "F32": 4, "U8": 1}[dtype]
        for extent in shape:
            size *= extent
        end = begin + size
        header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))


def inspect_json(target: object, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert main(["inspect", str(target), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_json_of_a_config_file_has_the_documented_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "Kimi-K3.json"
    file.write_text(json.dumps(preset_config("kimi-k3")))
    got = inspect_json(file, capsys)
    numbers = {
        "model_type": "kimi_k3",
        "total_parameters": 2779931837184,
        "active_parameters_per_token": 104189614848,
        "num_tensors": 497220,
        "stored_bytes": 1560860324864,
        "bf16_bytes": 5559863674368,
        "kv_bytes_per_token": 27648,
        "state_bytes_per_sequence": 434110464,
    }
    assert {key: got[key] for key in numbers} == numbers
    assert got["layers"][0] == {"index": 0, "mixer": "kda", "indexer": None, "ffn": "dense"}
    assert got["layers"][92] == {"index": 92, "mixer": "mla", "indexer": None, "ffn": "moe"}
    assert isinstance(got["unsupported"], list) and got["differences"] == []


def test_a_sound_checkpoint_has_no_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "sound", "k3.1-tiny")
    got = inspect_json(tmp_path / "sound", capsys)
    assert got["differences"] == []
    assert got["weights"]["num_tensors"] == got["num_tensors"] == 2928
    assert got["weights"]["bytes"] == got["stored_bytes"]


def test_every_difference_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = "language_model.model.layers.3."

    def spoil(specs: Specs) -> None:
        specs[layer + "self_attn.g_proj.weight"] = ("F32", (128, 128))
        specs[layer + "self_attn.o_proj.weight"] = ("BF16", (128, 64))
        specs["language_model.model.rotary.inv_freq"] = ("F32", (8,))
        for matrix in ("w1", "w2", "w3"):
            for kind in ("packed", "scale"):
                del specs[f"{layer}block_sparse_moe.experts.5.{matrix}.weight_{kind}"]

    write_checkpoint(tmp_path / "bad", "k3.1-tiny", spoil)
    got = inspect_json(tmp_path / "bad", capsys, code=1)
    kinds = sorted(item["kind"] for item in got["differences"])
    assert kinds == ["dtype", "extra", *["missing"] * 6, "shape"]
    assert main(["inspect", str(tmp_path / "bad")]) == 1
    page = capsys.readouterr().out
    assert "9 differences" in page and "expert 5 missing" in page and "inv_freq" in page


def test_a_remote_checkpoint_is_read_by_its_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "here", "k3-tiny")
    memory = fsspec.filesystem("memory")
    for file in (tmp_path / "here").iterdir():
        memory.pipe(f"/models/k3-tiny/{file.name}", file.read_bytes())
    got = inspect_json("memory://models/k3-tiny", capsys)
    assert got["weights"]["files"] == 1 and got["differences"] == []
    config_only = inspect_json("memory://models/k3-tiny/config.json", capsys)
    assert config_only["weights"] is None


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_page_reads_well_without_colour(
    name: str, encoding: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with (tmp_path / "page").open("w", encoding=encoding) as out:
        monkeypatch.setattr("sys.stdout", out)
        assert main(["inspect", name]) == 0
    page = (tmp_path / "page").read_text(encoding=encoding)
    assert "\x1b" not in page
    assert max(len(line) for line in page.splitlines()) <= 96
    for words in ("parameters", "Layers", "routed experts", "by dtype", "To run it", "next  "):
        assert words in page


def test_list_names_presets_and_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--list", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert "k3.1-tiny" in known["presets"]
    assert {"deepseek_v32", "glm_moe_dsa", "kimi_k3", "kimi_linear"} <= set(known["families"])
    assert main(["inspect", "--list"]) == 0
    assert "kimi-linear-48b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{", "TT204"),
        ("[]", "TT204"),
        ("{}", "TT202"),
        ('{"model_type": "llamo"}', "TT201"),
        ('{"model_type": "llama"}', "TT202"),
        ('{"model_type": "kimi_k3", "text_config": {"hidden_size": "7168"}}', "TT202"),
    ],
)
def test_a_bad_config_is_an_error_with_exit_code_2(
    content: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    assert main(["inspect", str(file)]) == 2
    got = capsys.readouterr()
    assert got.err.startswith(f"error: [{code}]") and got.out == ""


def test_a_planned_family_is_shown_and_said_to_be_only_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "intermediate_size": 128, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect_json(tmp_path / "config.json", capsys)
    assert found["planned_only"] is True and found["num_tensors"] is None
    assert "only planned" in found["unsupported"][0]
    assert found["layers"][0] == {"index": 0, "mixer": "gqa", "indexer": None, "ffn": "moe"}
    assert main(["inspect", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert "only planned" in page and "next  trimtab plan" in page
    assert main(["inspect", "--list"]) == 0
    assert "mixtral" in capsys.readouterr().out.split("only planned")[1]
    assert inspect_json("k3-tiny", capsys)["planned_only"] is False


def test_weights_of_a_planned_family_are_counted_and_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "m", "k3-tiny")
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 9,
              "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    weights = inspect_json(tmp_path / "m", capsys)["weights"]
    assert weights["compared"] is False and weights["num_tensors"] > 0


@pytest.mark.parametrize("target", ["no-such-preset", "/no/such/dir", "no/such.json", ""])
def test_a_missing_target_is_an_error(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", target]) == 2
    assert "error: [TT" in capsys.readouterr().err


def test_a_hub_id_needs_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["inspect", "owner/name"]) == 2
    err = capsys.readouterr().err
    assert "[TT604] owner/name" in err and "trimtab[hub]" in err


def test_a_directory_with_config_alone_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(preset_config("kimi-linear-tiny")))
    assert inspect_json(tmp_path, capsys)["weights"] is None


def test_a_truncated_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "short", "k3-tiny")
    file = tmp_path / "short" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert main(["inspect", str(tmp_path / "short")]) == 2
    assert "[TT301]" in capsys.readouterr().err

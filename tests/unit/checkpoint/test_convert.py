"""A converted checkpoint holds the same bytes elsewhere: every family, every layout, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.oracles import random_dsa, random_glm5_next
from tests.unit.checkpoint import tiny
from trimtab.arch.load import load_arch, read_arch
from trimtab.arch.presets import preset_config
from trimtab.checkpoint.audit import audit_conversion
from trimtab.checkpoint.convert import BaseDtype, Report, plan_conversion, write_plan
from trimtab.checkpoint.headers import read_header_file
from trimtab.checkpoint.layout import Degrees, Layout, logical_layout, rank_layout
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.manifest import read_manifest, verify_files
from trimtab.checkpoint.merge import copy_checkpoint
from trimtab.checkpoint.output import WORK, open_output
from trimtab.checkpoint.source import open_source
from trimtab.checkpoint.structure import require_equal
from trimtab.errors import CheckpointError, ConfigError

MEMORY = 2**30
DEGREES = Degrees(ep=2, pp=2, tp=2)


def fp8_config() -> dict[str, Any]:
    """DeepSeek-V3.2 whose matrices two shards can share in whole blocks of 128."""
    return preset_config("deepseek-v3.2-tiny") | {
        "num_hidden_layers": 2, "n_routed_experts": 8, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 512, "moe_intermediate_size": 256,
    }


CONFIGS = {
    "k3": tiny.k3_config, "kimi_linear": tiny.linear_config, "glm_moe_dsa": tiny.dsa_config,
    "glm5_next": random_glm5_next.tiny_config, "fp8": fp8_config,
    "int4": lambda: preset_config("kimi-k2.5-tiny"),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    tiny.make(folder, CONFIGS[request.param]())
    return folder


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("k3") / "model"
    tiny.make(folder)
    return folder


def run(
    src: Path, dst: Path, degrees: Degrees | None = None, dtype: BaseDtype = "native", **options: Any
) -> Report:
    source = open_source(src)
    arch = load_arch(source.config())
    layout: Layout = logical_layout(arch) if degrees is None else rank_layout(arch, degrees)
    options.setdefault("memory", MEMORY)
    plan = plan_conversion(source, layout, dtype)
    return write_plan(plan, open_output(dst), **options)


def released(src: Path, dst: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, written again under their released names."""
    copy_checkpoint(open_source(src), dst, **options)
    return load_file(dst / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        tiny.bit_equal(tensor, second[name]) for name, tensor in first.items()
    )


@pytest.mark.parametrize("degrees", [DEGREES, None], ids=["ranks", "logical"])
def test_converting_and_exporting_gives_the_released_bytes_back(
    checkpoint: Path, tmp_path: Path, degrees: Degrees | None
) -> None:
    run(checkpoint, tmp_path / "c", degrees)
    converted = open_source(tmp_path / "c")
    require_equal(read_arch(checkpoint), converted.entries(), "converted")
    assert converted.fingerprint() == open_source(checkpoint).fingerprint()
    assert all(v.passed for v in audit_conversion(open_source(checkpoint), tmp_path / "c"))
    assert all(v.passed for v in verify_files(tmp_path / "c"))
    copy_checkpoint(converted, tmp_path / "back")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (checkpoint / name).read_bytes()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_cast_equals_the_decoded_model(
    checkpoint: Path, tmp_path: Path, dtype: BaseDtype
) -> None:
    run(checkpoint, tmp_path / "c", DEGREES, dtype)
    assert all(v.passed for v in audit_conversion(open_source(checkpoint), tmp_path / "c"))
    directly = released(checkpoint, tmp_path / "direct", dtype=dtype)
    assert same(released(tmp_path / "c", tmp_path / "back"), directly)


def test_a_model_loads_from_any_layout(k3: Path, tmp_path: Path) -> None:
    run(k3, tmp_path / "ranks", DEGREES)
    run(tmp_path / "ranks", tmp_path / "logical")
    first, arch = load_model(k3, base_dtype="native")
    for layout in ("ranks", "logical"):
        second, _ = load_model(tmp_path / layout, base_dtype="native")
        assert same(first.state_dict(), second.state_dict())
    assert arch.layers[0].ffn


def test_padding_that_is_not_zero_survives(k3: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((k3 / "config.json").read_bytes())
    tensors = load_file(k3 / "model.safetensors")
    name = next(name for name in tensors if name.endswith("A_log"))
    assert tensors[name].numel() == 128
    tensors[name][2:] = torch.arange(126.0)
    save_file(tensors, model / "model.safetensors")
    run(model, tmp_path / "c", DEGREES)
    source = open_source(tmp_path / "c")
    assert bytes(source.read(name)) == tensors[name].numpy().tobytes()
    assert bytes(source.read(name, 4, 12)) == tensors[name].numpy().tobytes()[4:16]


def test_what_a_rank_reads_lies_in_its_files(k3: Path, tmp_path: Path) -> None:
    run(k3, tmp_path / "c", DEGREES)
    headers = {
        path.stem: read_header_file(path) for path in (tmp_path / "c").glob("*.safetensors")
    }
    expert = "layers.2.mlp.experts.gate_up.packed"
    assert [name for name, header in headers.items() if expert in header] in (
        ["stage-01.ep-000", "stage-01.ep-001"], ["stage-01.ep-001", "stage-01.ep-000"],
    )
    shapes = {header[expert].shape for header in headers.values() if expert in header}
    arch = read_arch(k3)
    full = load_file(k3 / "model.safetensors")
    assert len(shapes) == 1 and next(iter(shapes))[:2] == (2, 2)
    assert sum(expert in header for header in headers.values()) == 2
    router = [name for name, header in headers.items() if "layers.2.mlp.router.weight" in header]
    assert router == ["stage-01.shared"]
    for stem, header in headers.items():
        first = next(iter(header.values()))
        assert first.begin % 4096 == 0, stem
    o_proj = headers["stage-00.tp-001"]["layers.0.self_attn.o_proj.weight"]
    with (tmp_path / "c" / o_proj.file).open("rb") as handle:
        handle.seek(o_proj.begin)
        raw = handle.read(o_proj.num_bytes)
    name = next(n for n in full if n.endswith("layers.0.self_attn.o_proj.weight"))
    half = full[name].shape[1] // 2
    assert raw == full[name][:, half:].contiguous().view(torch.uint8).numpy().tobytes()
    assert arch.num_layers == 4


def test_several_parts_make_the_same_directory(k3: Path, tmp_path: Path) -> None:
    run(k3, tmp_path / "one", DEGREES)
    reports = [run(k3, tmp_path / "many", DEGREES, part=(n, 3)) for n in (2, 3, 1)]
    assert [report.finished for report in reports] == [False, False, True]
    assert sum(report.files for report in reports) == 10
    assert all(report.files for report in reports)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def files_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_multi_token_prediction_layers_are_kept(tmp_path: Path) -> None:
    config = random_dsa.tiny_config("deepseek_v32", layers=2, num_nextn_predict_layers=1)
    tensors = random_dsa.random_checkpoint(config, 1, dtype=torch.bfloat16)
    extra = random_dsa.mtp_tensors(config, 2)
    random_dsa.save_checkpoint(tmp_path / "m", config, tensors | extra)
    run(tmp_path / "m", tmp_path / "c", DEGREES)
    source = open_source(tmp_path / "c")
    for name, tensor in (tensors | extra).items():
        raw = tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor
        assert bytes(source.read(name)) == raw.numpy().tobytes(), name
    assert all(v.passed for v in audit_conversion(open_source(tmp_path / "m"), tmp_path / "c"))
    run(tmp_path / "m", tmp_path / "bf16", DEGREES, "bf16")
    assert all(v.passed for v in audit_conversion(open_source(tmp_path / "m"), tmp_path / "bf16"))
    assert not read_arch(tmp_path / "bf16").mtp


@pytest.mark.parametrize("dtype", ["native", "bf16"])
@pytest.mark.parametrize("fault", ["a bit", "two experts", "a tensor"])
def test_the_audit_sees_planted_faults(
    k3: Path, tmp_path: Path, fault: str, dtype: BaseDtype
) -> None:
    run(k3, tmp_path / "c", Degrees(), dtype)
    name = "layers.1.mlp.experts.down" + (".packed" if dtype == "native" else "")
    path = next(
        path for path in (tmp_path / "c").glob("*.safetensors") if name in read_header_file(path)
    )
    tensors = load_file(path)
    if fault == "a bit":
        tensors[name].view(torch.uint8)[1, 2, 3] ^= 1
    elif fault == "two experts":
        tensors[name] = tensors[name][[1, 0, 2, 3]].contiguous()
    else:
        tensors["layers.9.left_over"] = tensors[name].clone()
    save_file(tensors, path)
    verdicts = audit_conversion(open_source(k3), tmp_path / "c")
    failed = [verdict for verdict in verdicts if not verdict.passed]
    assert len(failed) == 1
    words = "does not have" if fault == "a tensor" else "differ"
    assert words in failed[0].name
    if fault != "a tensor":
        assert "layers.1.block_sparse_moe.experts" in failed[0].where


@pytest.mark.parametrize(
    ("degrees", "rule"),
    [
        (Degrees(ep=3), "must divide 4 experts"), (Degrees(tp=4), "must divide 2 heads"),
        (Degrees(pp=5), "the model has 4 layers"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(k3: Path, degrees: Degrees, rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule) as caught:
        rank_layout(read_arch(k3), degrees)
    assert caught.value.code == "TT313"


def test_a_cut_through_a_quantised_block_is_refused(tmp_path: Path) -> None:
    config = fp8_config() | {"intermediate_size": 384}
    tiny.make(tmp_path / "m", config)
    source = open_source(tmp_path / "m")
    layout = rank_layout(load_arch(config), Degrees(tp=2))
    with pytest.raises(CheckpointError, match="whole blocks of 128"):
        plan_conversion(source, layout)


def test_stages_balance_bytes_and_keep_selections_together() -> None:
    arch = load_arch(preset_config("glm-5.3"))
    shared = {
        n for n, layer in enumerate(arch.layers)
        if getattr(layer.mixer, "indexer", None) and layer.mixer.indexer.share == "shared"
    }
    layout = rank_layout(arch, Degrees(pp=8))
    begins = [begin for begin, _ in layout.stages]
    assert layout.stages[0][0] == 0 and layout.stages[-1][1] == arch.num_layers
    assert shared and not shared & set(begins)
    lengths = [end - begin for begin, end in layout.stages]
    assert max(lengths) <= 2 * min(lengths)
    with pytest.raises(CheckpointError, match="uses the selection"):
        first = min(shared)
        rank_layout(arch, Degrees(pp=2), [(0, first), (first, arch.num_layers)])


def test_too_little_memory_is_refused_before_anything_is_written(k3: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="for 4 workers"):
        run(k3, tmp_path / "c", DEGREES, memory=2**20)
    assert not (tmp_path / "c").exists()


def test_nothing_of_the_work_is_left_behind(k3: Path, tmp_path: Path) -> None:
    run(k3, tmp_path / "c", DEGREES)
    manifest = read_manifest(tmp_path / "c")
    assert manifest is not None
    assert set(files_of(tmp_path / "c")) == {*manifest.files, "manifest.json"}
    assert not (tmp_path / "c" / WORK).exists()
    assert manifest.source_fingerprint == open_source(k3).fingerprint()
    again = run(k3, tmp_path / "c", DEGREES)
    assert again.finished and again.written == 0
    layout = json.loads((tmp_path / "c" / "layout.json").read_text())
    assert layout["degrees"] == {"ep": 2, "pp": 2, "tp": 2}

"""Loading fills every parameter from the files, exactly, and refuses what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.unit.checkpoint.tiny import bit_equal, k3_config, linear_config, make, spoil
from trimtab.arch.params import inventory
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.merge import copy_checkpoint
from trimtab.checkpoint.save import save_checkpoint, tensors_from_model
from trimtab.checkpoint.source import open_source
from trimtab.errors import ArchError, TrimtabError
from trimtab.models.context import ForwardContext

EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.1."
NORM = "language_model.model.norm.weight"


@pytest.mark.parametrize("base_dtype", ["native", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("config", [k3_config(), linear_config()], ids=["k3", "linear"])
def test_load_then_save_gives_the_same_bytes(
    tmp_path: Path, config: dict[str, object], base_dtype: str
) -> None:
    arch = make(tmp_path / "a", config)
    model, loaded = load_model(tmp_path / "a", base_dtype=base_dtype)  # type: ignore[arg-type]
    assert loaded == arch
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    save_checkpoint(tmp_path / "b", arch, config, tensors_from_model(model, arch))
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in "ab")
    assert one.keys() == two.keys()
    for name in one:
        assert bit_equal(one[name], two[name]), name


def test_stored_dtypes_are_kept_by_policy(tmp_path: Path) -> None:
    make(tmp_path / "m")
    kinds = {}
    for base in ("native", "bf16", "fp32", "fp64"):
        model, _ = load_model(tmp_path / "m", base_dtype=base)  # type: ignore[arg-type]
        named = dict(model.named_parameters())
        experts = [p.dtype for n, p in named.items() if n.startswith("layers.1.mlp.experts.down")]
        kinds[base] = (named["norm.weight"].dtype, named["layers.0.self_attn.A_log"].dtype, experts[0])
    b, f, d, u = torch.bfloat16, torch.float32, torch.float64, torch.uint8
    assert kinds == {"native": (b, f, u), "bf16": (b, f, b), "fp32": (f, f, f), "fp64": (d, d, d)}


def test_native_and_decoded_experts_compute_the_same(tmp_path: Path) -> None:
    arch = make(tmp_path / "m")
    ids = torch.arange(20) % arch.vocab_size
    outputs = []
    for base in ("native", "bf16"):
        model, _ = load_model(tmp_path / "m", base_dtype=base)  # type: ignore[arg-type]
        outputs.append(model.logits(model(ids, ForwardContext.packed([20]))))
    assert bool(torch.isfinite(outputs[0]).all())
    assert float(outputs[0].std()) > 0
    assert torch.equal(outputs[0], outputs[1])


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    make(tmp_path / "m")
    seen: list[tuple[int, int]] = []
    load_model(tmp_path / "m", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_every_text_parameter_is_in_the_inventory(tmp_path: Path) -> None:
    arch = make(tmp_path / "m")
    model, _ = load_model(tmp_path / "m", base_dtype="bf16")
    names = {n.removesuffix(".weight") for n, _ in model.named_parameters()}
    assert names == {spec.name.removesuffix(".weight") for spec in inventory(arch)}


def _drop_expert(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.startswith(EXPERT)]:
        del tensors[name]


def _nan_scale(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT + "w2.weight_scale"][1, 0] = 255


def _infinity(tensors: dict[str, Tensor]) -> None:
    tensors[NORM][7] = float("inf")


def _cast(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] = tensors[NORM].half()


def _extra(tensors: dict[str, Tensor]) -> None:
    tensors["stranger"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (_drop_expert, "TT302", "layers 2: expert 1 missing"),
        (_nan_scale, "TT310", r"w2\.weight_scale.*255 is NaN.*\[1, 0\]"),
        (_infinity, "TT310", r"model\.norm\.weight.*finite.*\[7\]"),
        (_cast, "TT304", "dtype expected BF16, found F16"),
        (_extra, "TT303", "stranger: left over"),
    ],
)
def test_spoiled_checkpoint(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], code: str, says: str
) -> None:
    make(tmp_path / "m")
    spoil(tmp_path / "m", change)
    with pytest.raises(TrimtabError, match=says) as caught:
        load_model(tmp_path / "m", base_dtype="native")
    assert (caught.value.code, caught.value.exit_code) == (code, 2)


def test_truncated_file(tmp_path: Path) -> None:
    make(tmp_path / "m")
    file = tmp_path / "m/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TrimtabError, match="truncated") as caught:
        load_model(tmp_path / "m")
    assert caught.value.code == "TT301"


def test_config_of_the_wrong_type(tmp_path: Path) -> None:
    make(tmp_path / "m")
    config = k3_config()
    config["text_config"]["hidden_size"] = "64"
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(ArchError, match="hidden_size"):
        load_model(tmp_path / "m")


def test_config_of_another_model(tmp_path: Path) -> None:
    make(tmp_path / "m")
    config = k3_config()
    config["text_config"]["vocab_size"] = 97
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(TrimtabError, match=r"shape expected \[97, 64\], found \[96, 64\]"):
        load_model(tmp_path / "m")


def test_vision_tensors_are_copied_byte_for_byte(tmp_path: Path) -> None:
    make(tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    assert any(name.startswith("vision_tower.") for name in tensors)
    copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "copy")
    names = ("m", "copy")
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in names)
    assert one == two

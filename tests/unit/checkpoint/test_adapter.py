"""Adapter directories are complete, finite, fit their base, and are read by peft itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.checkpoint.tiny import k3_config, linear_config, make
from trimtab.arch.adapter import LoRATarget, resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.params import inventory
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.adapter import (
    WEIGHTS_NAME,
    AdapterMeta,
    attach_adapter,
    load_adapter,
    save_adapter,
)
from trimtab.checkpoint.adapter_config import CONFIG_NAME, peft_config
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.manifest import MANIFEST_NAME, verify_files
from trimtab.checkpoint.merge import export_adapter
from trimtab.errors import AdapterError
from trimtab.models.context import ForwardContext
from trimtab.verify.logits import probe_sequences, sequence_logits

LEAVES = ("q_proj", "v_proj", "o_proj", "up_proj")


def targets_of(arch: ArchSpec, leaves: tuple[str, ...] = LEAVES, rank: int = 4) -> list[LoRATarget]:
    """Targets by leaf name, in language-model layers."""
    found = []
    for param in inventory(arch):
        fqn = param.name.removesuffix(".weight")
        if fqn.rpartition(".")[2] in leaves and param.layer is not None:
            out_features, in_features = param.shape
            found.append(
                LoRATarget(fqn, in_features, out_features, rank, 2.0 * rank, 0.05, param.owner, param.layer)
            )
    return found


def random_tensors(targets: list[LoRATarget], seed: int = 0, scale: float = 0.2) -> dict[str, Tensor]:
    """Nonzero A and B for every target."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for t in targets:
        tensors[f"{t.fqn}.lora.A"] = scale * torch.randn(t.rank, t.in_features, generator=draw)
        tensors[f"{t.fqn}.lora.B"] = scale * torch.randn(t.out_features, t.rank, generator=draw)
    return tensors


@pytest.fixture
def arch() -> ArchSpec:
    return load_arch(k3_config(), "t")


def _save(dst: Path, arch: ArchSpec) -> tuple[list[LoRATarget], dict[str, Tensor]]:
    targets = targets_of(arch)
    tensors = random_tensors(targets)
    save_adapter(dst, arch, targets, tensors, AdapterMeta("models/base", "fp", {"step": 7}))
    return targets, tensors


def test_round_trip_is_exact_and_has_a_manifest(tmp_path: Path, arch: ArchSpec) -> None:
    targets, tensors = _save(tmp_path / "a", arch)
    found = load_adapter(tmp_path / "a", arch)
    assert list(found.targets) == targets
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[n], tensors[n]) for n in tensors)
    assert found.manifest is not None
    assert found.manifest.source_fingerprint == "fp"
    assert found.manifest.extra["axis_order"] == {"lora_A": ["rank", "in"], "lora_B": ["out", "rank"]}
    assert found.manifest.extra["step"] == 7
    assert all(v.passed for v in verify_files(tmp_path / "a"))


def test_foreign_adapter_without_manifest_is_read(tmp_path: Path, arch: ArchSpec) -> None:
    targets, _ = _save(tmp_path / "a", arch)
    (tmp_path / "a" / MANIFEST_NAME).unlink()
    half = {n: t.bfloat16() for n, t in load_file(tmp_path / "a" / WEIGHTS_NAME).items()}
    save_file(half, tmp_path / "a" / WEIGHTS_NAME)
    found = load_adapter(tmp_path / "a", arch)
    assert found.manifest is None
    assert len(found.targets) == len(targets)
    assert {t.dtype for t in found.tensors.values()} == {torch.float32}


def test_ranks_may_differ_per_module(tmp_path: Path, arch: ArchSpec) -> None:
    targets = targets_of(arch, ("q_proj",), 4) + targets_of(arch, ("k_proj",), 2)
    config = peft_config(arch, targets, "b")
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert set(config["rank_pattern"].values()) == {2}  # type: ignore[attr-defined]
    tensors = random_tensors(targets)
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta("b"))
    found = load_adapter(tmp_path / "a", arch)
    assert {t.fqn: (t.rank, t.alpha) for t in found.targets} == {t.fqn: (t.rank, t.alpha) for t in targets}


def test_modules_are_named_in_full_where_a_leaf_would_hit_others(arch: ArchSpec) -> None:
    every = targets_of(arch, ("q_proj",))
    assert peft_config(arch, every, "b")["target_modules"] == ["q_proj"]
    (name,) = peft_config(arch, every[:1], "b")["target_modules"]  # type: ignore[misc]
    assert name == "language_model.model.layers.0.self_attn.q_proj"


def test_patterns_are_regular_expressions_as_in_peft(tmp_path: Path, arch: ArchSpec) -> None:
    _save(tmp_path / "a", arch)
    file = tmp_path / "a" / CONFIG_NAME
    config = json.loads(file.read_text())
    for key, value in ((r"layers\.[01]\.self_attn\..*", 3), (r".*\.2\.self_attn\.o_proj", 5.5)):
        config["alpha_pattern"][key] = value
    file.write_text(json.dumps(config))
    (tmp_path / "a" / MANIFEST_NAME).unlink()
    alphas = {t.fqn: t.alpha for t in load_adapter(tmp_path / "a", arch).targets}
    assert {a for n, a in alphas.items() if re.match(r"layers\.[01]\.self_attn", n)} == {3}
    assert alphas["layers.2.self_attn.o_proj"] == 5.5
    assert alphas["layers.2.self_attn.q_proj"] == 8
    file.write_text(json.dumps(config | {"alpha_pattern": {"(": 1}}))
    with pytest.raises(AdapterError, match=r"TT502.*alpha_pattern: cannot be read"):
        load_adapter(tmp_path / "a", arch)


def test_an_adapter_for_engines_has_released_names_one_rank_and_one_scaling(tmp_path: Path) -> None:
    arch = make(tmp_path / "m", linear_config())
    targets = targets_of(arch, ("f_b_proj", "q_proj"), 4) + [
        replace(t, alpha=6.0) for t in targets_of(arch, ("up_proj",), 2)
    ]
    tensors = random_tensors(targets)
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta(str(tmp_path / "m")))
    made = export_adapter(tmp_path / "a", tmp_path / "out", engine="vllm")
    file = load_file(tmp_path / "out" / WEIGHTS_NAME)
    assert made.num_tensors == len(file)
    names = {n.removeprefix("base_model.model.").partition(".lora_")[0] for n in file}
    assert {"model.layers.0.self_attn.f_b_proj", "model.layers.0.mlp.up_proj",
            "model.layers.1.block_sparse_moe.shared_experts.up_proj"} <= names
    config = json.loads((tmp_path / "out" / CONFIG_NAME).read_text())
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert "target_parameters" not in config
    scaling = config["lora_alpha"] / config["r"]
    again = load_adapter(tmp_path / "out", arch)
    for target in targets:
        a, b = (again.tensors[f"{target.fqn}.lora.{side}"] for side in "AB")
        first, second = (tensors[f"{target.fqn}.lora.{side}"] for side in "AB")
        assert torch.allclose(scaling * b @ a, target.scaling * second @ first, atol=1e-6)


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors[next(n for n in tensors if "lora_B" in n)]


def _rename(tensors: dict[str, Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name.replace("base_model.", "")] = tensors.pop(name)


def _nan(tensors: dict[str, Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


def _transpose(tensors: dict[str, Tensor]) -> None:
    name = next(n for n in tensors if "lora_B" in n)
    tensors[name] = tensors[name].T.contiguous()


def _empty(tensors: dict[str, Tensor]) -> None:
    tensors.clear()


def _stranger(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.x.lora_A.weight"] = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_drop, "both lora_A and lora_B"), (_rename, "fit no module"), (_nan, "NaN"),
        (_transpose, "must have shape"), (_empty, "no tensor at all"),
        (_stranger, r"1 of \d+ tensors fit no module: base_model\.model\.x"),
    ],
)
def test_spoiled_tensors(
    tmp_path: Path, arch: ArchSpec, change: Callable[[dict[str, Tensor]], None], says: str
) -> None:
    _save(tmp_path / "a", arch)
    tensors = load_file(tmp_path / "a" / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, tmp_path / "a" / WEIGHTS_NAME)
    with pytest.raises(AdapterError, match=says) as caught:
        load_adapter(tmp_path / "a", arch)
    assert caught.value.code == "TT502"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("peft_type", "IA3", "must be LORA"), ("use_dora", True, "not supported"),
        ("r", 8, "has rank 4"), ("r", "4", "positive number"), ("bias", "all", "must be none"),
        ("modules_to_save", ["lm_head"], "only projector and router"),
    ],
)
def test_spoiled_config(
    tmp_path: Path, arch: ArchSpec, key: str, value: object, says: str
) -> None:
    _save(tmp_path / "a", arch)
    file = tmp_path / "a" / CONFIG_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(AdapterError, match=says):
        load_adapter(tmp_path / "a", arch)


def test_incomplete_or_bad_tensors_are_not_written(tmp_path: Path, arch: ArchSpec) -> None:
    targets = targets_of(arch)
    tensors = random_tensors(targets)
    name = next(iter(tensors))
    for bad in (
        {n: t for n, t in tensors.items() if n != name},
        {**tensors, name: torch.full_like(tensors[name], float("inf"))},
    ):
        with pytest.raises(AdapterError):
            save_adapter(tmp_path / "a", arch, targets, bad, AdapterMeta("b"))
        assert not (tmp_path / "a").exists()


def test_zero_adapter_keeps_base_logits_bit_for_bit(tmp_path: Path) -> None:
    arch = make(tmp_path / "m")
    model, _ = load_model(tmp_path / "m")
    (ids,) = probe_sequences(arch.vocab_size, 1, 24)
    before = sequence_logits(model, ids)
    targets = targets_of(arch)
    tensors = {n: t * (not n.endswith("B")) for n, t in random_tensors(targets).items()}
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta(str(tmp_path / "m")))
    attach_adapter(model, load_adapter(tmp_path / "a", arch))
    assert torch.equal(sequence_logits(model, ids), before)


def _projector(arch: ArchSpec) -> list[LoRATarget]:
    words = ["projector", "q_proj"]
    return list(resolve_targets(arch, target_modules=words, rank=4, alpha=8))


def _router_tensors(arch: ArchSpec) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {p.name: torch.randn(p.shape, generator=draw) * 0.2
            for p in inventory(arch) if p.owner == "router"}


def test_routers_trained_in_full_go_through_modules_to_save(tmp_path: Path) -> None:
    arch = make(tmp_path / "m", linear_config())
    targets = targets_of(arch)
    tensors = {**random_tensors(targets), **_router_tensors(arch)}
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta("models/base"))
    config = json.loads((tmp_path / "a" / CONFIG_NAME).read_text())
    assert config["modules_to_save"] == ["mlp.gate"]
    found = load_adapter(tmp_path / "a", arch)
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[n], tensors[n]) for n in tensors)
    one = next(n for n in tensors if n.endswith("router.weight"))
    with pytest.raises(AdapterError, match=r"missing .*router\.weight"):
        save_adapter(tmp_path / "b", arch, targets, {n: t for n, t in tensors.items() if n != one},
                     AdapterMeta("models/base"))
    file = tmp_path / "a" / WEIGHTS_NAME
    save_file({n: t for n, t in load_file(file).items() if ".gate." not in n}, file)
    with pytest.raises(AdapterError, match=r"missing .*router"):
        load_adapter(tmp_path / "a", arch)


def _full_tensors(arch: ArchSpec) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {
        p.name: torch.randn(p.shape, generator=draw)
        for p in inventory(arch) if p.owner == "projector"
    }


def test_a_projector_adapter_has_released_names(tmp_path: Path, arch: ArchSpec) -> None:
    targets = _projector(arch)
    tensors = random_tensors(targets)
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta("models/base"))
    names = set(load_file(tmp_path / "a" / WEIGHTS_NAME))
    assert "base_model.model.mm_projector.proj.0.lora_A.weight" in names
    config = json.loads((tmp_path / "a" / CONFIG_NAME).read_text())
    # A bare number would also name the tower's blocks and the decoder's layers.
    assert {"mm_projector.proj.0", "mm_projector.proj.2", "q_proj"} == set(config["target_modules"])
    assert config["modules_to_save"] is None
    found = load_adapter(tmp_path / "a", arch)
    assert all(torch.equal(found.tensors[n], tensors[n]) for n in tensors)


def test_a_projector_trained_in_full_goes_through_modules_to_save(
    tmp_path: Path, arch: ArchSpec
) -> None:
    targets = targets_of(arch)
    tensors = {**random_tensors(targets), **_full_tensors(arch)}
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta("models/base"))
    config = json.loads((tmp_path / "a" / CONFIG_NAME).read_text())
    assert config["modules_to_save"] == ["mm_projector"]
    stored = load_file(tmp_path / "a" / WEIGHTS_NAME)
    assert "base_model.model.mm_projector.post_norm.weight" in stored
    found = load_adapter(tmp_path / "a", arch)
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[n], tensors[n]) for n in tensors)
    make(tmp_path / "m", k3_config())
    with pytest.raises(AdapterError, match=r"TT503.*trained in full"):
        export_adapter(tmp_path / "a", tmp_path / "e", str(tmp_path / "m"), engine="vllm")
    model, _ = load_model(tmp_path / "m")
    attach_adapter(model, found)
    assert torch.equal(model.get_parameter("projector.proj.2.weight"),
                       tensors["projector.proj.2.weight"])
    with pytest.raises(AdapterError, match=r"projector\.post_norm\.weight"):
        tensors.pop("projector.post_norm.weight")
        save_adapter(tmp_path / "b", arch, targets, tensors, AdapterMeta("models/base"))


@pytest.mark.parametrize("named", [["lm_head"], ["mm_projector", "lm_head"]])
def test_only_projector_and_routers_can_be_saved_in_full(
    tmp_path: Path, arch: ArchSpec, named: list[str]
) -> None:
    targets = targets_of(arch)
    tensors = {**random_tensors(targets), **_full_tensors(arch)}
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta("models/base"))
    file = tmp_path / "a" / CONFIG_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "modules_to_save": named}))
    with pytest.raises(AdapterError, match="only projector and router can be saved in full"):
        load_adapter(tmp_path / "a", arch)


@pytest.mark.parity
@pytest.mark.parametrize("full", [False, True])
def test_peft_computes_the_same_projector(tmp_path: Path, arch: ArchSpec, full: bool) -> None:
    pytest.importorskip("peft")
    make(tmp_path / "m", k3_config())
    targets = targets_of(arch, ("q_proj",)) if full else _projector(arch)
    tensors = random_tensors(targets) | (_full_tensors(arch) if full else {})
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta("models/base"))
    script = Path(__file__).parents[2] / "parity/peft_projector.py"
    command = [sys.executable, str(script), *(str(tmp_path / n) for n in ("m", "a", "out"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "out")["out"]
    model, _ = load_model(tmp_path / "m", base_dtype="fp32")
    assert model.projector is not None
    x = torch.linspace(-1, 1, 5 * 32).view(5, 32)
    with torch.no_grad():
        plain = model.projector(x, ForwardContext.packed([5]))
        attach_adapter(model, load_adapter(tmp_path / "a", arch))
        ours = model.projector(x, ForwardContext.packed([5]))
    scale = float(ours.abs().max())
    assert float((plain - ours).abs().max()) > 0.01 * scale, "the adapter must matter"
    assert float((theirs - ours).abs().max()) <= 5e-6 * scale

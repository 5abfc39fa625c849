"""Adapters of routed experts in files: declared axes, complete, and read by peft itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.checkpoint.tiny import dsa_config, k3_config, linear_config, make
from trimtab.arch.adapter import LoRATarget, resolve_targets
from trimtab.arch.load import load_arch
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.adapter import (
    WEIGHTS_NAME,
    AdapterMeta,
    load_adapter,
    save_adapter,
)
from trimtab.checkpoint.adapter_config import CONFIG_NAME
from trimtab.checkpoint.expert_adapter import ExpertForm, matrix_factors
from trimtab.checkpoint.manifest import MANIFEST_NAME
from trimtab.checkpoint.merge import copy_checkpoint, export_adapter
from trimtab.checkpoint.source import open_source
from trimtab.errors import AdapterError
from trimtab.models.expert_lora import expert_delta
from trimtab.verify.merged import check_merge

FORMS: tuple[ExpertForm, ...] = ("grouped", "per_expert")
LAYOUTS = ("per_expert", "shared_outer")
EXPERTS, RANK = 4, 8


def square_config() -> dict[str, Any]:
    """Widths for which every axis of A and of B of down has 32 entries: nothing shows in shapes."""
    config = k3_config()
    config["text_config"]["moe_intermediate_size"] = EXPERTS * RANK
    assert config["text_config"]["routed_expert_hidden_size"] == EXPERTS * RANK
    return config


def adapter(
    arch: ArchSpec, layout: str, *, split: bool = False, leaves: tuple[str, ...] = ("o_proj",)
) -> tuple[tuple[LoRATarget, ...], dict[str, Tensor]]:
    """Targets and random tensors."""
    targets = resolve_targets(
        arch, target_modules=leaves, rank=RANK, alpha=2 * RANK, dropout=0.05, experts=layout,  # type: ignore[arg-type]
    )
    if split:
        targets = tuple(
            replace(t, experts=replace(t.experts, split_a=True))
            if t.experts is not None and t.experts.parts == 2 else t
            for t in targets
        )
    draw = torch.Generator().manual_seed(0)
    return targets, {
        f"{t.fqn}.lora.{side}": 0.2 * torch.randn(t.shape(side), generator=draw)
        for t in targets for side in ("A", "B")
    }


def write(
    dst: Path, arch: ArchSpec, layout: str, form: ExpertForm, **kw: Any
) -> tuple[tuple[LoRATarget, ...], dict[str, Tensor]]:
    targets, tensors = adapter(arch, layout, **kw)
    save_adapter(dst, arch, targets, tensors, AdapterMeta("base", expert_form=form))
    return targets, tensors


@pytest.fixture
def arch() -> ArchSpec:
    return load_arch(square_config(), "t")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_written_is_read_bit_for_bit(tmp_path, arch, layout, form):
    targets, tensors = write(tmp_path / "a", arch, layout, form)
    found = load_adapter(tmp_path / "a", arch)
    assert found.targets == targets
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[n], tensors[n]) for n in tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_a_for_gate_and_one_for_up_are_kept_apart(tmp_path, arch, layout):
    targets, tensors = write(tmp_path / "a", arch, layout, "per_expert", split=True)
    found = load_adapter(tmp_path / "a", arch)
    assert found.targets == targets
    assert all(torch.equal(found.tensors[n], tensors[n]) for n in tensors)
    with pytest.raises(AdapterError, match=r"TT502.*gate and up have an A each"):
        write(tmp_path / "b", arch, layout, "grouped", split=True)


def test_the_joined_form_has_pefts_axes(tmp_path, arch):
    _, tensors = write(tmp_path / "a", arch, "per_expert", "grouped")
    file = load_file(tmp_path / "a" / WEIGHTS_NAME)
    at = "base_model.model.language_model.model.layers.1.block_sparse_moe.experts"
    names = {"gate_up": f"{at}.base_layer", "down": at}
    for leaf, module in names.items():
        A, B = (tensors[f"layers.1.mlp.experts.{leaf}.lora.{side}"] for side in "AB")
        a, b = (file[f"{module}.lora_{side}.weight"] for side in "AB")
        for e in range(EXPERTS):
            for r in range(RANK):
                assert torch.equal(a[e * RANK + r], A[e, r])
                assert torch.equal(b[:, r * EXPERTS + e], B[e, ..., r].flatten())
        # The product as peft writes it.
        delta = torch.einsum(
            "o r e, e r i -> e o i", b.reshape(len(b), -1, EXPERTS), a.reshape(EXPERTS, -1, a.shape[1])
        )
        assert torch.allclose(delta, (B @ (A.unsqueeze(1) if B.dim() == 4 else A)).flatten(1, -2), atol=1e-6)
    config = json.loads((tmp_path / "a" / CONFIG_NAME).read_text())
    assert config["target_parameters"] == [
        "block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj",
    ]
    assert config["lora_dropout"] == 0.0  # peft refuses another value for parameters
    assert "o_proj" in config["target_modules"]


def test_one_pair_per_matrix_has_the_released_names(tmp_path, arch):
    _, tensors = write(tmp_path / "a", arch, "shared_outer", "per_expert")
    file = load_file(tmp_path / "a" / WEIGHTS_NAME)
    at = "base_model.model.language_model.model.layers.2.block_sparse_moe.experts.3"
    gate_up, down = (f"layers.2.mlp.experts.{leaf}.lora" for leaf in ("gate_up", "down"))
    for part, leaf in enumerate(("w1", "w3")):
        assert torch.equal(file[f"{at}.{leaf}.lora_A.weight"], tensors[f"{gate_up}.A"])
        assert torch.equal(file[f"{at}.{leaf}.lora_B.weight"], tensors[f"{gate_up}.B"][3, part])
    assert torch.equal(file[f"{at}.w2.lora_A.weight"], tensors[f"{down}.A"][3])
    assert torch.equal(file[f"{at}.w2.lora_B.weight"], tensors[f"{down}.B"])
    config = json.loads((tmp_path / "a" / CONFIG_NAME).read_text())
    assert {"w1", "w2", "w3"} <= set(config["target_modules"])
    assert "target_parameters" not in config


def test_experts_that_share_a_leaf_name_with_others_are_named_below_experts(tmp_path):
    arch = load_arch(dsa_config(), "t")
    write(tmp_path / "a", arch, "per_expert", "per_expert")
    config = json.loads((tmp_path / "a" / CONFIG_NAME).read_text())
    leaves = [f"experts.{leaf}_proj" for leaf in ("gate", "up", "down")]
    assert config["target_modules"] == ["o_proj", *leaves]
    # transformers holds the experts of a layer together, and peft joins the pairs on loading.
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert config["rank_pattern"] == {"model.layers.1.mlp.experts.gate_up_proj": 2 * RANK}


@pytest.mark.parametrize("form", FORMS)
def test_a_foreign_file_is_read_per_expert(tmp_path, arch, form):
    _, tensors = write(tmp_path / "a", arch, "shared_outer", form)
    (tmp_path / "a" / MANIFEST_NAME).unlink()
    found = load_adapter(tmp_path / "a", arch)
    ours, _ = adapter(arch, "shared_outer")
    assert [t.fqn for t in found.targets] == [t.fqn for t in ours]
    for target, shared in zip(found.targets, ours, strict=True):
        axes = target.experts
        if axes is None:
            continue
        assert axes.layout == "per_expert"
        assert axes.split_a == (form == "per_expert" and axes.parts == 2)
        for expert in range(EXPERTS):
            deltas = [
                expert_delta(t.experts, t_tensors[f"{t.fqn}.lora.A"], t_tensors[f"{t.fqn}.lora.B"], 1.0, expert)
                for t, t_tensors in ((target, found.tensors), (shared, tensors))
            ]
            assert torch.equal(*deltas)


def test_the_usual_names_of_single_matrices_are_read_too(tmp_path):
    arch = load_arch(linear_config(), "t")
    write(tmp_path / "a", arch, "per_expert", "per_expert")
    (tmp_path / "a" / MANIFEST_NAME).unlink()
    before = load_adapter(tmp_path / "a", arch)
    renamed = {}
    for name, tensor in load_file(tmp_path / "a" / WEIGHTS_NAME).items():
        for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            name = name.replace(f".{old}.", f".{new}.")
        renamed[name.replace("block_sparse_moe.experts", "mlp.experts")] = tensor
    save_file(renamed, tmp_path / "a" / WEIGHTS_NAME)
    after = load_adapter(tmp_path / "a", arch)
    assert all(torch.equal(after.tensors[n], t) for n, t in before.tensors.items())


def test_modules_that_peft_would_take_for_experts_are_named_as_parameters(tmp_path):
    arch = load_arch(dsa_config(), "t")
    targets = resolve_targets(arch, target_modules=["o_proj", "shared_experts"], rank=4, alpha=8,
                              dropout=0.1)
    first = resolve_targets(arch, target_modules=["layers.0.mlp.up_proj"], rank=2, alpha=8,
                            dropout=0.1)
    targets = first + targets
    draw = torch.Generator().manual_seed(1)
    tensors = {f"{t.fqn}.lora.{s}": torch.randn(t.shape(s), generator=draw) for t in targets for s in "AB"}
    save_adapter(tmp_path / "a", arch, targets, tensors, AdapterMeta("b"))
    config = json.loads((tmp_path / "a" / CONFIG_NAME).read_text())
    assert config["target_modules"] == ["o_proj"]
    assert config["target_parameters"] == [
        "mlp.up_proj.weight",  # the one dense layer has all of these
        *(f"shared_experts.{leaf}.weight" for leaf in ("gate_proj", "up_proj", "down_proj")),
    ]
    assert config["rank_pattern"] == {"model.layers.0.mlp.up_proj.weight": 2}
    assert config["lora_dropout"] == 0.0
    (tmp_path / "a" / MANIFEST_NAME).unlink()  # all of it can be read from PEFT's files alone
    found = load_adapter(tmp_path / "a", arch)
    assert {(t.fqn, t.rank, t.alpha) for t in found.targets} == {(t.fqn, t.rank, t.alpha) for t in targets}
    assert all(torch.equal(found.tensors[n], t) for n, t in tensors.items())


def _swap_axes(tensors: dict[str, Tensor]) -> None:
    name = next(n for n in tensors if n.endswith("experts.lora_B.weight"))
    tensors[name] = tensors[name].unflatten(1, (EXPERTS, RANK)).transpose(1, 2).flatten(1).contiguous()


def _transpose(tensors: dict[str, Tensor]) -> None:
    name = next(n for n in tensors if n.endswith("experts.lora_A.weight"))
    tensors[name] = tensors[name].T.contiguous()


@pytest.mark.parametrize("spoil", [_swap_axes, _transpose])
def test_axes_in_another_order_are_noticed_where_all_sizes_agree(
    tmp_path: Path, arch: ArchSpec, spoil: Callable[[dict[str, Tensor]], None]
) -> None:
    write(tmp_path / "a", arch, "per_expert", "grouped")
    tensors = load_file(tmp_path / "a" / WEIGHTS_NAME)
    shapes = {n: t.shape for n, t in tensors.items()}
    spoil(tensors)
    assert {n: t.shape for n, t in tensors.items()} == shapes
    save_file(tensors, tmp_path / "a" / WEIGHTS_NAME)
    with pytest.raises(AdapterError, match=r"TT502.*experts\.down.*another order"):
        load_adapter(tmp_path / "a", arch)


def test_a_missing_expert_a_left_over_key_and_wrong_ranks_are_refused(tmp_path, arch):
    write(tmp_path / "a", arch, "per_expert", "per_expert")
    whole = load_file(tmp_path / "a" / WEIGHTS_NAME)
    gone = next(n for n in whole if "experts.2.w3.lora_B" in n)
    cases = {
        "expert 2 matrix 1 lora_B: is missing": {n: t for n, t in whole.items() if n != gone},
        "fit no module": whole | {gone.replace("experts.2", "experts.9"): whole[gone].clone()},
        "must have shape": whole | {gone: whole[gone][:, :1].contiguous()},
        "NaN": whole | {gone: whole[gone] * float("nan")},
    }
    for rule, tensors in cases.items():
        save_file(tensors, tmp_path / "a" / WEIGHTS_NAME)
        with pytest.raises(AdapterError, match=rf"TT502.*{rule}"):
            load_adapter(tmp_path / "a", arch)


def test_parameters_that_are_no_experts_are_refused(tmp_path, arch):
    write(tmp_path / "a", arch, "per_expert", "grouped")
    path = tmp_path / "a" / CONFIG_NAME
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"target_parameters": ["self_attn.A_log"]}))
    with pytest.raises(AdapterError, match=r"TT502.*target_parameters \(self_attn\.A_log\)"):
        load_adapter(tmp_path / "a", arch)


def test_ranks_of_experts_may_differ_from_the_others(tmp_path, arch):
    targets, _ = adapter(arch, "per_expert")
    targets = tuple(t if t.experts is None else replace(t, rank=2, alpha=4.0) for t in targets)
    draw = torch.Generator().manual_seed(1)
    tensors = {f"{t.fqn}.lora.{s}": torch.randn(t.shape(s), generator=draw) for t in targets for s in ("A", "B")}
    for form in FORMS:
        save_adapter(tmp_path / form, arch, targets, tensors, AdapterMeta("b", expert_form=form))
        assert load_adapter(tmp_path / form, arch).targets == targets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_single_matrix_has_its_factors(arch, layout):
    targets, tensors = adapter(arch, layout, split=True)
    for target in targets:
        if target.experts is None:
            continue
        a, b = (tensors[f"{target.fqn}.lora.{side}"] for side in "AB")
        whole = expert_delta(target.experts, a, b, 1.0, 3)
        for part in range(target.experts.parts):
            index = (3, part)[: target.experts.parts]
            left, right = matrix_factors(target, tensors, index)
            expected = whole[part] if target.experts.parts == 2 else whole
            assert torch.allclose(right @ left, expected, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_experts_give_the_logits_of_the_adapter(tmp_path, layout):
    arch = make(tmp_path / "m", square_config())
    write(tmp_path / "a", arch, layout, "grouped")
    adapter = load_adapter(tmp_path / "a", arch)
    source = open_source(tmp_path / "m")
    copied = copy_checkpoint(source, tmp_path / "out", adapter=adapter, dtype="fp32")
    assert copied.tensors.changed > len(adapter.targets)  # every expert's matrices
    verdicts = check_merge(tmp_path / "m", adapter, tmp_path / "out")
    assert all(v.passed for v in verdicts), verdicts


def test_an_adapter_is_exported_in_the_form_that_is_asked_for(tmp_path):
    arch = make(tmp_path / "m", square_config())
    targets, tensors = write(tmp_path / "a", arch, "shared_outer", "grouped")
    for form, least in (("per_expert", EXPERTS * 3 * 2), ("grouped", 4)):
        out = tmp_path / f"out-{form}"
        export_adapter(tmp_path / "a", out, str(tmp_path / "m"), engine="vllm" if form == "per_expert" else None)
        experts = [n for n in load_file(out / WEIGHTS_NAME) if ".layers.1." in n and "experts" in n]
        assert len(experts) == least
        again = load_adapter(out, arch)
        assert again.targets == targets
        assert all(torch.equal(again.tensors[n], t) for n, t in tensors.items())

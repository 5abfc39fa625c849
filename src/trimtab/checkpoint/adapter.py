"""Adapter directories in PEFT's format: adapter_config.json, adapter_model.safetensors and a card.

Knows: PEFT's keys and file names, what of PEFT's options is supported, completeness.
Does not know: how an adapter is injected or trained.

A is [rank, in], B is [out, rank]; the manifest declares the axis order. Adapters of routed experts
are written in one of the forms of `expert_adapter`. A projector and routers trained in full are
stored as they are, through PEFT's `modules_to_save` (`whole_modules`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from trimtab.arch.adapter import LoRATarget, Side, expert_axes
from trimtab.arch.maps import module_names
from trimtab.arch.maps.experts import expert_names
from trimtab.arch.params import inventory
from trimtab.arch.spec import ArchSpec
from trimtab.arch.whole import trained_with
from trimtab.checkpoint.adapter_card import CARD_NAME, CardFacts, card
from trimtab.checkpoint.adapter_config import (
    CONFIG_NAME,
    pattern_value,
    peft_config,
    read_config,
)
from trimtab.checkpoint.adapter_probe import check_probe, probe
from trimtab.checkpoint.codec import to_tensor
from trimtab.checkpoint.expert_adapter import (
    AXES,
    ExpertForm,
    ExpertTensors,
    named_parameters,
    stored_experts,
)
from trimtab.checkpoint.manifest import Manifest, inventory_hash, read_manifest, write_artefact
from trimtab.checkpoint.source import open_source
from trimtab.checkpoint.whole_modules import module_words, read_whole, whole_parameters
from trimtab.errors import AdapterError
from trimtab.models.full import train_full
from trimtab.models.lora import inject, trainable_parameters

WEIGHTS_NAME = "adapter_model.safetensors"
AXIS_ORDER = {"lora_A": ["rank", "in"], "lora_B": ["out", "rank"]}

_PREFIX = "base_model.model."
_SIDES: tuple[Side, Side] = ("A", "B")


@dataclass(frozen=True, slots=True)
class AdapterMeta:
    """What an adapter directory says beside its tensors.

    Args:
        base: path or id of the base model.
        base_fingerprint: `Source.fingerprint` of the base, None if not known.
        extra: further facts for the manifest, plain JSON values.
        expert_form: how adapters of routed experts are written.
        facts: for the model card.
    """

    base: str
    base_fingerprint: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    expert_form: ExpertForm = "grouped"
    facts: CardFacts = field(default_factory=CardFacts)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A read adapter.

    Args:
        targets: adapted modules, in inventory order.
        tensors: `{fqn}.lora.A` [rank, in] and `{fqn}.lora.B` [out, rank], float32, behind the axes
            of routed experts, and under their own names the parameters that were trained in full.
        config: adapter_config.json.
        manifest: None for an adapter that Trimtab did not write.
    """

    targets: tuple[LoRATarget, ...]
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    manifest: Manifest | None


def save_adapter(
    dst: str | Path,
    arch: ArchSpec,
    targets: Sequence[LoRATarget],
    tensors: Mapping[str, Tensor],
    meta: AdapterMeta,
) -> int:
    """Write an adapter directory that PEFT loads as it stands, with a model card; its tensor count.

    Args:
        dst: new directory.
        arch: of the base model.
        targets: adapted modules.
        tensors: `{fqn}.lora.A` and `{fqn}.lora.B` of every target, and the parameters of projector
            and routers trained in full, any floating dtype.
        meta: see `AdapterMeta`.

    Raises:
        AdapterError: TT502 if tensors and targets differ or hold NaN or infinity.
        CheckpointError: TT309 if `dst` holds something else.
    """
    full = trained_with(arch, tensors.keys())
    wanted: dict[str, tuple[int, ...]] = {
        f"{t.fqn}.lora.{side}": t.shape(side) for t in targets for side in _SIDES
    }
    wanted |= {param.name: param.shape for param in full}
    _require_same_keys(set(tensors), set(wanted), str(dst))
    values: dict[str, Tensor] = {}
    for key, shape in wanted.items():
        values[key] = tensors[key].detach().to("cpu", torch.float32).contiguous()
        _check(values[key], shape, key)
    stored = {_PREFIX + key: t.contiguous() for key, t in _outside(arch, targets, values, meta)}
    outside = {param.name: path for path, param in whole_parameters(arch).items()}
    stored |= {_PREFIX + outside[param.name]: values[param.name] for param in full}
    config = peft_config(
        arch, targets, meta.base, whole=module_words(arch, full), expert_form=meta.expert_form,
    )
    extra = {
        "axis_order": AXIS_ORDER, "dropout": max((t.dropout for t in targets), default=0.0),
        "num_tensors": len(stored), **_declared(targets, meta.expert_form),
        "probe": probe(targets, values), "card": meta.facts.as_dict(), **meta.extra,
    }
    writing = write_artefact(
        dst, "adapter", source_fingerprint=meta.base_fingerprint,
        inventory_hash=inventory_hash(arch), extra=extra,
    )
    with writing as out:
        out.write(WEIGHTS_NAME, save(stored, metadata={"format": "pt"}))
        out.write(CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())
        text = card(arch, targets, meta.base, meta.base_fingerprint, meta.facts)
        out.write(CARD_NAME, text.encode())
    return len(stored)


def writable_form(targets: Sequence[LoRATarget]) -> ExpertForm:
    """The joined form of experts, or one pair per matrix where gate and up have an A each."""
    split = any(t.experts is not None and t.experts.split_a for t in targets)
    return "per_expert" if split else "grouped"


def _outside(
    arch: ArchSpec, targets: Sequence[LoRATarget], tensors: Mapping[str, Tensor], meta: AdapterMeta
) -> Iterator[tuple[str, Tensor]]:
    """Tensors by PEFT's name, without its prefix."""
    names = module_names(arch, released=meta.expert_form == "per_expert")
    routed = expert_names(arch)
    adapted = {t.fqn for t in targets}
    for t in targets:
        if t.experts is None:
            for side in _SIDES:
                yield f"{names[t.fqn]}.lora_{side}.weight", tensors[f"{t.fqn}.lora.{side}"]
        else:
            both = t.experts.parts == 2 and t.fqn.removesuffix("gate_up") + "down" in adapted
            yield from stored_experts(routed[t.fqn], t, tensors, meta.expert_form, inner=both)


def _declared(targets: Sequence[LoRATarget], form: ExpertForm) -> dict[str, object]:
    """What the manifest says of routed experts."""
    experts = {
        t.fqn: {"layout": t.experts.layout, "split_a": t.experts.split_a}
        for t in targets if t.experts is not None
    }
    if not experts:
        return {}
    return {"expert_form": form, "expert_axis_order": AXES[form], "experts": experts}


def load_adapter(path: str | Path, arch: ArchSpec) -> AdapterFile:
    """Read and check an adapter directory, ours or written by PEFT.

    Args:
        path: directory or fsspec URL with adapter_config.json and adapter_model.safetensors.
        arch: of the base model it is meant for.

    Returns:
        Targets and float32 tensors; every tensor of the file is used.

    Raises:
        AdapterError: TT502 if a key fits no module, A or B is missing, shapes differ, a value is
            NaN or infinite, or the adapter uses an option that is not supported.
        CheckpointError: TT301 damaged file, TT305 unfinished directory, TT307 nothing there.
    """
    source = open_source(path)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not source.has_file(name):
            raise AdapterError("TT502", f"{path}/{name}", "an adapter directory needs this file")
    config = read_config(source.read_file(CONFIG_NAME), f"{path}/{CONFIG_NAME}")
    manifest = None if "://" in str(path) else read_manifest(path)
    modules = {path: fqn for fqn, paths in _module_paths(arch).items() for path in paths}
    full = read_whole(config, arch, f"{path}/{CONFIG_NAME}")
    experts = _expert_tensors(arch, config, f"{path}/{CONFIG_NAME}")
    found: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    left_over: list[str] = []
    for key, entry in source.entries().items():
        module, side = _parse_key(key)
        param = full.get(key.removeprefix(_PREFIX))
        routed = None if side is None else experts.take(module, side)
        if param is None and routed is None and (module not in modules or side is None):
            left_over.append(key)
            continue
        tensor = to_tensor(source.read(key), entry.dtype, entry.shape).to(torch.float32)
        if param is not None:
            _check(tensor, param.shape, f"{path}: {key}")
            whole[param.name] = tensor
        elif routed is not None:
            routed(tensor)
        else:
            assert side is not None, "a key without a side was left over"
            found.setdefault(modules[module], {})[side] = tensor
    if left_over or not (found or experts.grouped or experts.single):
        listed = ", ".join(left_over[:5]) or "no tensor at all"
        rule = f"{len(left_over)} of {len(source.entries())} tensors fit no module: {listed}"
        raise AdapterError("TT502", str(path), rule,
                           hint="check that the adapter was trained on this base model")
    wanted = {param.name for param in trained_with(arch, whole.keys())}
    absent = {p.owner for p in full.values()} - {p.owner for p in full.values() if p.name in whole}
    wanted |= {param.name for param in full.values() if param.owner in absent}
    _require_same_keys(set(whole), wanted, str(path))
    read = _assemble(str(path), arch, config, manifest, found, experts, whole)
    if manifest is not None:
        check_probe(manifest.extra.get("probe"), read.targets, read.tensors, str(path))
    return read


def adapter_base(path: str | Path) -> str:
    """The base model that an adapter directory names.

    Raises:
        AdapterError: TT502 if it names none.
    """
    raw = open_source(path).read_file(CONFIG_NAME)
    base = read_config(raw, f"{path}/{CONFIG_NAME}").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        rule = "base_model_name_or_path must name the base model"
        raise AdapterError("TT502", f"{path}/{CONFIG_NAME}", rule, value=base)
    return base


@torch.no_grad()
def attach_adapter(model: nn.Module, adapter: AdapterFile) -> None:
    """Inject a read adapter into its base model.

    Raises:
        AdapterError: TT502 if a target is not in the model or a tensor is left over.
    """
    inject(model, adapter.targets, seed=0)
    train_full(model, [name for name in adapter.tensors if ".lora." not in name])
    parameters = trainable_parameters(model)
    _require_same_keys(set(adapter.tensors), set(parameters), "adapter")
    for name, parameter in parameters.items():
        parameter.copy_(adapter.tensors[name])


def _assemble(
    path: str,
    arch: ArchSpec,
    config: dict[str, Any],
    manifest: Manifest | None,
    found: dict[str, dict[str, Tensor]],
    experts: ExpertTensors,
    whole: dict[str, Tensor],
) -> AdapterFile:
    paths = _module_paths(arch)
    dropout = float(config.get("lora_dropout") or 0.0)
    if manifest is not None:
        dropout = float(str(manifest.extra.get("dropout", dropout)))
    declared = _read_declared(manifest)
    targets: list[LoRATarget] = []
    tensors: dict[str, Tensor] = {}
    for param in inventory(arch):
        fqn = param.name.removesuffix(".weight")
        if fqn not in found and fqn not in experts.grouped and fqn not in experts.single:
            continue
        if fqn in paths:
            matrices = [(*paths[fqn], *(f"{name}.weight" for name in paths[fqn]))]
        else:
            matrices = experts.matrices(fqn)
        where = f"{path}/{CONFIG_NAME}: {fqn}"
        target = LoRATarget(
            fqn, param.shape[-1], param.shape[-2],
            int(pattern_value(config, "rank_pattern", matrices, where)),
            pattern_value(config, "alpha_pattern", matrices, where), dropout,
            param.owner, param.layer, bool(config.get("use_rslora")), expert_axes(param, "per_expert"),
        )
        if target.experts is None:
            tensors |= _linear_pair(target, found[fqn], path)
        else:
            axes = None if fqn not in declared else replace(target.experts, **declared[fqn])
            target, pair = experts.read(target, path, axes)
            tensors |= pair
        targets.append(target)
    return AdapterFile(tuple(targets), {**tensors, **whole}, config, manifest)


def _linear_pair(target: LoRATarget, sides: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    where = f"{path}: {target.fqn}"
    if set(sides) != {"A", "B"}:
        raise AdapterError("TT502", where, "needs both lora_A and lora_B")
    if sides["A"].shape[0] != target.rank:
        rule = f"lora_A has rank {sides['A'].shape[0]}, {CONFIG_NAME} says {target.rank}"
        raise AdapterError("TT502", where, rule)
    for side in _SIDES:
        _check(sides[side], target.shape(side), f"{where}.lora_{side}")
    return {f"{target.fqn}.lora.{side}": sides[side] for side in _SIDES}


def _expert_tensors(arch: ArchSpec, config: Mapping[str, Any], where: str) -> ExpertTensors:
    """Ready to take every expert tensor that a file of this base may have."""
    names = expert_names(arch)
    counts = {p.name: p.shape[0] for p in inventory(arch) if p.name in names}
    weights = {f"{path}.weight" for paths in _module_paths(arch).values() for path in paths}
    return ExpertTensors(names, counts, named_parameters(config, names, weights, where))


def _module_paths(arch: ArchSpec) -> dict[str, tuple[str, ...]]:
    """Every path that a file may have for our Linear modules, by ours."""
    in_memory, released = module_names(arch), module_names(arch, released=True)
    return {fqn: tuple({path: None, released[fqn]: None}) for fqn, path in in_memory.items()}


def _read_declared(manifest: Manifest | None) -> dict[str, dict[str, Any]]:
    """Layout of the experts by target, as far as a manifest declares it."""
    found = None if manifest is None else manifest.extra.get("experts")
    if not isinstance(found, dict):
        return {}
    return {
        fqn: {"layout": each["layout"], "split_a": bool(each["split_a"])}
        for fqn, each in found.items()
        if isinstance(each, dict) and each.get("layout") in ("per_expert", "shared_outer")
        and isinstance(each.get("split_a"), bool)
    }


def _parse_key(key: str) -> tuple[str, Side | None]:
    """Module path and side (A or B) of a PEFT key; side None if it is not of that form."""
    for side in _SIDES:
        suffix = f".lora_{side}.weight"
        if key.startswith(_PREFIX) and key.endswith(suffix):
            return key.removeprefix(_PREFIX).removesuffix(suffix), side
    return key, None


def _check(tensor: Tensor, shape: tuple[int, ...], where: str) -> None:
    if tuple(tensor.shape) != shape:
        raise AdapterError("TT502", where, f"must have shape {list(shape)}",
                           value=list(tensor.shape))
    if not bool(torch.isfinite(tensor).all()):
        raise AdapterError("TT502", where, "holds NaN or infinity")


def _require_same_keys(found: set[str], wanted: set[str], where: str) -> None:
    if found == wanted:
        return
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    rule = f"missing {missing[:5]}, left over {extra[:5]}"
    raise AdapterError("TT502", where, rule, value=f"{len(missing)} missing, {len(extra)} extra")

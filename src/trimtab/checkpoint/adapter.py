"""Adapter directories in PEFT's format: adapter_config.json and adapter_model.safetensors.

Knows: PEFT's keys and file names, what of PEFT's options is supported, completeness.
Does not know: how an adapter is injected or trained.

A is [rank, in], B is [out, rank]; the manifest declares the axis order. A projector trained in
full is stored as it is, through PEFT's `modules_to_save`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from trimtab.arch.adapter import LoRATarget
from trimtab.arch.maps import module_names, stored_of
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.codec import to_tensor
from trimtab.checkpoint.manifest import Manifest, inventory_hash, read_manifest, write_artefact
from trimtab.checkpoint.source import open_source
from trimtab.errors import AdapterError
from trimtab.models.full import train_full
from trimtab.models.lora import inject, trainable_parameters

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
AXIS_ORDER = {"lora_A": ["rank", "in"], "lora_B": ["out", "rank"]}

_PREFIX = "base_model.model."
_REFUSED_OPTIONS = (
    "use_dora", "target_parameters", "trainable_token_indices", "lora_bias",
    "fan_in_fan_out", "layer_replication", "megatron_config", "alora_invocation_tokens",
)


@dataclass(frozen=True, slots=True)
class AdapterMeta:
    """What an adapter directory says beside its tensors.

    Args:
        base: path or id of the base model.
        base_fingerprint: `Source.fingerprint` of the base, None if not known.
        extra: further facts for the manifest, plain JSON values.
    """

    base: str
    base_fingerprint: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A read adapter.

    Args:
        targets: adapted modules, in inventory order.
        tensors: `{fqn}.lora.A` [rank, in] and `{fqn}.lora.B` [out, rank], float32, and under
            their own names the parameters that were trained in full.
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
) -> None:
    """Write an adapter directory that PEFT loads as it stands.

    Args:
        dst: new directory.
        arch: of the base model.
        targets: adapted modules.
        tensors: `{fqn}.lora.A` and `{fqn}.lora.B` of every target, and the parameters of a
            projector trained in full, any floating dtype.
        meta: see `AdapterMeta`.

    Raises:
        AdapterError: TT502 if tensors and targets differ or hold NaN or infinity.
        CheckpointError: TT309 if `dst` holds something else.
    """
    names = module_names(arch)
    full = _full_parameters(arch) if any(".lora." not in name for name in tensors) else {}
    wanted: dict[str, tuple[int, ...]] = {
        f"{t.fqn}.lora.{side}": _shape(t, side) for t in targets for side in "AB"
    }
    outside = {
        f"{t.fqn}.lora.{side}": f"{names[t.fqn]}.lora_{side}.weight" for t in targets for side in "AB"
    }
    for released, param in full.items():
        wanted[param.name], outside[param.name] = param.shape, released
    _require_same_keys(set(tensors), set(wanted), str(dst))
    stored: dict[str, Tensor] = {}
    for key, shape in wanted.items():
        tensor = tensors[key].detach().to("cpu", torch.float32).contiguous()
        _check(tensor, shape, key)
        stored[f"{_PREFIX}{outside[key]}"] = tensor
    config = peft_config(arch, targets, meta.base, full=bool(full))
    extra = {
        "axis_order": AXIS_ORDER, "dropout": max((t.dropout for t in targets), default=0.0),
        "num_tensors": len(stored), **meta.extra,
    }
    writing = write_artefact(
        dst, "adapter", source_fingerprint=meta.base_fingerprint,
        inventory_hash=inventory_hash(arch), extra=extra,
    )
    with writing as out:
        out.write(WEIGHTS_NAME, save(stored, metadata={"format": "pt"}))
        out.write(CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())


def peft_config(
    arch: ArchSpec, targets: Sequence[LoRATarget], base: str, *, full: bool = False
) -> dict[str, object]:
    """The adapter_config.json of these targets.

    A leaf name stands for its modules if all modules of that name are targets, else each module
    is named in full, so that PEFT adapts exactly these modules.

    Args:
        arch: of the base model.
        targets: modules with A and B.
        base: path or id of the base model.
        full: the projector was trained in full.
    """
    if not targets:
        raise AdapterError("TT502", base, "an adapter needs at least one target")
    names = module_names(arch)
    rank = Counter(t.rank for t in targets).most_common(1)[0][0]
    alpha = Counter(t.alpha for t in targets).most_common(1)[0][0]
    if len({t.use_rslora for t in targets}) > 1:
        raise AdapterError("TT502", base, "use_rslora must be the same for all targets")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": max(t.dropout for t in targets),
        "use_rslora": targets[0].use_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": _target_modules(names, [t.fqn for t in targets]),
        "rank_pattern": {names[t.fqn]: t.rank for t in targets if t.rank != rank},
        "alpha_pattern": {names[t.fqn]: _plain(t.alpha) for t in targets if t.alpha != alpha},
        "modules_to_save": [_projector_name(arch)] if full else None,
    }


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
    config = _read_config(source.read_file(CONFIG_NAME), f"{path}/{CONFIG_NAME}")
    manifest = None if "://" in str(path) else read_manifest(path)
    modules = {peft_name: fqn for fqn, peft_name in module_names(arch).items()}
    full = _read_full(config, arch, f"{path}/{CONFIG_NAME}")
    found: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    left_over: list[str] = []
    for key, entry in source.entries().items():
        module, side = _parse_key(key)
        param = full.get(key.removeprefix(_PREFIX))
        if param is None and (module not in modules or side is None):
            left_over.append(key)
            continue
        tensor = to_tensor(source.read(key), entry.dtype, entry.shape).to(torch.float32)
        if param is not None:
            _check(tensor, param.shape, f"{path}: {key}")
            whole[param.name] = tensor
        else:
            assert side is not None, "a key without a side was left over"
            found.setdefault(modules[module], {})[side] = tensor
    if left_over or not found:
        listed = ", ".join(left_over[:5]) or "no tensor at all"
        rule = f"{len(left_over)} of {len(source.entries())} tensors fit no module: {listed}"
        raise AdapterError("TT502", str(path), rule,
                           hint="check that the adapter was trained on this base model")
    _require_same_keys(set(whole), {param.name for param in full.values()}, str(path))
    return _assemble(str(path), arch, config, manifest, found, whole)


def adapter_base(path: str | Path) -> str:
    """The base model that an adapter directory names.

    Raises:
        AdapterError: TT502 if it names none.
    """
    raw = open_source(path).read_file(CONFIG_NAME)
    base = _read_config(raw, f"{path}/{CONFIG_NAME}").get("base_model_name_or_path")
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
    if any(".lora." not in name for name in adapter.tensors):
        train_full(model, "projector")
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
    whole: dict[str, Tensor],
) -> AdapterFile:
    names = module_names(arch)
    targets: list[LoRATarget] = []
    tensors: dict[str, Tensor] = {}
    for param in inventory(arch):
        fqn = param.name.removesuffix(".weight")
        sides = found.get(fqn)
        if sides is None:
            continue
        if set(sides) != {"A", "B"}:
            raise AdapterError("TT502", f"{path}: {fqn}", "needs both lora_A and lora_B")
        out_features, in_features = param.shape
        rank = sides["A"].shape[0]
        alpha = _pattern(config, "alpha_pattern", names[fqn], config["lora_alpha"])
        declared = _pattern(config, "rank_pattern", names[fqn], config["r"])
        if rank != declared:
            rule = f"lora_A has rank {rank}, {CONFIG_NAME} says {declared}"
            raise AdapterError("TT502", f"{path}: {fqn}", rule)
        target = LoRATarget(
            fqn, in_features, out_features, rank, float(alpha),
            float(config.get("lora_dropout") or 0.0), param.owner, param.layer,
            bool(config.get("use_rslora")),
        )
        for side in "AB":
            _check(sides[side], _shape(target, side), f"{path}: {fqn}.lora_{side}")
            tensors[f"{fqn}.lora.{side}"] = sides[side]
        targets.append(target)
    return AdapterFile(tuple(targets), {**tensors, **whole}, config, manifest)


def _full_parameters(arch: ArchSpec) -> dict[str, ParamSpec]:
    """Parameters of the projector by released name."""
    return {
        stored.name: param
        for param in inventory(arch) if param.owner == "projector"
        for stored in stored_of(arch, param)
    }


def _projector_name(arch: ArchSpec) -> str:
    """Released name of the projector module."""
    released, param = next(iter(_full_parameters(arch).items()))
    return released.removesuffix(param.name.removeprefix("projector"))


def _read_full(config: dict[str, Any], arch: ArchSpec, where: str) -> dict[str, ParamSpec]:
    """The parameters that `modules_to_save` names; only the projector can be among them."""
    named = config.get("modules_to_save")
    if not named:
        return {}
    params = _full_parameters(arch)
    if not params or list(named) != [_projector_name(arch)]:
        rule = "only the projector can be saved in full" if params else "the model has no projector"
        raise AdapterError("TT502", f"{where}: modules_to_save", rule, value=named)
    return params


def _read_config(raw: bytes, where: str) -> dict[str, Any]:
    try:
        config = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AdapterError("TT502", where, f"not valid JSON: {error}") from error
    if not isinstance(config, dict) or str(config.get("peft_type")).upper() != "LORA":
        found = config.get("peft_type") if isinstance(config, dict) else None
        raise AdapterError("TT502", where, "peft_type must be LORA", value=found)
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float) or config[key] <= 0:
            raise AdapterError("TT502", f"{where}: {key}", "must be a positive number",
                               value=config.get(key))
    for option in _REFUSED_OPTIONS:
        if config.get(option):
            raise AdapterError("TT502", f"{where}: {option}", "this PEFT option is not supported",
                               value=config[option])
    if config.get("bias", "none") != "none":
        raise AdapterError("TT502", f"{where}: bias", "must be none", value=config["bias"])
    return config


def _parse_key(key: str) -> tuple[str, str | None]:
    """Module path and side (A or B) of a PEFT key; side None if it is not of that form."""
    for side in "AB":
        suffix = f".lora_{side}.weight"
        if key.startswith(_PREFIX) and key.endswith(suffix):
            return key.removeprefix(_PREFIX).removesuffix(suffix), side
    return key, None


def _pattern(config: dict[str, Any], name: str, module: str, default: float) -> float:
    """PEFT's rule: the first pattern that equals the module path or is a dotted suffix of it."""
    for pattern, value in (config.get(name) or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            return float(value)
    return float(default)


def _target_modules(names: Mapping[str, str], adapted: Sequence[str]) -> list[str]:
    chosen = {names[fqn] for fqn in adapted}
    by_leaf: dict[str, set[str]] = {}
    for path in names.values():
        by_leaf.setdefault(path.rpartition(".")[2], set()).add(path)
    listed: list[str] = []
    for leaf, paths in by_leaf.items():
        # A number as leaf would also fit the blocks of the tower and the decoder's layers.
        whole = paths <= chosen and not leaf.isdigit()
        listed.extend([leaf] if whole else sorted(paths & chosen))
    return listed


def _shape(target: LoRATarget, side: str) -> tuple[int, int]:
    if side == "A":
        return target.rank, target.in_features
    return target.out_features, target.rank


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


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value

"""adapter_config.json: PEFT's options of an adapter, written and read.

Knows: PEFT's keys, which options are supported, how names of modules stand for targets. Does not
know: tensors.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trimtab.arch.adapter import LoRATarget
from trimtab.arch.maps import is_peft_expert, module_names
from trimtab.arch.maps.experts import ExpertNames, expert_names
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.expert_adapter import ExpertForm
from trimtab.errors import AdapterError

CONFIG_NAME = "adapter_config.json"

_REFUSED_OPTIONS = (
    "use_dora", "trainable_token_indices", "lora_bias", "fan_in_fan_out", "layer_replication",
    "megatron_config", "alora_invocation_tokens",
)
# In a path, all experts of a layer: PEFT reads patterns as regular expressions.
_ANY_EXPERT = r"\d+"


def peft_config(
    arch: ArchSpec, targets: Sequence[LoRATarget], base: str, *, whole: Sequence[str] = (),
    expert_form: ExpertForm = "grouped",
) -> dict[str, object]:
    """The adapter_config.json of these targets.

    A leaf name stands for its modules if all modules of that name are targets, else each module
    is named in full, so that PEFT adapts exactly these modules. What cannot stand in
    `target_modules`, experts and modules that PEFT would take for experts, is named as a parameter;
    PEFT has no dropout for parameters, and where there are such targets it is written as 0.

    Args:
        arch: of the base model.
        targets: modules with A and B.
        base: path or id of the base model.
        whole: modules that were trained in full.
        expert_form: how adapters of routed experts are written.
    """
    if not targets:
        raise AdapterError("TT502", base, "an adapter needs at least one target")
    rank = Counter(t.rank for t in targets).most_common(1)[0][0]
    alpha = Counter(t.alpha for t in targets).most_common(1)[0][0]
    if len({t.use_rslora for t in targets}) > 1:
        raise AdapterError("TT502", base, "use_rslora must be the same for all targets")
    names, routed = module_names(arch), expert_names(arch)
    parameters = _parameter_paths(arch, names, routed) if expert_form == "grouped" else {}
    named = [t.fqn for t in targets if t.fqn in parameters]
    paths = {
        t.fqn: (parameters[t.fqn],) if t.fqn in parameters
        else target_paths(t.fqn, names, routed, expert_form)
        for t in targets
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": 0.0 if named else max(t.dropout for t in targets),
        "use_rslora": targets[0].use_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": _target_modules(
            _available(names, routed, expert_form),
            {path for fqn, found in paths.items() if fqn not in parameters for path in found},
        ),
        **({"target_parameters": _shortened(parameters, named)} if named else {}),
        "rank_pattern": {p: t.rank for t in targets if t.rank != rank for p in paths[t.fqn]},
        "alpha_pattern": {
            p: _plain(t.alpha) for t in targets if t.alpha != alpha for p in paths[t.fqn]
        },
        "modules_to_save": list(whole) or None,
    }


def target_paths(
    fqn: str, names: Mapping[str, str], routed: Mapping[str, ExpertNames], form: ExpertForm
) -> tuple[str, ...]:
    """Outside paths of a target: its module, its joined parameter, or its experts' matrices."""
    if fqn in names:
        return (names[fqn],)
    if form == "grouped":
        return (routed[fqn].joined,)
    return tuple(template.format(e=_ANY_EXPERT) for template in routed[fqn].released)


def read_config(raw: bytes, where: str) -> dict[str, Any]:
    """The options of an adapter.

    Raises:
        AdapterError: TT502, not JSON, not LoRA, or an option that is not supported.
    """
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


def pattern_value(config: Mapping[str, Any], name: str, paths: Iterable[str], default: float) -> float:
    """PEFT's rule: the first pattern that equals a path or is a dotted suffix of one."""
    for pattern, value in (config.get(name) or {}).items():
        if any(path == pattern or path.endswith(f".{pattern}") for path in paths):
            return float(value)
    return float(default)


def _available(
    names: Mapping[str, str], routed: Mapping[str, ExpertNames], form: ExpertForm
) -> list[str]:
    """Paths of everything that `target_modules` could name."""
    paths = list(names.values())
    if form == "per_expert":
        paths += [t.format(e=_ANY_EXPERT) for each in routed.values() for t in each.released]
    return paths


def _target_modules(available: Sequence[str], chosen: set[str]) -> list[str] | str:
    """Leaf names and full names; one regular expression where experts cannot be told by a leaf."""
    by_leaf: dict[str, set[str]] = {}
    for path in available:
        by_leaf.setdefault(path.rpartition(".")[2], set()).add(path)
    listed: list[str] = []
    for leaf, paths in by_leaf.items():
        # A number as leaf would also fit the blocks of the tower and the decoder's layers.
        whole = paths <= chosen and not leaf.isdigit()
        listed.extend([leaf] if whole else sorted(paths & chosen))
    if not any(_ANY_EXPERT in entry for entry in listed):
        return listed
    entries = (re.escape(entry).replace(re.escape(_ANY_EXPERT), _ANY_EXPERT) for entry in listed)
    return rf"(.*\.)?({'|'.join(entries)})"


def _parameter_paths(
    arch: ArchSpec, names: Mapping[str, str], routed: Mapping[str, ExpertNames]
) -> dict[str, str]:
    """What `target_modules` cannot name, by ours: joined experts, and modules taken for experts."""
    taken = {fqn: f"{path}.weight" for fqn, path in names.items() if is_peft_expert(arch, path)}
    return taken | {fqn: each.joined for fqn, each in routed.items()}


def _shortened(paths: Mapping[str, str], chosen: Sequence[str]) -> list[str]:
    """Parameters, by their last three names where all that end so are meant."""
    found: dict[str, None] = {}
    for fqn in chosen:
        tail = ".".join(paths[fqn].split(".")[-3:])
        every = {name for name, path in paths.items() if path.endswith(f".{tail}")}
        found[tail if every <= set(chosen) else paths[fqn]] = None
    return list(found)


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value

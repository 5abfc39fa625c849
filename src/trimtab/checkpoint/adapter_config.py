"""adapter_config.json: PEFT's options of an adapter, written and read.

Knows: PEFT's keys, which options are supported. Does not know: tensors, names of modules.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trimtab.arch.adapter import LoRATarget
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.adapter_names import AdapterNames
from trimtab.checkpoint.expert_adapter import ExpertForm
from trimtab.errors import AdapterError

CONFIG_NAME = "adapter_config.json"
_DEFAULTS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}

_REFUSED_OPTIONS = (
    "use_dora", "trainable_token_indices", "lora_bias", "fan_in_fan_out", "layer_replication",
    "megatron_config", "alora_invocation_tokens",
)


def peft_config(
    arch: ArchSpec, targets: Sequence[LoRATarget], base: str, *, whole: Sequence[str] = (),
    expert_form: ExpertForm = "grouped",
) -> dict[str, object]:
    """The adapter_config.json of these targets; what it calls them is said in `adapter_names`.

    PEFT has no dropout for parameters; where there are such targets it is written as 0.

    Args:
        arch: of the base model.
        targets: modules with A and B.
        base: path or id of the base model.
        whole: modules that were trained in full.
        expert_form: how adapters of routed experts are written.
    """
    if not targets:
        raise AdapterError("TT502", base, "an adapter needs at least one target")
    if len({t.use_rslora for t in targets}) > 1:
        raise AdapterError("TT502", base, "use_rslora must be the same for all targets")
    rank = Counter(t.rank for t in targets).most_common(1)[0][0]
    alpha = Counter(t.alpha for t in targets).most_common(1)[0][0]
    names = AdapterNames.of(arch, targets, expert_form)
    parameters = names.target_parameters()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": 0.0 if parameters else max(t.dropout for t in targets),
        "use_rslora": targets[0].use_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": names.target_modules(),
        **({"target_parameters": parameters} if parameters else {}),
        "rank_pattern": {path: r for path, r, _ in names.ranks() if r != rank},
        "alpha_pattern": {path: _plain(a) for path, _, a in names.ranks() if a != alpha},
        "modules_to_save": list(whole) or None,
    }


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


def pattern_value(
    config: Mapping[str, Any], name: str, matrices: Iterable[Sequence[str]], where: str
) -> float:
    """What `rank_pattern` or `alpha_pattern` says of a target, by default `r` or `lora_alpha`.

    Args:
        config: the options.
        name: which pattern.
        matrices: for each matrix of the target the names it goes by.
        where: the target, for errors.

    Raises:
        AdapterError: TT502, a pattern is no regular expression or tells matrices of a target apart.
    """
    default = float(config[_DEFAULTS[name]])
    patterns = config.get(name) or {}
    if not patterns:
        return default
    try:
        compiled = [(re.compile(rf"(.*\.)?({key})$"), float(v)) for key, v in patterns.items()]
    except (re.error, TypeError, ValueError) as error:
        raise AdapterError("TT502", f"{where}: {name}", f"cannot be read: {error}") from error
    values = {
        next((v for pattern, v in compiled if any(map(pattern.match, names))), default)
        for names in matrices
    }
    if len(values) > 1:
        rule = "experts of a layer must have one value"
        raise AdapterError("TT502", f"{where}: {name}", rule, value=sorted(values))
    return values.pop()


def _plain(value: float) -> int | float:
    return int(value) if value == int(value) else value

"""The config of a model with fewer layers and experts.

Knows: which fields of a config count or list layers and experts. Does not know: torch, tensors.

Whatever the fields say, the result is held against the selection: the layers of the small model must
be those of the large one, but for the number of experts.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trimtab.arch.load import load_arch
from trimtab.arch.spec import ArchSpec, LayerSpec, MLASpec, MoESpec
from trimtab.checkpoint.companions import config_without_mtp
from trimtab.errors import ArchError, ConfigError

_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "indexer_types")
_SHARE_RULES = ("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset")
_LAYER = re.compile(r"\blayers\.(\d+)(?=\.|$)")


def sliced_config(
    config: Mapping[str, Any], arch: ArchSpec, layers: Sequence[int], experts: int | None,
    *, vision: bool = True, where: str = "config.json",
) -> tuple[dict[str, Any], ArchSpec]:
    """The config of a part of a model and its architecture.

    Args:
        config: of the whole model.
        arch: what it says.
        layers: layers that are kept, in order.
        experts: routed experts that are kept in each layer, None for all.
        vision: keep tower and projector.
        where: place of the config, for messages.

    Raises:
        ConfigError: TT102 if there are no such layers or experts.
        ArchError: TT202 if the family's config cannot say this selection.
    """
    _check(arch, layers, experts)
    changed = config_without_mtp(copy.deepcopy(dict(config)))
    if not vision:
        changed.pop("vision_config", None)
    nested = changed.get("text_config")
    text = nested if isinstance(nested, dict) else changed
    kept = [arch.layers[layer] for layer in layers]
    _set_layers(text, arch, layers, kept)
    for place in (changed, text):
        _set_modules(place.get("quantization_config"), layers)
    if experts is not None:
        for key in _EXPERT_COUNTS:
            if key in text:
                text[key] = experts
    sliced = load_arch(changed, where)
    wanted = tuple(_with_experts(layer, experts) for layer in kept)
    if sliced.layers != wanted:
        raise ArchError("TT202", where, f"the config of {arch.family} cannot say layers {list(layers)}",
                        hint="choose the first layers of the model")
    return changed, sliced


def kept_experts(spec: MoESpec, experts: int | None) -> list[int]:
    """The experts that are kept: the first ones of each routing group."""
    count = spec.num_experts if experts is None else experts
    size, each = spec.num_experts // spec.groups, count // spec.groups
    return [group * size + number for group in range(spec.groups) for number in range(each)]


def _check(arch: ArchSpec, layers: Sequence[int], experts: int | None) -> None:
    wrong = [layer for layer in layers if not 0 <= layer < arch.num_layers]
    if not layers or wrong or sorted(set(layers)) != list(layers):
        rule = f"must be layers from 0 to {arch.num_layers - 1} in order"
        raise ConfigError("TT102", "--layers", rule, value=wrong or list(layers))
    for layer in layers:
        spec = arch.layers[layer].ffn
        if experts is None or not isinstance(spec, MoESpec):
            continue
        if experts > spec.num_experts or experts % spec.groups:
            rule = f"must be at most {spec.num_experts} and a multiple of {spec.groups} groups"
            raise ConfigError("TT102", "--experts", rule, value=experts)
        if experts // spec.groups * spec.topk_groups < spec.top_k:
            rule = f"must leave the {spec.top_k} experts that a token goes to"
            raise ConfigError("TT102", "--experts", rule, value=experts)


def _with_experts(layer: LayerSpec, experts: int | None) -> LayerSpec:
    if experts is None or not isinstance(layer.ffn, MoESpec):
        return layer
    return replace(layer, ffn=replace(layer.ffn, num_experts=experts))


def _set_layers(
    text: dict[str, Any], arch: ArchSpec, layers: Sequence[int], kept: Sequence[LayerSpec]
) -> None:
    text["num_hidden_layers"] = len(layers)
    for key in _LAYER_LISTS:
        if isinstance(text.get(key), list):
            text[key] = [text[key][layer] for layer in layers]
    if "first_k_dense_replace" in text:
        is_moe = [isinstance(layer.ffn, MoESpec) for layer in kept]
        text["first_k_dense_replace"] = is_moe.index(True) if True in is_moe else len(layers)
    if any(text.get(key) is not None for key in _SHARE_RULES):
        # Rules that count layers say something else of a part of them.
        for key in _SHARE_RULES:
            text.pop(key, None)
        text["indexer_types"] = [
            layer.mixer.indexer.share
            for layer in kept if isinstance(layer.mixer, MLASpec) and layer.mixer.indexer is not None
        ]
    section = text.get("linear_attn_config")
    if isinstance(section, dict):
        _set_lists(section, arch.num_layers, layers)


def _set_lists(section: dict[str, Any], depth: int, layers: Sequence[int]) -> None:
    """Lists of layer numbers, which some families count from 1."""
    lists = [key for key in ("kda_layers", "full_attn_layers") if isinstance(section.get(key), list)]
    named = [number for key in lists for number in section[key]]
    first = 1 if depth in named else 0
    for key in lists:
        section[key] = [
            place + first for place, layer in enumerate(layers) if layer + first in section[key]
        ]


def _set_modules(quantization: object, layers: Sequence[int]) -> None:
    """Lists of modules that stay unquantised name layers by number."""
    if not isinstance(quantization, dict):
        return
    place_of = {layer: place for place, layer in enumerate(layers)}
    for key in ("ignore", "modules_to_not_convert"):
        names = quantization.get(key)
        if not isinstance(names, list):
            continue
        kept = []
        for name in names:
            match = _LAYER.search(str(name))
            if match is None:
                kept.append(name)
            elif int(match[1]) in place_of:
                number = place_of[int(match[1])]
                kept.append(f"{name[: match.start(1)]}{number}{name[match.end(1):]}")
        quantization[key] = kept

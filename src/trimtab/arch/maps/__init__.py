"""One declarative weight map per family: released names <-> our parameters.

Knows: the table of families and the three questions asked of a map: which tensors are stored,
what a module is called outside, whether a tensor found in a file is acceptable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trimtab.arch.maps import deepseek, glm5_next, kimi_k3, kimi_k25, kimi_linear
from trimtab.arch.maps.quantized import PartsOf, parts_of
from trimtab.arch.maps.rules import WeightMap, original, rename, stored_for
from trimtab.arch.params import ParamSpec, inventory, mtp_inventory
from trimtab.arch.quantization import PackedForm, PackedKind
from trimtab.arch.spec import ArchSpec
from trimtab.arch.stored import StoredTensor

WEIGHT_MAPS: dict[str, WeightMap] = {
    "deepseek_v3": deepseek.WITH_MTP_TABLES,
    "deepseek_v32": deepseek.WITH_MTP_TABLES,
    "glm5_next": glm5_next.WEIGHT_MAP,
    "glm_moe_dsa": deepseek.WEIGHT_MAP,
    "kimi_k2": deepseek.WEIGHT_MAP,
    "kimi_k25": kimi_k25.WEIGHT_MAP,
    "kimi_k3": kimi_k3.WEIGHT_MAP,
    "kimi_linear": kimi_linear.WEIGHT_MAP,
}

_FORMS: dict[str, PackedKind] = {
    "mxfp4_packed": "mxfp4", "fp8_values": "fp8", "int4_packed": "int4",
}
# Owners whose matrices are no Linear modules.
_NOT_LINEAR = {"embedding", "residual", "norm", "routed_expert"}


def iter_stored(arch: ArchSpec) -> Iterator[StoredTensor]:
    """Every tensor of the released files, in forward order of the parameters they fill."""
    rules, forms = WEIGHT_MAPS[arch.family].rules, _parts_of(arch)
    for param in inventory(arch):
        yield from stored_for(param, rules, parts_of=forms)


def stored_tensors(arch: ArchSpec) -> tuple[StoredTensor, ...]:
    """Every tensor of the released files (K3: 497,220)."""
    return tuple(iter_stored(arch))


def mtp_tensors(arch: ArchSpec) -> tuple[StoredTensor, ...]:
    """The tensors of multi-token prediction layers, which files may have and no verb reads."""
    rules, forms = WEIGHT_MAPS[arch.family].rules, _parts_of(arch)
    params = mtp_inventory(arch, tables=WEIGHT_MAPS[arch.family].mtp_tables)
    return tuple(
        tensor for param in params for tensor in stored_for(param, rules, parts_of=forms)
    )


def census(arch: ArchSpec, *, mtp: bool = False) -> Iterator[tuple[ParamSpec, StoredTensor, int]]:
    """One stored tensor of each kind with the number of its like, for sums without the full list.

    The experts of a layer differ only in their number, so the first stands for all.

    Args:
        arch: the model.
        mtp: its multi-token prediction layers instead of the rest.
    """
    rules, forms = WEIGHT_MAPS[arch.family].rules, _parts_of(arch)
    tables = WEIGHT_MAPS[arch.family].mtp_tables
    for param in mtp_inventory(arch, tables=tables) if mtp else inventory(arch):
        for tensor in stored_for(param, rules, range(1), forms):
            yield param, tensor, param.shape[0] if tensor.index else 1


def stored_of(
    arch: ArchSpec, param: ParamSpec, experts: range | None = None
) -> tuple[StoredTensor, ...]:
    """The stored tensors that fill one parameter, of a grouped one only these experts."""
    rules = WEIGHT_MAPS[arch.family].rules
    return tuple(stored_for(param, rules, experts, parts_of=_parts_of(arch)))


def packed_forms(arch: ArchSpec) -> dict[str, PackedForm]:
    """The packed form of every parameter of routed experts that is released in one, by name.

    A parameter whose gate and up matrices are stored differently has none.
    """
    rules, parts_for = WEIGHT_MAPS[arch.family].rules, _parts_of(arch)
    found: dict[str, PackedForm] = {}
    for param in inventory(arch):
        if param.owner != "routed_expert":
            continue
        stored = list(stored_for(param, rules, range(1), parts_for))
        forms = {_FORMS[t.transform] for t in stored if t.transform in _FORMS}
        plain = any(t.transform == "same" for t in stored)
        if len(forms) != 1 or plain:
            continue
        block = next(t.block for t in stored if t.transform.endswith("_scale"))
        power = arch.quantization is not None and arch.quantization.power_of_two_scales
        found[param.name] = PackedForm(forms.pop(), block, power)
    return found


def released_owner(arch: ArchSpec, name: str) -> tuple[str, tuple[int, ...]] | None:
    """Parameter name and leading indices that a released name would fill; None if no rule fits."""
    for part in () if arch.quantization is None else arch.quantization.parts:
        if part.suffix != ".weight" and name.endswith(part.suffix):
            name = name.removesuffix(part.suffix) + ".weight"
            break
    return original(name, WEIGHT_MAPS[arch.family].rules)


def _parts_of(arch: ArchSpec) -> PartsOf:
    return parts_of(arch.quantization, WEIGHT_MAPS[arch.family].never_quantised)


def module_names(arch: ArchSpec, *, released: bool = False) -> dict[str, str]:
    """Our Linear modules -> their path in a PEFT directory.

    That path is transformers' in-memory name where it has the family, else the released name.

    Args:
        arch: the model.
        released: the released name in any case, which is what engines read.

    >>> from trimtab.arch.load import load_arch
    >>> from trimtab.arch.presets import preset_config
    >>> names = module_names(load_arch(preset_config("kimi-linear-tiny")))
    >>> names["layers.1.mlp.shared_experts.gate_proj"]
    'model.layers.1.mlp.shared_experts.gate_proj'
    """
    weight_map = WEIGHT_MAPS[arch.family]
    names: dict[str, str] = {}
    for param in inventory(arch):
        module, _, leaf = param.name.rpartition(".")
        if leaf != "weight" or len(param.shape) != 2 or param.owner in _NOT_LINEAR:
            continue
        in_memory = None if released else rename(module, weight_map.module_rules)
        stored = rename(param.name, weight_map.rules)
        if stored is None:
            raise LookupError(f"no rule of the weight map fits {param.name}")
        names[module] = in_memory or stored.removesuffix(".weight")
    return names


def router_names(arch: ArchSpec) -> dict[str, str]:
    """Our routers -> their path in a PEFT directory, named as in `module_names`."""
    weight_map = WEIGHT_MAPS[arch.family]
    names: dict[str, str] = {}
    for param in inventory(arch):
        module, _, leaf = param.name.rpartition(".")
        if param.owner != "router" or leaf != "weight":
            continue
        released = rename(param.name, weight_map.rules)
        if released is None:
            raise LookupError(f"no rule of the weight map fits {param.name}")
        names[module] = rename(module, weight_map.module_rules) or released.removesuffix(".weight")
    return names


def is_carried(arch: ArchSpec, name: str) -> bool:
    """Whether a released tensor belongs to a part that no verb reads and every copy keeps."""
    return name.startswith(WEIGHT_MAPS[arch.family].carried)


def accepted_dtypes(arch: ArchSpec, tensor: StoredTensor) -> tuple[str, ...]:
    """The dtypes a file may have for this tensor, the exact one first."""
    if tensor.transform == "int4_shape":
        return (tensor.dtype, "I64")
    if tensor.dtype not in ("BF16", "F32"):
        return (tensor.dtype,)
    others = WEIGHT_MAPS[arch.family].float_dtypes
    return (tensor.dtype, *(dtype for dtype in others if dtype != tensor.dtype))


def accepts_shape(tensor: StoredTensor, part: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a file may store this tensor in this shape.

    Args:
        tensor: the expected tensor.
        part: shape of the slice of the parameter that it fills.
        shape: the shape found; a padded vector may have any tail, a reshaped one its plain form.
    """
    found = tuple(shape)
    if tensor.transform == "pad_tail":
        return len(found) == 1 and found[0] >= part[0]
    return found == tensor.shape or (tensor.transform == "reshape" and found == tuple(part))

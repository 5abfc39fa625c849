"""The engine of the weight maps: name templates between our parameters and released tensors.

Knows: how a rule expands and how it is undone. Does not know: any family's names.

Templates hold `{i}` (layer), `{e}` (expert) and `{leaf}` (the rest of the name). The first rule
whose parameter template fits decides; rules with the same template together fill one parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab.arch.maps.quantized import PartsOf, plain
from trimtab.arch.params import ParamSpec
from trimtab.arch.quantization import StoredPart
from trimtab.arch.stored import StoredTensor, Transform

Part = Literal["whole", "expert", "gate", "up"]

# A_log is stored in whole blocks of this many entries, the tail zero.
_PAD_BLOCK = 128
_MXFP4_GROUP = 32
_PATTERNS = {"i": r"(?P<i>\d+)", "e": r"(?P<e>\d+)", "leaf": r"(?P<leaf>.+)"}


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a weight map.

    Args:
        param: template of our name.
        stored: template of the released name; experts get `.weight`, or `.weight_packed` and
            `.weight_scale` where they are MXFP4.
        part: which slices of the parameter: all of it, one expert, or one expert's gate or up
            matrix.
        transform: relation of stored elements to the part, for plain parameters.
        stored_shape: shape template for `reshape`, with 0 for the number of elements.
    """

    param: str
    stored: str
    part: Part = "whole"
    transform: Literal["same", "reshape", "pad_tail"] = "same"
    stored_shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightMap:
    """A family's rules.

    Args:
        rules: released names, first fit decides.
        module_rules: module names in PEFT directories where they are not the released ones;
            a name that no rule fits keeps its released form.
        float_dtypes: dtypes accepted for any float tensor beside the one the inventory says;
            empty where the release is exact.
        never_quantised: shell patterns of released module names that quantised releases of the
            family leave as they are.
        mtp_tables: multi-token prediction layers repeat the input table and the head.
        carried: prefixes of released tensors that no verb reads and every copy keeps.
        peft_experts: leaf names that PEFT takes for matrices of routed experts wherever
            `target_modules` has them, so that other modules of these names cannot stand there.
    """

    rules: tuple[Rule, ...]
    module_rules: tuple[Rule, ...] = ()
    float_dtypes: tuple[str, ...] = ()
    never_quantised: tuple[str, ...] = ()
    mtp_tables: bool = False
    carried: tuple[str, ...] = ()
    peft_experts: tuple[str, ...] = ()


def stored_for(
    param: ParamSpec, rules: Sequence[Rule], experts: range | None = None,
    parts_of: PartsOf = plain,
) -> Iterator[StoredTensor]:
    """The stored tensors that together fill one parameter, each element exactly once.

    Args:
        param: the parameter.
        rules: the family's table.
        experts: only these experts of a grouped parameter; None is all of them.
        parts_of: how the release quantises matrices.

    Raises:
        LookupError: no rule fits, which is a hole in the family's table.
    """
    template, names = _first_fit(param.name, rules)
    for rule in rules:
        if rule.param == template:
            yield from _expand(rule, param, names, experts, parts_of)


def matching(name: str, rules: Sequence[Rule]) -> Iterator[str]:
    """Released templates of a grouped parameter, one per rule, with `{e}` left open."""
    template, fields = _first_fit(name, rules)
    for rule in rules:
        if rule.param == template:
            yield rule.stored.format(**fields, e="{e}")


def rename(name: str, rules: Sequence[Rule]) -> str | None:
    """The name that the first fitting rule gives, None where none fits."""
    for rule in rules:
        match = _compile(rule.param).fullmatch(name)
        if match is not None:
            return rule.stored.format(**match.groupdict())
    return None


def original(name: str, rules: Sequence[Rule]) -> tuple[str, tuple[int, ...]] | None:
    """Undo the rules: our parameter name and leading indices of a released name.

    Returns:
        None where no rule produces the name.
    """
    for rule in rules:
        suffix = "" if rule.part == "whole" else r"\.weight(_packed|_scale|_shape)?"
        match = re.fullmatch(_pattern(rule.stored) + suffix, name)
        if match is not None:
            fields = match.groupdict()
            expert = () if rule.part == "whole" else (int(fields["e"]),)
            return rule.param.format(**fields), expert + _SLICE[rule.part]
    return None


_SLICE: dict[Part, tuple[int, ...]] = {"whole": (), "expert": (), "gate": (0,), "up": (1,)}


def _first_fit(name: str, rules: Iterable[Rule]) -> tuple[str, dict[str, str]]:
    for rule in rules:
        match = _compile(rule.param).fullmatch(name)
        if match is not None:
            return rule.param, match.groupdict()
    raise LookupError(f"no rule of the weight map fits {name}")


def _expand(
    rule: Rule, param: ParamSpec, names: dict[str, str], experts: range | None, parts_of: PartsOf
) -> Iterator[StoredTensor]:
    if rule.part == "whole":
        stored = rule.stored.format(**names)
        module = stored.removesuffix(".weight")
        parts = parts_of(param, module)
        for suffix, shape, dtype, transform, block in _forms(parts, param.shape):
            yield StoredTensor(module + suffix, shape, dtype, param.name, (), transform, block)
        if not parts:
            shape = _whole_shape(rule, param)
            yield StoredTensor(stored, shape, param.dtype, param.name, (), rule.transform)
        return
    tail = _SLICE[rule.part]
    before, after = rule.stored.format(**names, e="\0").split("\0")
    # What is left unquantised is left so for all experts of a layer.
    parts = parts_of(param, f"{before}0{after}")
    forms = _forms(parts, param.shape[1 + len(tail):]) if parts else _expert_forms(param, tail)
    for expert in experts or range(param.shape[0]):
        index = (expert, *tail)
        for suffix, shape, dtype, transform, block in forms:
            name = f"{before}{expert}{after}{suffix}"
            yield StoredTensor(name, shape, dtype, param.name, index, transform, block)


_ONE = (1, 1)
# Suffix, shape, dtype, transform and block of one stored tensor.
_Form = tuple[str, tuple[int, ...], str, Transform, tuple[int, int]]
# Declared tensors of a quantised matrix -> what they are to the codec.
_READABLE: dict[tuple[tuple[str, str], ...], tuple[Transform, ...]] = {
    ((".weight", "F8_E4M3"), (".weight_scale_inv", "F32")): ("fp8_values", "fp8_scale"),
    ((".weight_packed", "I32"), (".weight_scale", "BF16"), (".weight_shape", "I32")):
        ("int4_packed", "int4_scale", "int4_shape"),
}


def _forms(parts: Sequence[StoredPart], shape: tuple[int, ...]) -> tuple[_Form, ...]:
    declared = tuple((part.suffix, part.dtype) for part in parts)
    transforms = _READABLE.get(declared) or tuple(_foreign(part) for part in parts)
    return tuple(
        (part.suffix, part.shape(*shape), part.dtype, transform, part.block)
        for part, transform in zip(parts, transforms, strict=True)
    )


def _foreign(part: StoredPart) -> Transform:
    return "foreign_values" if part.kind == "values" else "foreign_scale"


def _expert_forms(param: ParamSpec, tail: tuple[int, ...]) -> tuple[_Form, ...]:
    rows, columns = param.shape[1 + len(tail):]
    if param.form == "plain":
        return ((".weight", (rows, columns), param.dtype, "same", _ONE),)
    return (
        (".weight_packed", (rows, columns // 2), "U8", "mxfp4_packed", _ONE),
        (".weight_scale", (rows, columns // _MXFP4_GROUP), "U8", "mxfp4_scale",
         (1, _MXFP4_GROUP)),
    )


def _whole_shape(rule: Rule, param: ParamSpec) -> tuple[int, ...]:
    if rule.transform == "pad_tail":
        return (-(-param.numel // _PAD_BLOCK) * _PAD_BLOCK,)
    if rule.transform == "reshape":
        return tuple(size or param.numel for size in rule.stored_shape)
    return param.shape


def _compile(template: str) -> re.Pattern[str]:
    return re.compile(_pattern(template))


def _pattern(template: str) -> str:
    parts = re.split(r"\{(\w+)\}", template)
    return "".join(
        _PATTERNS[part] if number % 2 else re.escape(part) for number, part in enumerate(parts)
    )

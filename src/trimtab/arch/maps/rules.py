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

from trimtab.arch.params import ParamSpec
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
    """

    rules: tuple[Rule, ...]
    module_rules: tuple[Rule, ...] = ()
    float_dtypes: tuple[str, ...] = ()


def stored_for(
    param: ParamSpec, rules: Sequence[Rule], experts: range | None = None
) -> Iterator[StoredTensor]:
    """The stored tensors that together fill one parameter, each element exactly once.

    Args:
        param: the parameter.
        rules: the family's table.
        experts: only these experts of a grouped parameter; None is all of them.

    Raises:
        LookupError: no rule fits, which is a hole in the family's table.
    """
    template, names = _first_fit(param.name, rules)
    for rule in rules:
        if rule.param == template:
            yield from _expand(rule, param, names, experts)


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
        suffix = "" if rule.part == "whole" else r"\.weight(_packed|_scale)?"
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
    rule: Rule, param: ParamSpec, names: dict[str, str], experts: range | None
) -> Iterator[StoredTensor]:
    if rule.part == "whole":
        stored = rule.stored.format(**names)
        shape = _whole_shape(rule, param)
        yield StoredTensor(stored, shape, param.dtype, param.name, (), rule.transform)
        return
    tail = _SLICE[rule.part]
    rows, columns = param.shape[1 + len(tail):]
    before, after = rule.stored.format(**names, e="\0").split("\0")
    forms = _expert_forms(param, rows, columns)
    for expert in experts or range(param.shape[0]):
        index = (expert, *tail)
        for suffix, shape, dtype, transform in forms:
            name = f"{before}{expert}{after}{suffix}"
            yield StoredTensor(name, shape, dtype, param.name, index, transform)


def _expert_forms(
    param: ParamSpec, rows: int, columns: int
) -> tuple[tuple[str, tuple[int, ...], str, Transform], ...]:
    if param.form == "plain":
        return ((".weight", (rows, columns), param.dtype, "same"),)
    return (
        (".weight_packed", (rows, columns // 2), "U8", "mxfp4_packed"),
        (".weight_scale", (rows, columns // _MXFP4_GROUP), "U8", "mxfp4_scale"),
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

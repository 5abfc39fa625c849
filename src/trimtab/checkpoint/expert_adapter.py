"""Adapters of routed experts in files: joined per layer, or one pair per matrix.

    grouped      A [E * r, in], rows by expert;  B [out, r * E], columns by rank, experts fastest
    per_expert   A [r, in] and B [out, r] under the released name of each expert's matrix

`grouped` is PEFT's form for parameters that hold all experts (`target_parameters`), `per_expert`
what engines read. The axes are those of the form that the config declares; a shape is only ever
compared with them. Both forms write a shared matrix once per expert.

Knows: axes, names, completeness. Does not know: config files, other targets.
Letters: E experts, r adapter rank, F FFN width, D width the experts work on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from trimtab.arch.adapter import ExpertAxes, LoRATarget, Side
from trimtab.arch.maps.experts import ExpertNames
from trimtab.errors import AdapterError

ExpertForm = Literal["grouped", "per_expert"]
AXES: dict[ExpertForm, dict[str, list[str]]] = {
    "grouped": {"lora_A": ["expert, rank", "in"], "lora_B": ["out", "rank, expert"]},
    "per_expert": {"lora_A": ["rank", "in"], "lora_B": ["out", "rank"]},
}
_SIDES: tuple[Side, Side] = ("A", "B")
# Expert, part (0 gate or down, 1 up) and side of one matrix in a file.
Slot = tuple[int, int, Side]


def matrix_factors(
    target: LoRATarget, tensors: Mapping[str, Tensor], index: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] of one base matrix.

    Args:
        target: any target.
        tensors: `{fqn}.lora.A` and `.lora.B`.
        index: of the matrix in the parameter: empty, (expert, part) or (expert,).
    """
    a, b = (tensors[f"{target.fqn}.lora.{side}"] for side in _SIDES)
    axes = target.experts
    if axes is None:
        return a, b
    return _slice(axes, "A", a, index), _slice(axes, "B", b, index)


def _slice(axes: ExpertAxes, side: Side, tensor: Tensor, index: Sequence[int]) -> Tensor:
    expert = () if axes.shares(side) else (index[0],)
    part = tuple(index[1:]) if side == "B" or axes.split_a else ()
    return tensor[expert + part]


def stored_experts(
    names: ExpertNames, target: LoRATarget, tensors: Mapping[str, Tensor], form: ExpertForm,
    *, inner: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a file, by PEFT's name without its prefix.

    Args:
        names: of the target.
        target: gate_up or down of a layer.
        tensors: `{fqn}.lora.A` and `.lora.B`.
        form: of the file.
        inner: the other parameter of the module has an adapter that wraps this one's.

    Raises:
        AdapterError: TT502, gate and up have an A each, which `grouped` cannot say.
    """
    axes = target.experts
    assert axes is not None, f"{target.fqn} is no target over experts"
    if form == "grouped":
        if axes.split_a:
            raise AdapterError(
                "TT502", target.fqn, "gate and up have an A each, one joined parameter has one",
                hint="`trimtab export --to vllm` writes one pair per expert's matrix",
            )
        module = f"{names.module}.base_layer" if inner else names.module
        for side in _SIDES:
            whole = _per_expert(axes, side, tensors[f"{target.fqn}.lora.{side}"])
            yield f"{module}.lora_{side}.weight", _join(side, whole)
        return
    for expert in range(axes.num_experts):
        for part, template in enumerate(names.released):
            index = (expert, part)[: axes.parts]
            pair = matrix_factors(target, tensors, index)
            for side, tensor in zip(_SIDES, pair, strict=True):
                # A file may not hold two names of the same memory.
                yield f"{template.format(e=expert)}.lora_{side}.weight", tensor.clone()


def _per_expert(axes: ExpertAxes, side: Side, tensor: Tensor) -> Tensor:
    """[E, r, in] or [E, out, r] with gate over up, a shared matrix repeated."""
    whole = tensor.expand(axes.num_experts, *tensor.shape) if axes.shares(side) else tensor
    return whole.flatten(1, -2)


def _join(side: Side, whole: Tensor) -> Tensor:
    return whole.flatten(0, 1) if side == "A" else whole.permute(1, 2, 0).flatten(1)


def _divide(side: Side, joined: Tensor, rank: int, experts: int) -> Tensor:
    if side == "A":
        return joined.view(experts, rank, -1)
    return joined.view(-1, rank, experts).permute(2, 0, 1)


@dataclass(slots=True)
class ExpertTensors:
    """The expert tensors of one file, gathered key by key.

    Args:
        names: every name of the base's experts.
        counts: experts per parameter.
        joined: parameters that the config's `target_parameters` name.
    """

    names: Mapping[str, ExpertNames]
    counts: Mapping[str, int]
    joined: frozenset[str]
    grouped: dict[str, dict[Side, Tensor]] = field(default_factory=dict)
    single: dict[str, dict[Slot, Tensor]] = field(default_factory=dict)
    _modules: dict[str, str] = field(default_factory=dict)
    _matrices: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        by_module: dict[str, list[str]] = {}
        for fqn, names in self.names.items():
            if fqn in self.joined:
                by_module.setdefault(names.module, []).append(fqn)
        for module, wrapped in by_module.items():
            # Wrappers are nested in the order of the parameters, the first one inside.
            wrapped.sort(key=lambda fqn: not fqn.endswith("gate_up"))
            self._modules[module] = wrapped[-1]
            if len(wrapped) == 2:
                self._modules[f"{module}.base_layer"] = wrapped[0]
        for fqn, names in self.names.items():
            for templates in (names.aliases, names.released):
                for part, template in enumerate(templates):
                    for expert in range(self.counts[fqn]):
                        self._matrices[template.format(e=expert)] = (fqn, expert, part)

    def take(self, path: str, side: Side) -> Callable[[Tensor], None] | None:
        """Where a tensor of this module path goes; None if it is no expert's."""
        if path in self._modules:
            fqn = self._modules[path]
            return lambda tensor: self.grouped.setdefault(fqn, {}).__setitem__(side, tensor)
        if path in self._matrices:
            fqn, expert, part = self._matrices[path]
            slot = (expert, part, side)
            return lambda tensor: self.single.setdefault(fqn, {}).__setitem__(slot, tensor)
        return None

    def matrices(self, fqn: str) -> list[tuple[str, ...]]:
        """The names of each matrix of a target that the file has something of."""
        if fqn in self.grouped:
            return [(self.names[fqn].joined,)]
        templates = tuple(zip(self.names[fqn].released, self.names[fqn].aliases, strict=True))
        return [
            tuple(template.format(e=expert) for template in each)
            for expert in range(self.counts[fqn]) for each in templates
        ]

    def read(
        self, target: LoRATarget, where: str, declared: ExpertAxes | None
    ) -> tuple[LoRATarget, dict[str, Tensor]]:
        """A target that the file has something of, with its axes and tensors.

        Args:
            target: with the rank that the config declares and the axes of `per_expert`.
            where: the file, for errors.
            declared: axes that our manifest declares; by default matrices are per expert, and gate
                and up that come one by one keep an A each.

        Raises:
            AdapterError: TT502, a matrix is missing or has other sizes, or what is declared to be
                shared differs.
        """
        axes = target.experts
        assert axes is not None, f"{target.fqn} is no target over experts"
        if target.fqn in self.grouped:
            found = self._from_grouped(target, axes, where)
        else:
            axes = replace(axes, split_a=axes.parts == 2)
            found = self._from_single(target, axes, where)
        if declared is not None and declared != axes:
            found = {s: _collapse(s, found[s], axes, declared, where) for s in _SIDES}
            axes = declared
        read = replace(target, experts=axes)
        return read, {f"{target.fqn}.lora.{side}": found[side].contiguous() for side in _SIDES}

    def _from_grouped(
        self, target: LoRATarget, axes: ExpertAxes, where: str
    ) -> dict[Side, Tensor]:
        found = self.grouped[target.fqn]
        joined = axes.num_experts * target.rank
        shapes: dict[Side, tuple[int, int]] = {
            "A": (joined, target.in_features), "B": (axes.parts * target.out_features, joined),
        }
        for side in _SIDES:
            _check_matrix(found.get(side), shapes[side], f"{where}: {target.fqn}.lora_{side}")
        divided = {s: _divide(s, found[s], target.rank, axes.num_experts) for s in _SIDES}
        return {s: divided[s].reshape(target.shape(s)) for s in _SIDES}

    def _from_single(
        self, target: LoRATarget, axes: ExpertAxes, where: str
    ) -> dict[Side, Tensor]:
        found, result = self.single[target.fqn], {}
        for side in _SIDES:
            shape = (
                (target.rank, target.in_features) if side == "A"
                else (target.out_features, target.rank)
            )
            rows = []
            for expert in range(axes.num_experts):
                for part in range(axes.parts):
                    at = f"{where}: {target.fqn} expert {expert} matrix {part} lora_{side}"
                    tensor = found.get((expert, part, side))
                    rows.append(_check_matrix(tensor, shape, at))
            result[side] = torch.stack(rows).reshape(replace(target, experts=axes).shape(side))
        return result


def _check_matrix(tensor: Tensor | None, shape: tuple[int, int], where: str) -> Tensor:
    if tensor is None:
        raise AdapterError("TT502", where, "is missing; every expert needs its A and B")
    if tuple(tensor.shape) != shape:
        raise AdapterError("TT502", where, f"must have shape {list(shape)}",
                           value=list(tensor.shape))
    if not bool(torch.isfinite(tensor).all()):
        raise AdapterError("TT502", where, "holds NaN or infinity")
    return tensor


def _collapse(
    side: Side, tensor: Tensor, axes: ExpertAxes, declared: ExpertAxes, where: str
) -> Tensor:
    """Take away axes along which the declared adapter has one matrix."""
    if side == "A" and axes.split_a and not declared.split_a:
        tensor = _only(tensor, 1, where)
    if declared.shares(side) and not axes.shares(side):
        tensor = _only(tensor, 0, where)
    return tensor


def _only(tensor: Tensor, dim: int, where: str) -> Tensor:
    first = tensor.narrow(dim, 0, 1)
    if not torch.equal(first.expand_as(tensor), tensor):
        rule = "the manifest declares one shared matrix, the file holds different ones"
        raise AdapterError("TT502", where, rule)
    return first.squeeze(dim)


def named_parameters(
    config: Mapping[str, Any], names: Mapping[str, ExpertNames], weights: Collection[str],
    where: str,
) -> frozenset[str]:
    """Our names of the joined parameters that `target_parameters` lists, by PEFT's rule for suffixes.

    Args:
        config: the options of the adapter.
        names: of all routed experts.
        weights: of Linear modules, which may be named there as well.
        where: the config, for errors.

    Raises:
        AdapterError: TT502, an entry is neither.
    """
    found = set()
    for entry in config.get("target_parameters") or ():
        hits = {fqn for fqn, each in names.items() if _ends_with(each.joined, entry)}
        if not hits and not any(_ends_with(weight, entry) for weight in weights):
            rule = "only routed experts and weights of projections are supported"
            raise AdapterError("TT502", f"{where}: target_parameters", rule, value=entry)
        found |= hits
    return frozenset(found)


def _ends_with(path: str, entry: str) -> bool:
    return path == entry or path.endswith(f".{entry}")

"""What PEFT's config calls the targets of an adapter: modules, parameters, and patterns of both.

Names are those that modules have in memory; PEFT renames the tensors of a file that has released
ones. Two kinds of weights are named as parameters (`target_parameters`): those that hold all experts
of a layer, and those of modules that PEFT would otherwise take for experts.

Knows: names. Does not know: tensors, the other options of a config.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from trimtab.arch.adapter import LoRATarget
from trimtab.arch.maps import WEIGHT_MAPS, module_names
from trimtab.arch.maps.experts import ExpertNames, expert_names
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.expert_adapter import ExpertForm

# In a path, all experts of a layer: PEFT reads patterns as regular expressions.
ANY_EXPERT = r"\d+"


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Names of some targets.

    Args:
        targets: modules and experts with A and B.
        form: how adapters of routed experts are written.
        modules: path of every Linear module of the model that is named as a module.
        weights: path of the weight of every other one.
        routed: names of all routed experts.
    """

    targets: Sequence[LoRATarget]
    form: ExpertForm
    modules: Mapping[str, str]
    weights: Mapping[str, str]
    routed: Mapping[str, ExpertNames]

    @classmethod
    def of(
        cls, arch: ArchSpec, targets: Sequence[LoRATarget], form: ExpertForm
    ) -> AdapterNames:
        """Names in a model of this architecture."""
        leaves: Sequence[str] = ()
        # Engines know no parameters; an adapter without experts is written for them as modules.
        if form == "grouped" or any(t.experts is not None for t in targets):
            leaves = WEIGHT_MAPS[arch.family].peft_experts
        paths = module_names(arch)
        weights = {f: f"{p}.weight" for f, p in paths.items() if _leaf(p) in leaves}
        modules = {f: p for f, p in paths.items() if f not in weights}
        return cls(targets, form, modules, weights, expert_names(arch))

    def target_modules(self) -> list[str]:
        """Leaf names where all modules of that name are targets, else names in full."""
        chosen = {t.fqn for t in self.targets}
        by_leaf: dict[str, list[str]] = {}
        for fqn, path in self.modules.items():
            by_leaf.setdefault(_leaf(path), []).append(fqn)
        listed: list[str] = []
        for leaf, members in by_leaf.items():
            # A number as leaf would also fit the blocks of the tower and the decoder's layers.
            if chosen >= set(members) and not leaf.isdigit():
                listed.append(leaf)
            else:
                listed += sorted(self.modules[fqn] for fqn in members if fqn in chosen)
        if self.form == "per_expert":
            listed += self._matrices(by_leaf)
        return listed

    def target_parameters(self) -> list[str]:
        """Parameters, by their last three names where those of all layers are meant."""
        chosen = {t.fqn for t in self.targets}
        joined = {fqn: each.joined for fqn, each in self.routed.items()}
        return _shortest(self.weights, chosen) + _shortest(joined, self._joined())

    def ranks(self) -> Iterator[tuple[str, int, float]]:
        """Pattern, rank and alpha of every target."""
        joined = self._joined()
        for t in self.targets:
            if t.experts is None:
                yield self.weights.get(t.fqn) or self.modules[t.fqn], t.rank, t.alpha
                continue
            if self.form == "per_expert":
                for template in self.routed[t.fqn].released:
                    yield template.format(e=ANY_EXPERT), t.rank, t.alpha
            if t.fqn in joined:
                # PEFT joins the pairs of gate and up to one of their common rank.
                parts = t.experts.parts if self.form == "per_expert" else 1
                alpha = t.alpha * (sqrt(parts) if t.use_rslora else parts)
                yield self.routed[t.fqn].joined, parts * t.rank, alpha

    def _joined(self) -> set[str]:
        return {
            t.fqn for t in self.targets
            if t.experts is not None and (self.form == "grouped" or self.routed[t.fqn].is_joined)
        }

    def _matrices(self, other_leaves: Collection[str]) -> list[str]:
        """Experts as modules: by leaf, below `experts` where others have that leaf, or in full."""
        listed: dict[str, None] = {}
        chosen = {t.fqn: t for t in self.targets if t.experts is not None}
        every = chosen.keys() >= self.routed.keys()
        taken = {*other_leaves, *map(_leaf, self.modules.values())}
        taken |= {_leaf(path.removesuffix(".weight")) for path in self.weights.values()}
        for fqn, target in chosen.items():
            assert target.experts is not None
            for template in self.routed[fqn].released:
                leaf = _leaf(template)
                if every:
                    listed[f"experts.{leaf}" if leaf in taken else leaf] = None
                elif self.routed[fqn].is_joined:
                    listed[f"{self.routed[fqn].module}.{leaf}"] = None
                else:
                    experts = range(target.experts.num_experts)
                    listed |= {template.format(e=expert): None for expert in experts}
        return list(listed)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _shortest(paths: Mapping[str, str], chosen: Collection[str]) -> list[str]:
    """The chosen of these paths, or what they end with where all that end so are chosen."""
    by_tail: dict[str, list[str]] = {}
    for fqn, path in paths.items():
        by_tail.setdefault(".".join(path.split(".")[-3:]), []).append(fqn)
    listed: list[str] = []
    for tail, members in by_tail.items():
        if set(members) <= set(chosen):
            listed.append(tail)
        else:
            listed += [paths[fqn] for fqn in members if fqn in chosen]
    return listed

"""LoRA targets: which linear modules of a model get an adapter, chosen from the inventory.

Knows: names, patterns, group words, and what must not be trained. Does not know: torch; tensors
are made by `models.lora`, files by `checkpoint.adapter`.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab.arch.params import Owner, ParamSpec, inventory
from trimtab.arch.spec import ArchSpec
from trimtab.arch.whole import whole_kind
from trimtab.errors import AdapterError

Scaling = Literal["standard", "rslora"]
ExpertLayout = Literal["per_expert", "shared_outer"]
Experts = Literal["none", "per_expert", "shared_outer"]
Side = Literal["A", "B"]

GROUPS: dict[str, tuple[Owner, ...]] = {
    "attention": ("kda", "mla", "gqa", "gated_delta"),
    "linear_attention": ("kda", "gated_delta"),
    "sparse_attention": ("mla",),
    "dense_ffn": ("dense_ffn",),
    "shared_experts": ("shared_expert",),
    "latent": ("latent",),
    "projector": ("projector",),
}
"""Group words a recipe may use; `sparse_attention` is every MLA layer, indexed or not."""

_REFUSED: dict[Owner, str] = {
    "embedding": "the embedding table has no LoRA form here",
    "head": "the output head has no LoRA form here",
    "norm": "a norm is no projection",
    "residual": "the residual mix is no projection worth an adapter",
    "router": "it has no LoRA form; `finetune.router.train` trains it itself",
    "indexer": "the indexer selects without gradient, so the loss cannot train it",
    "routed_expert": "routed experts are chosen with `finetune.lora.experts`",
    "vision": "the vision tower is frozen",
}
_LAYER_KIND: dict[Owner, str] = {
    "kda": "kda", "mla": "mla", "dense_ffn": "dense", "shared_expert": "moe", "latent": "moe",
    "routed_expert": "moe", "projector": "vision", "gqa": "gqa", "gated_delta": "gated_delta",
}
_MASTER_BYTES = 4  # adapters are float32


@dataclass(frozen=True, slots=True)
class ExpertAxes:
    """What a target that is all routed experts of a layer has beside input, output and rank.

    Args:
        num_experts: E.
        layout: `per_expert` has A and B for every expert; `shared_outer` shares the outer matrix of
            the layer, A of gate_up and B of down.
        parts: matrices with one input that lie above one another: 2 for gate_up, 1 for down.
        split_a: gate and up have an A each; else one A serves both.
    """

    num_experts: int
    layout: ExpertLayout
    parts: int
    split_a: bool = False

    def shares(self, side: Side) -> bool:
        """Whether all experts have one A, or one B."""
        return self.layout == "shared_outer" and (side == "A") == (self.parts == 2)

    def lead(self, side: Side) -> tuple[int, ...]:
        """The dimensions of A or B in front of its two matrix dimensions."""
        experts = () if self.shares(side) else (self.num_experts,)
        parts = (2,) if self.parts == 2 and (side == "B" or self.split_a) else ()
        return experts + parts


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """One linear module, or the experts of a layer, that gets an adapter `y += scaling * B (A x)`.

    Args:
        fqn: module name, without `.weight`.
        in_features: columns of A, [rank, in_features].
        out_features: rows of B, [out_features, rank].
        rank: r.
        alpha: numerator of the scaling.
        dropout: probability of dropping an input feature of A in training.
        owner: kind of module.
        layer: decoder layer.
        use_rslora: scale by alpha / sqrt(rank) instead of alpha / rank.
        experts: further axes of A and B where the target is the routed experts of a layer; the
            features are then those of one expert's gate, up or down matrix.
    """

    fqn: str
    in_features: int
    out_features: int
    rank: int
    alpha: float
    dropout: float
    owner: Owner
    layer: int | None
    use_rslora: bool = False
    experts: ExpertAxes | None = None

    @property
    def scaling(self) -> float:
        """Factor on B (A x)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def leaf(self) -> str:
        """Last component of the module name."""
        return self.fqn.rsplit(".", 1)[-1]

    @property
    def branch(self) -> str:
        """The group word of `optimizer.lr_by_branch` that this target belongs to."""
        return branch_of(self.owner)

    @property
    def num_parameters(self) -> int:
        """Elements of A and B together."""
        return math.prod(self.shape("A")) + math.prod(self.shape("B"))

    def shape(self, side: Side) -> tuple[int, ...]:
        """A [rank, in] or B [out, rank], behind the axes of the experts."""
        lead = () if self.experts is None else self.experts.lead(side)
        matrix = (self.rank, self.in_features) if side == "A" else (self.out_features, self.rank)
        return lead + matrix


@dataclass(frozen=True, slots=True)
class TargetRow:
    """One line of the target table: a leaf name within one kind of layer.

    Args:
        leaf: module leaf name; `shared_experts.up_proj` and its like keep their parent.
        kind: `kda`, `mla`, `dense`, `moe`, `vision`, or `full` for what is trained without LoRA.
        count: adapted modules.
        available: modules of this name and kind in the model.
        num_parameters: adapter elements.
        num_bytes: adapter bytes in float32.
        owner: kind of module.
    """

    leaf: str
    kind: str
    count: int
    available: int
    num_parameters: int
    num_bytes: int
    owner: Owner


@dataclass(frozen=True, slots=True)
class TargetTable:
    """What is adapted, and in words what is not.

    Args:
        rows: one per leaf and layer kind, in forward order.
        notes: coverage remarks for people.
    """

    rows: tuple[TargetRow, ...]
    notes: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """Trainable elements."""
        return sum(row.num_parameters for row in self.rows)

    @property
    def num_bytes(self) -> int:
        """Trainable bytes in float32."""
        return sum(row.num_bytes for row in self.rows)


def branch_of(owner: Owner) -> str:
    """Group word of an owner, the most specific one."""
    for word, owners in GROUPS.items():
        if word != "attention" and owner in owners:
            return word
    return "routed_experts" if owner == "routed_expert" else owner


def resolve_targets(
    arch: ArchSpec,
    *,
    target_modules: Sequence[str],
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    scaling: Scaling = "standard",
    experts: Experts = "none",
) -> tuple[LoRATarget, ...]:
    """Choose the linear modules to adapt, in forward order.

    Each word of `target_modules` is a group word, a literal name (a leaf such as `q_proj` or a
    dotted tail such as `shared_experts.up_proj`), a shell pattern, or a regular expression after
    `re:` that must match the whole module name. `experts` adds the routed experts of every layer.

    Raises:
        AdapterError: TT501 where a word matches nothing (the nearest names are listed) or the model
            has no routed experts, TT503 where all it matches must not be trained.
    """
    params = inventory(arch)
    chosen: set[str] = set()
    for position, word in enumerate(target_modules):
        where = f"finetune.lora.target_modules[{position}]"
        chosen |= {p.name for p in _matches(params, word, where)}
    if not chosen:
        raise AdapterError("TT501", "finetune.lora.target_modules", "names no module", value="[]")
    if experts != "none":
        routed = {p.name for p in params if p.owner == "routed_expert"}
        if not routed:
            raise AdapterError("TT501", "finetune.lora.experts", "the model has no routed experts",
                               value=experts, hint="use `experts: none`")
        chosen |= routed
    return tuple(
        LoRATarget(
            fqn=_module(p), in_features=p.shape[-1], out_features=p.shape[-2], rank=rank,
            alpha=float(alpha), dropout=dropout, owner=p.owner, layer=p.layer,
            use_rslora=scaling == "rslora",
            experts=None if experts == "none" else expert_axes(p, experts),
        )
        for p in params
        if p.name in chosen
    )


def expert_axes(p: ParamSpec, layout: ExpertLayout) -> ExpertAxes | None:
    """The axes of routed experts, [E, 2, F, D] or [E, D, F]; None for any other parameter."""
    if p.owner != "routed_expert":
        return None
    return ExpertAxes(p.shape[0], layout, 2 if len(p.shape) == 4 else 1)


def target_table(
    arch: ArchSpec, targets: Sequence[LoRATarget], full: Sequence[ParamSpec] = ()
) -> TargetTable:
    """Rows per leaf and layer kind, and notes on what the chosen names leave uncovered.

    Args:
        arch: the model.
        targets: modules with an adapter.
        full: parameters trained without LoRA; they are the last rows.
    """
    available: dict[tuple[str, str], int] = {}
    for p in inventory(arch):
        if _is_trainable(p) or p.owner == "routed_expert":
            key = (_leaf(p), _LAYER_KIND[p.owner])
            available[key] = available.get(key, 0) + 1
    grouped: dict[tuple[str, str], list[LoRATarget]] = {}
    for target in targets:
        key = (_leaf_of(target.fqn), _LAYER_KIND[target.owner])
        grouped.setdefault(key, []).append(target)
    rows = []
    for (leaf, kind), members in grouped.items():
        total = sum(t.num_parameters for t in members)
        rows.append(TargetRow(leaf, kind, len(members), available[(leaf, kind)], total,
                              total * _MASTER_BYTES, members[0].owner))
    for row in dict.fromkeys(whole_kind(p) for p in full):
        parts = [p for p in full if whole_kind(p) == row]
        total = sum(p.numel for p in parts)
        rows.append(TargetRow(str(row), "full", len(parts), len(parts), total,
                              total * _MASTER_BYTES, parts[0].owner))
    notes = (*_coverage(available, grouped), *_expert_notes(targets))
    return TargetTable(tuple(rows), notes)


def _expert_notes(targets: Sequence[LoRATarget]) -> list[str]:
    """How many experts are adapted, and how."""
    gate_up = [t for t in targets if t.experts is not None and t.experts.parts == 2]
    found = {(t.experts.num_experts, t.experts.layout) for t in gate_up if t.experts is not None}
    return [
        f"routed experts: {count} in each of {len(gate_up)} layers, {layout}"
        for count, layout in sorted(found)
    ]


def _coverage(
    available: dict[tuple[str, str], int], grouped: dict[tuple[str, str], list[LoRATarget]]
) -> list[str]:
    """One note per mixer kind that has projections left without an adapter."""
    notes = []
    for kind, word in (("kda", "linear_attention"), ("mla", "sparse_attention")):
        present = [leaf for leaf, k in available if k == kind]
        covered = [leaf for leaf in present if (leaf, kind) in grouped]
        missing = [leaf for leaf in present if (leaf, kind) not in grouped]
        if not missing:
            continue
        layers = max(available[(leaf, kind)] for leaf in present)
        have = f"only {', '.join(covered)}" if covered else "nothing"
        notes.append(
            f"the {layers} {kind.upper()} layers: {have} adapted; not covered: "
            f"{', '.join(missing)} (the word `{word}` covers all)"
        )
    return notes


def match_word(params: Sequence[ParamSpec], word: str, where: str) -> list[ParamSpec]:
    """Trainable matrices of any inventory that one word of `target_modules` selects.

    Raises:
        AdapterError: it selects none (TT501) or only what must not be trained (TT503).
    """
    return _matches(params, word, where)


def _matches(params: Sequence[ParamSpec], word: str, where: str) -> list[ParamSpec]:
    """Trainable parameters that one word of the recipe selects; never empty."""
    if word in GROUPS:
        found = [p for p in params if p.owner in GROUPS[word] and _is_trainable(p)]
        if not found:
            rule = "the model has no module of this group"
            raise AdapterError("TT501", where, rule, value=word, hint=_nearest(params, word))
        return found
    wants_vision = word.removeprefix("re:").startswith(("vision.", "projector"))
    hits = [
        p for p in params
        if (p.owner in ("vision", "projector")) == wants_vision and _selects(word, p, where)
    ]
    if not hits:
        raise AdapterError("TT501", where, "matches no module of the model", value=word,
                           hint=_nearest(params, word))
    found = [p for p in hits if _is_trainable(p)]
    if not found:
        why = _REFUSED.get(hits[0].owner, "it is not a linear projection")
        raise AdapterError("TT503", where, f"must not be trained: {why}", value=word,
                           hint="remove it from target_modules")
    return found


def _selects(word: str, p: ParamSpec, where: str) -> bool:
    """Whether one literal name, shell pattern or `re:` expression names the parameter's module."""
    module = _module(p)
    if word.startswith("re:"):
        try:
            return re.fullmatch(word[3:], module) is not None
        except re.error as error:
            raise AdapterError("TT501", where, f"is not a regular expression: {error}",
                               value=word) from error
    if any(mark in word for mark in "*?["):
        leaf = module.rsplit(".", 1)[-1]
        return fnmatch.fnmatchcase(module, word) or fnmatch.fnmatchcase(leaf, word)
    if f".{module}".endswith(f".{word}"):
        return True
    # A parent's name selects nothing trainable, but `indexer` or `router` deserves its own answer.
    return not _is_trainable(p) and f".{word}." in f".{module}."


def _is_trainable(p: ParamSpec) -> bool:
    return p.owner in _LAYER_KIND and len(p.shape) == 2 and p.name.endswith(".weight")


def _module(p: ParamSpec) -> str:
    return p.name.removesuffix(".weight")


def _leaf(p: ParamSpec) -> str:
    return _leaf_of(_module(p))


def _leaf_of(module: str) -> str:
    if module.startswith("projector."):
        return module
    parent, leaf = module.rsplit(".", 2)[-2:]
    return f"{parent}.{leaf}" if parent in ("shared_experts", "experts") else leaf


def _nearest(params: Sequence[ParamSpec], word: str) -> str:
    """Names that a word may have meant, then all that can be targeted."""
    modules = [_module(p) for p in params if _is_trainable(p)]
    leaves = list(dict.fromkeys(
        m if m.startswith("projector.") else m.rsplit(".", 1)[-1] for m in modules
    ))
    names = [*leaves, *GROUPS]
    near = difflib.get_close_matches(word.rsplit(".", 1)[-1], names, n=3, cutoff=0.5)
    meant = f"did you mean {', '.join(near)}? " if near else ""
    return f"{meant}modules: {', '.join(leaves)}; groups: {', '.join(GROUPS)}"

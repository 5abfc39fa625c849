"""What a run will do, known before any weight is read: targets and batch arithmetic.

Knows: recipes, architectures, whether records have images. Does not know: torch, weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.arch.adapter import (
    LoRATarget,
    TargetTable,
    full_targets,
    resolve_targets,
    target_table,
)
from trimtab.arch.load import load_arch, require_readable
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.source import open_source
from trimtab.config.recipe import Recipe
from trimtab.data.image_totals import has_images
from trimtab.data.records import open_records
from trimtab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one global batch is cut; the recipe guarantees that each count divides the one above.

    Args:
        tokens_per_step: tokens of the global batch.
        micro_batch_tokens: tokens of one forward and backward.
        max_seq_len: tokens of one pack.
    """

    tokens_per_step: int
    micro_batch_tokens: int
    max_seq_len: int

    @property
    def packs_per_step(self) -> int:
        """Packs of the global batch."""
        return self.tokens_per_step // self.max_seq_len

    @property
    def packs_per_micro_batch(self) -> int:
        """Packs joined into one forward."""
        return self.micro_batch_tokens // self.max_seq_len

    @property
    def accumulation(self) -> int:
        """Forward and backward passes per optimisation step."""
        return self.tokens_per_step // self.micro_batch_tokens

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_step:,} tokens per step = {self.accumulation} micro-batches of "
            f"{self.packs_per_micro_batch} x {self.max_seq_len} tokens"
        )


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything `finetune --dry-run` shows.

    Args:
        arch: of the base.
        targets: modules that get an adapter.
        table: the same for people.
        batch: how a global batch is cut.
        steps: optimisation steps, None where the recipe counts epochs.
        base_parameters: elements of the text model.
        full: parameters trained without LoRA, those of the projector or none.
        vision: tower and projector take part.
    """

    arch: ArchSpec
    targets: tuple[LoRATarget, ...]
    table: TargetTable
    batch: BatchPlan
    steps: int | None
    base_parameters: int
    full: tuple[ParamSpec, ...] = ()
    vision: bool = False

    @property
    def trainable_share(self) -> float:
        """Adapter elements over base elements."""
        return self.table.num_parameters / self.base_parameters

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "model": self.arch.name,
            "targets": [
                {"module": r.leaf, "layer_kind": r.kind, "count": r.count, "available": r.available,
                 "parameters": r.num_parameters, "bytes": r.num_bytes}
                for r in self.table.rows
            ],
            "notes": list(self.table.notes),
            "trainable_parameters": self.table.num_parameters,
            "trainable_bytes": self.table.num_bytes,
            "trainable_share": self.trainable_share,
            "tokens_per_step": self.batch.tokens_per_step,
            "micro_batch_tokens": self.batch.micro_batch_tokens,
            "accumulation": self.batch.accumulation,
            "packs_per_step": self.batch.packs_per_step,
            "steps": self.steps,
        }


def plan_run(recipe: Recipe) -> RunPlan:
    """Resolve targets and batch arithmetic from the recipe and the model's config.json.

    Records are read up to the first image, if the model takes images.

    Raises:
        AdapterError: see `resolve_targets`.
        ConfigError: TT105, `vision.projector` and the targets contradict.
        ArchError, CheckpointError: the model's config cannot be read.
    """
    source = open_source(recipe.model.path)
    arch = load_arch(source.config(), source.where)
    require_readable(arch, source.where)
    batch = recipe.finetune.batch
    targets, full, note, vision = _choose(recipe, arch)
    table = target_table(arch, targets, full)
    if note is not None:
        table = replace(table, notes=(*table.notes, note))
    text = sum(p.numel for p in inventory(arch) if p.owner not in ("vision", "projector"))
    return RunPlan(
        arch, targets, table,
        BatchPlan(batch.tokens_per_step, batch.micro_batch_tokens, recipe.finetune.data.max_seq_len),
        recipe.finetune.steps, text, full, vision,
    )


def _choose(
    recipe: Recipe, arch: ArchSpec
) -> tuple[tuple[LoRATarget, ...], tuple[ParamSpec, ...], str | None, bool]:
    """LoRA targets, parameters trained in full, a note on the projector, and if vision is used."""
    mode = recipe.finetune.vision.projector
    words = recipe.finetune.lora.target_modules
    targets = _resolve(recipe, arch, words)
    named = any(target.owner == "projector" for target in targets)
    if named and mode != "lora":
        raise ConfigError(
            "TT105", "finetune.lora.target_modules",
            f"names the projector, but finetune.vision.projector is {mode}",
            hint="set finetune.vision.projector to lora, or leave the projector out of the targets",
        )
    if arch.vision is None:
        if mode == "full":
            full_targets(arch)  # says that there is no projector
        return targets, (), None, False
    if not any(has_images(open_records(f.path)) for f in recipe.finetune.data.files):
        note = "the data has no images: nothing trains the projector (finetune.vision.projector: "
        return targets, (), None if mode == "frozen" else f"{note}{mode})", named
    if mode == "full":
        return targets, full_targets(arch), None, True
    if mode == "lora" and not named:
        targets = _resolve(recipe, arch, (*words, "projector"))
    return targets, (), "the projector is frozen" if mode == "frozen" else None, True


def _resolve(recipe: Recipe, arch: ArchSpec, words: Sequence[str]) -> tuple[LoRATarget, ...]:
    lora = recipe.finetune.lora
    return resolve_targets(
        arch, target_modules=words, rank=lora.rank, alpha=lora.alpha,
        dropout=lora.dropout, scaling=lora.scaling, experts=lora.experts,
    )

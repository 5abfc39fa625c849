"""What a run will do, known before any weight is read: targets and batch arithmetic.

Knows: recipes, architectures, whether records have images. Does not know: torch, weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trimtab.arch.adapter import (
    LoRATarget,
    TargetTable,
    resolve_targets,
    target_table,
)
from trimtab.arch.load import load_arch, require_readable
from trimtab.arch.overrides import Override, apply_overrides, scale_expert_ranks
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.serving import Servable, servable
from trimtab.arch.spec import ArchSpec
from trimtab.arch.whole import full_targets, router_targets
from trimtab.checkpoint.source import open_source
from trimtab.config.recipe import Recipe
from trimtab.data.image_totals import has_images
from trimtab.data.records import open_records
from trimtab.errors import AdapterError, ConfigError


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
        full: parameters trained without LoRA, those of the projector and of routers.
        vision: tower and projector take part.
        serving: whether the engine of `lora.serve_with` applies each row of the table; empty
            where the recipe names none.
        warnings: what is probably not meant.
    """

    arch: ArchSpec
    targets: tuple[LoRATarget, ...]
    table: TargetTable
    batch: BatchPlan
    steps: int | None
    base_parameters: int
    full: tuple[ParamSpec, ...] = ()
    vision: bool = False
    serving: tuple[Servable, ...] = ()
    warnings: tuple[str, ...] = ()

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
                 "parameters": r.num_parameters, "bytes": r.num_bytes,
                 **({"servable": self.serving[n].answer} if self.serving else {})}
                for n, r in enumerate(self.table.rows)
            ],
            "notes": list(self.table.notes),
            "warnings": list(self.warnings),
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
        AdapterError: see `resolve_targets`; TT503, the serving engine would ignore a target.
        ConfigError: TT105, `vision.projector` and the targets contradict; TT102, a layout of more
            than one device.
        ArchError, CheckpointError: the model's config cannot be read.
    """
    _require_one_device(recipe)
    source = open_source(recipe.model.path)
    arch = load_arch(source.config(), source.where)
    require_readable(arch, source.where)
    batch = recipe.finetune.batch
    targets, full, note, vision = _choose(recipe, arch)
    router = recipe.finetune.router
    if router.train != "frozen":
        full += router_targets(arch, weight=router.train == "full", bias=router.balance == "quantile")
    table = target_table(arch, targets, full)
    engine = recipe.finetune.lora.serve_with
    serving = () if engine is None else _serving(engine, table)
    notes = [f"{engine} may not apply {table.rows[n].leaf}: {found.reason}"
             for n, found in enumerate(serving) if found.reason]
    table = replace(table, notes=(*table.notes, *([] if note is None else [note]), *notes))
    text = sum(p.numel for p in inventory(arch) if p.owner not in ("vision", "projector"))
    return RunPlan(
        arch, targets, table,
        BatchPlan(batch.tokens_per_step, batch.micro_batch_tokens, recipe.finetune.data.max_seq_len),
        recipe.finetune.steps, text, full, vision, serving, tuple(_warnings(recipe)),
    )


def _warnings(recipe: Recipe) -> Iterator[str]:
    if recipe.finetune.data.general is None:
        yield (
            "finetune.data.general is left out, so nothing keeps the model's general ability; "
            f"`trimtab data replay {recipe.model.path} --prompts FILE --out general.jsonl` makes "
            "such records of the base's own answers"
        )


def _require_one_device(recipe: Recipe) -> None:
    """Layouts of several devices can be planned, not yet run."""
    section = recipe.parallel
    if section.ranks > 1:
        raise ConfigError(
            "TT102", "parallel", "training on several devices is not supported yet",
            value=f"{section.ranks} ranks", hint="leave the section out to train on one device",
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
    if not any(has_images(open_records(f.path, f.form)) for f in recipe.finetune.data.files):
        note = "the data has no images: nothing trains the projector (finetune.vision.projector: "
        return targets, (), None if mode == "frozen" else f"{note}{mode})", named
    if mode == "full":
        return targets, full_targets(arch), None, True
    if mode == "lora" and not named:
        targets = _resolve(recipe, arch, (*words, "projector"))
    return targets, (), "the projector is frozen" if mode == "frozen" else None, True


def _resolve(recipe: Recipe, arch: ArchSpec, words: Sequence[str]) -> tuple[LoRATarget, ...]:
    lora = recipe.finetune.lora
    targets = resolve_targets(
        arch, target_modules=words, rank=lora.rank, alpha=lora.alpha,
        dropout=lora.dropout, scaling=lora.scaling, experts=lora.experts,
    )
    overrides = {str(w): Override(given.rank, given.alpha) for w, given in lora.overrides.items()}
    targets = apply_overrides(targets, overrides)
    return scale_expert_ranks(arch, targets) if lora.moe_rank_scaling else targets


def _serving(engine: str, table: TargetTable) -> tuple[Servable, ...]:
    """One answer for each row of the table; refuses targets that the engine would ignore."""
    answers = tuple(servable(engine, row.owner, row.leaf) for row in table.rows)
    ignored = [(row.leaf, found.reason) for row, found in zip(table.rows, answers, strict=True)
               if found.answer == "no"]
    if ignored:
        leaves = ", ".join(dict.fromkeys(leaf for leaf, _ in ignored))
        raise AdapterError(
            "TT503", "finetune.lora.serve_with", f"{engine} would ignore the adapter on {leaves}: "
            f"{ignored[0][1]}", value=engine,
            hint=f"leave {leaves} out of target_modules, or serve merged weights and leave "
            "serve_with out",
        )
    return answers

"""What a recipe asks for in tokens: steps, validation, evaluation.

Knows: recipes, and what their data holds once it was counted. Does not know: files, clusters.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trimtab.config.recipe import Recipe
from trimtab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Volume:
    """What the data of a recipe holds, in tokens of the model.

    Args:
        records: of all training files.
        domain_tokens: of all domain records, none longer than a pack.
        filled: share of the positions of a pack that are not padding.
        scored_tokens: that held-out sets make a model read, for one model.
        answers: that held-out sets make it write.
        answer_tokens: most tokens of these together.
        is_exact: every record was counted; else the first of each file stand for all.
    """

    records: int
    domain_tokens: float
    filled: float
    scored_tokens: float
    answers: int
    answer_tokens: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """What a job does.

    Args:
        steps: optimizer steps.
        tokens_per_step: of the global batch, pads included.
        validation_tokens: read by all validations of the run.
        scored_tokens: read by the evaluation of one model.
        answers: written by it.
        answer_tokens: most tokens of these together.
        saved_states: kept at a time.
        data: how the data was counted, in words.
    """

    steps: int
    tokens_per_step: int
    validation_tokens: float = 0.0
    scored_tokens: float = 0.0
    answers: int = 0
    answer_tokens: int = 0
    saved_states: int = 2
    data: str = ""


def workload_of(recipe: Recipe, volume: Volume | None, tokens_per_step: int) -> Workload:
    """The workload of a recipe.

    Args:
        recipe: the recipe.
        volume: of its data; None where that could not be counted.
        tokens_per_step: of the plan, which may differ from the recipe's.

    Raises:
        ConfigError: TT105, the recipe counts epochs and its data could not be counted.
    """
    tune, watch = recipe.finetune, recipe.validation
    steps = tune.steps
    if steps is None:
        assert tune.epochs is not None, "a recipe has steps or epochs"
        if volume is None:
            raise ConfigError(
                "TT105", "finetune.epochs", "needs the records and the tokenizer of the model",
                value=tune.epochs, hint="put them where the recipe says, or set finetune.steps",
            )
        positions = tune.epochs * volume.domain_tokens / tune.data.domain_ratio / volume.filled
        steps = max(1, ceil(positions / tokens_per_step))
    times = steps // watch.every_steps if watch.every_steps else 0
    sets = 1 + (tune.data.general is not None and watch.general_holdout > 0)
    return Workload(
        steps=steps, tokens_per_step=tokens_per_step,
        validation_tokens=float(times * sets * watch.max_tokens),
        scored_tokens=volume.scored_tokens if volume else 0.0,
        answers=volume.answers if volume else 0,
        answer_tokens=volume.answer_tokens if volume else 0,
        saved_states=recipe.checkpoint.keep, data=_words(recipe, volume, steps, tokens_per_step),
    )


def left_out(recipe: Recipe) -> tuple[str, ...]:
    """What a recipe asks for that a plan does not count, in words."""
    tune, notes = recipe.finetune, []
    if tune.lora.overrides or tune.lora.moe_rank_scaling:
        notes.append(f"ranks of single branches: all adapters are planned with rank {tune.lora.rank}")
    if tune.router.train == "full":
        notes.append("routers: planned as frozen, the recipe trains them")
    if tune.vision.projector == "full":
        notes.append("the projector: planned as frozen, the recipe trains it")
    return tuple(notes)


def _words(recipe: Recipe, volume: Volume | None, steps: int, tokens_per_step: int) -> str:
    if volume is None:
        return ""
    ratio = recipe.finetune.data.domain_ratio
    passes = steps * tokens_per_step * volume.filled * ratio / max(1.0, volume.domain_tokens)
    how = "counted" if volume.is_exact else "estimated from the first records of each file"
    return (
        f"{volume.records:,} records, {volume.domain_tokens:,.0f} domain tokens ({how}), "
        f"{passes:.2f} passes over them; packs are {volume.filled:.0%} full"
    )

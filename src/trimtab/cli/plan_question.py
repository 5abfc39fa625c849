"""The flags of `trimtab plan`, with what a recipe says, as a question to the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast, get_args

from trimtab.arch.outline import Outline
from trimtab.cli.target import resolve_outline
from trimtab.config.cluster import Cluster, load_cluster
from trimtab.config.recipe import Recipe
from trimtab.errors import ConfigError
from trimtab.plan.job import (
    DEFAULT_TARGETS,
    FULL_TRAINING,
    BaseDtype,
    Dispatcher,
    ExpertAdapters,
    Job,
    choose_adapters,
)
from trimtab.plan.question import Question
from trimtab.plan.search import GOALS, Goal, Limits

_STEP_TOKENS = 4 * 2**20
_SEQ_LEN = 8192


@dataclass(frozen=True, slots=True)
class Flags:
    """The options of `trimtab plan`; None where one was left out."""

    recipe: Path | None
    model: str | None
    cluster: str | None
    devices: int | None
    packages: int | None
    hosts: int | None
    seq_len: int | None
    tokens_per_step: int | None
    method: str
    base_dtype: str | None
    rank: int | None
    targets: str | None
    experts: str | None
    goal: str
    pp: int | None
    tp: int | None
    cp: int | None
    ep: int | None
    dp_shard: int | None
    stages: str | None
    dispatcher: str | None
    recompute: str | None
    serve: bool
    adapters: int | None
    price: float | None
    histogram: Path | None
    calibrate: bool
    overrides: Sequence[str] | None
    out: Path | None
    html: Path | None
    as_json: bool


# Flags that mean nothing where these others do, or do not, stand.
_TRAINING = ("pp", "tp", "cp", "ep", "dp_shard", "stages", "dispatcher", "recompute", "histogram",
             "html", "out")
_OF_CALIBRATE = ("devices", "out", "as_json", "calibrate", "method", "goal")


def check_flags(flags: Flags) -> None:
    """Raise where a flag would have no effect.

    Raises:
        ConfigError: TT108.
    """
    given = {f.name: value for f in fields(flags) if (value := getattr(flags, f.name)) not in (None, False)}
    needs: dict[str, str] = {}
    if flags.calibrate:
        needs = {name: "has no meaning beside --calibrate" for name in given if name not in _OF_CALIBRATE}
    elif flags.serve:
        needs = dict.fromkeys(_TRAINING, "has no meaning beside --serve")
    else:
        needs = {"adapters": "needs --serve"}
    if flags.recipe is None:
        needs["overrides"] = "needs a recipe"
    for name, rule in needs.items():
        if name in given:
            flag = "--set" if name == "overrides" else f"--{name.replace('_', '-')}"
            raise ConfigError("TT108", flag, rule, value=str(given[name]))


def recipe_of(flags: Flags) -> Recipe | None:
    """The recipe that was named, if one was.

    Raises:
        ConfigError: as `load_recipe`.
    """
    if flags.recipe is None:
        return None
    from trimtab.config.load import load_recipe  # only with a recipe

    return load_recipe(flags.recipe, flags.overrides or (), check_paths=False)


def ask(flags: Flags, recipe: Recipe | None) -> Question:
    """The question that flags and recipe ask; flags win.

    Raises:
        ConfigError: TT108, a flag is missing or cannot be understood.
    """
    named = flags.cluster or (recipe.cluster if recipe else None)
    machine = load_cluster(_required(named, "--cluster", "h200"))
    if flags.price is not None:
        machine = replace(machine, price=flags.price)
    model = flags.model or (recipe.model.path if recipe else None)
    outline = resolve_outline(_required(model, "--model", "a directory with config.json"))
    tune = recipe.finetune if recipe else None
    recompute = flags.recompute or (tune.recompute if tune else None)
    stages = _stages(flags.stages, outline, flags.pp)
    limits = Limits(
        len(stages) if stages else flags.pp, flags.tp, flags.cp, flags.ep, flags.dp_shard,
        cast("Dispatcher | None", _one_of(flags.dispatcher, get_args(Dispatcher), "--dispatcher")),
        cast("None", _one_of(recompute, ("layer", "none"), "--recompute")),
        stages,
    )
    ranks = _ranks(machine, flags, recipe)
    length = flags.seq_len or (tune.data.max_seq_len if tune else _SEQ_LEN)
    tokens = flags.tokens_per_step or (
        tune.batch.tokens_per_step if tune else max(_STEP_TOKENS, _SEQ_LEN * ranks)
    )
    goal = cast(Goal, _one_of(flags.goal, GOALS, "--goal"))
    job = _job(outline, recipe, flags)
    return Question(outline, job, machine, ranks, goal, limits, tokens).with_length(length)


def _required(value: str | None, flag: str, example: str) -> str:
    if value is None:
        raise ConfigError("TT108", f"trimtab plan {flag}", "is required", hint=f"such as {example}")
    return value


def _one_of(value: str | None, allowed: tuple[str, ...], flag: str) -> str | None:
    if value is not None and value not in allowed:
        raise ConfigError("TT108", flag, f"must be one of {', '.join(allowed)}", value=value)
    return value


def _ranks(machine: Cluster, flags: Flags, recipe: Recipe | None) -> int:
    given = [n for n in (flags.devices, flags.packages, flags.hosts) if n is not None]
    if not given and recipe is not None and recipe.devices is not None:
        return recipe.devices
    if len(given) != 1:
        raise ConfigError(
            "TT108", "trimtab plan", "needs one of --devices, --packages and --hosts",
            hint=f"a host of {machine.name} has {machine.ranks_per_host} ranks",
        )
    if flags.devices is not None:
        return flags.devices
    per = machine.ranks_per_package if flags.packages is not None else machine.ranks_per_host
    return given[0] * per


def _stages(text: str | None, outline: Outline, pp: int | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    counts = tuple(int(part) for part in parts if part.strip().isdigit())
    few = len(counts) != len(parts) or (pp is not None and pp != len(counts)) or 0 in counts
    if few or sum(counts) != outline.num_layers:
        many = "" if pp is None else f"{pp} "
        rule = f"must be {many}numbers that add to {outline.num_layers} layers"
        raise ConfigError("TT108", "--stages", rule, value=text)
    return counts


def _job(outline: Outline, recipe: Recipe | None, flags: Flags) -> Job:
    _one_of(flags.method, ("lora", "full"), "--method")
    _one_of(flags.base_dtype, get_args(BaseDtype), "--base-dtype")
    _one_of(flags.experts, get_args(ExpertAdapters), "--experts")
    tune = recipe.finetune if recipe else None
    base = cast(BaseDtype, flags.base_dtype or (tune.base_dtype if tune else "native"))
    factor = recipe.parallel.capacity_factor if recipe else None
    micro = tune.batch.micro_batch_tokens // tune.data.max_seq_len if tune else 1
    if flags.method == "full":
        return Job(method="full", base_dtype=base, micro_batch=micro, stack=FULL_TRAINING)
    words = tuple(flags.targets.split(",")) if flags.targets else (
        tune.lora.target_modules if tune else DEFAULT_TARGETS
    )
    form = cast(ExpertAdapters, flags.experts or (tune.lora.experts if tune else "none"))
    rank = flags.rank or (tune.lora.rank if tune else 32)
    adapters = choose_adapters(outline, rank, words, form)
    return Job(base_dtype=base, micro_batch=micro, adapters=adapters, capacity_factor=factor)

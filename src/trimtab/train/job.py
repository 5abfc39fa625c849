"""A run assembled: weights with adapters, optimizer, data, and the state they continue from.

Knows: the order in which the parts are put together. Does not know: what a step does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import Parameter

from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.source import open_source
from trimtab.config.recipe import Recipe
from trimtab.data.holdout import RecordSubset, split_records
from trimtab.data.image_totals import count_images
from trimtab.data.packing import Pack
from trimtab.data.prompt import load_image_processor
from trimtab.data.records import RecordFile, open_records
from trimtab.data.stream import DataStream
from trimtab.data.tokenizer import load_tokenizer
from trimtab.errors import RunError
from trimtab.models.decoder import CausalLM
from trimtab.models.full import train_full
from trimtab.models.lora import inject, trainable_parameters
from trimtab.train.base_memory import base_memory
from trimtab.train.batch import MicroBatch, micro_batches
from trimtab.train.identity import fixed_hash
from trimtab.train.optimizer import OptimizerOptions, branches_of, build_optimizer
from trimtab.train.plan import BatchPlan, RunPlan
from trimtab.train.reporter import Reporter
from trimtab.train.router_load import RoutingOptions
from trimtab.train.run_dir import RunDirectory, RunRecord, versions
from trimtab.train.schedule import Schedule
from trimtab.train.start import start_from
from trimtab.train.state import TrainState, newest_state, restore_state
from trimtab.train.step import StepOptions
from trimtab.train.validation import held_out_packs

_IMAGES_CHECKED = 20_000  # records per file whose images are looked at before training
_COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the steps need, assembled once."""

    recipe: Recipe
    plan: RunPlan
    run: RunDirectory
    model: CausalLM
    parameters: dict[str, Parameter]
    optimizer: torch.optim.Optimizer
    data: RunData
    schedule: Schedule
    options: StepOptions

    @property
    def total_steps(self) -> int:
        """Optimisation steps of the whole run."""
        return self.schedule.total_steps


@dataclass(frozen=True, slots=True)
class RunData:
    """What is trained on, and what is not.

    Args:
        stream: training packs.
        held_out: packs of held-out records; none without validation.
    """

    stream: DataStream
    held_out: list[Pack]

    def probe(self, plan: BatchPlan) -> MicroBatch:
        """One pack that stays the same over the run, held out if there are such."""
        pack = self.held_out[0] if self.held_out else self.stream.fresh().next_pack()
        (batch,) = micro_batches([pack], plan)
        return batch


def open_data(recipe: Recipe, plan: RunPlan, say: Reporter) -> RunData:
    """The stream of packs, after a look at the images that records name, and held-out packs."""
    data, validate = recipe.finetune.data, recipe.validation
    tokenizer = load_tokenizer(recipe.model.path)
    processor = load_image_processor(recipe.model.path, data.image)
    files: list[RecordFile] = []
    held_out: dict[str, RecordSubset] = {}
    shares = {"domain": validate.domain_holdout, "general": validate.general_holdout}
    for file in data.files:
        records = open_records(file.path, file.form, last_only=file.last_only)
        totals = count_images(records, tokenizer, processor, data, limit=_IMAGES_CHECKED)
        say.say(f"{file.path}: {len(records):,} records of the form {records.form}")
        if totals.images or totals.left_out:
            say.say(f"{file.path}: {totals}")
        if validate.every_steps is not None and shares[file.role] > 0:
            split = split_records(records, shares[file.role])
            say.say(f"{file.path}: {len(split.held_out):,} of {len(records):,} records held out "
                    "for validation")
            records, held_out[file.name] = split.training, split.held_out
        files.append(records)
    stream = DataStream(data, tokenizer, recipe.seed, plan.arch.vocab_size, processor, files)
    return RunData(stream, held_out_packs(held_out, data, tokenizer, processor, validate.max_tokens))


def assemble(
    recipe: Recipe, plan: RunPlan, run: RunDirectory, data: RunData, say: Reporter
) -> Job:
    """Load weights, inject adapters, set up optimizer and schedule."""
    length = recipe.finetune
    steps = length.steps
    if steps is None:
        assert length.epochs is not None, "a recipe has steps or epochs"
        steps = data.stream.steps_for_epochs(length.epochs, plan.batch.tokens_per_step)
        say.say(f"{length.epochs:g} epochs = {steps} steps")
    compute = None if length.compute_dtype == "auto" else _COMPUTE[length.compute_dtype]
    with say.progress("loading weights (%)") as update:
        model, _ = load_model(
            recipe.model.path, base_dtype=length.base_dtype, compute_dtype=compute,
            vision=plan.vision, ops=recipe.ops,
            progress=lambda done, total: update(100 * done // max(1, total), 100),
        )
    say.say(str(base_memory(model, plan.arch)))
    inject(model, plan.targets, recipe.seed)
    train_full(model, [param.name for param in plan.full])
    parameters = trainable_parameters(model)
    if length.lora.init_from is not None:
        fingerprint = open_source(recipe.model.path).fingerprint()
        say.say(start_from(length.lora.init_from, plan.arch, plan.targets, parameters, fingerprint))
    settings = length.optimizer
    # A rate for the projector stands in recipes whose data has no images; the plan says so.
    rates = {str(k): v for k, v in settings.lr_by_branch.items() if k != "projector" or plan.vision}
    options = OptimizerOptions(settings.lr, rates, settings.weight_decay,
                               lora_b_lr_ratio=settings.lora_b_lr_ratio)
    return Job(
        recipe, plan, run, model, parameters,
        build_optimizer(parameters, plan.targets, options), data,
        Schedule.from_ratio(settings.scheduler, steps, settings.warmup_ratio),
        StepOptions(plan.batch, recipe.seed, settings.max_grad_norm, length.on_nan,
                    length.recompute, branches_of(parameters, plan.targets),
                    RoutingOptions(length.router.balance, length.router.aux_loss_coef,
                                   recipe.parallel.capacity_factor)),
    )


def begin(
    job: Job, record: RunRecord | None, inputs: dict[str, str], say: Reporter
) -> tuple[TrainState, RunRecord]:
    """Claim the directory, or restore the newest state of the run that owns it.

    Args:
        job: as assembled.
        record: of the run to continue, None for a new one.
        inputs: see `run_dir.input_hashes`.
        say: where words go.

    Raises:
        RunError: TT601 the run is asked to be shorter than it is, TT603 the state does not fit.
    """
    length, threads = job.recipe.finetune, torch.get_num_threads()
    fresh = RunRecord(
        status="running", step=0, total_steps=job.total_steps, seed=job.recipe.seed,
        threads=threads, inputs=inputs, versions=versions(), steps_asked=length.steps,
        epochs_asked=length.epochs,
    )
    # Without defaults, so that a key added by a later version does not orphan a running job.
    identity = fixed_hash(job.recipe.model_dump(mode="json", exclude_defaults=True))
    state = TrainState(0, {}, identity)
    if record is not None:
        if record.threads != threads:
            say.say(f"warning: {threads} threads, the run began with {record.threads}: "
                    "losses continue within rounding, not bit for bit")
        newest = newest_state(job.run.checkpoints)
        if newest is not None:
            state = restore_state(newest, job.parameters, job.optimizer)
            if state.identity != identity:
                raise RunError("TT603", str(newest), "was saved by a run with another recipe",
                               hint="put back the checkpoints of this run")
            job.data.stream.restore(state.data)
        if state.step > job.total_steps:
            raise RunError("TT601", "finetune.steps", f"the run has done {state.step} steps; "
                           "a run can be made longer, not shorter", value=job.total_steps)
        say.say(f"continuing {job.run.root} after step {state.step}")
        fresh = replace(fresh, step=state.step, wall_s=record.wall_s, starts=record.starts + 1,
                        peak_memory_gib=record.peak_memory_gib)
    job.run.begin(job.recipe, fresh)
    return state, fresh

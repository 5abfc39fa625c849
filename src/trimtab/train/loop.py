"""The fine-tuning run: recipe in, checked adapter out.

Knows: the order of things. Does not know: how a run is put together (`job`), how one step computes
(`step`), what a state holds (`state`), whose a directory is (`run_dir`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trimtab.checkpoint.adapter import AdapterMeta, save_adapter
from trimtab.checkpoint.source import open_source
from trimtab.config.recipe import Recipe
from trimtab.data.packing import Pack
from trimtab.train.adapter_check import check_adapter_file, check_merge
from trimtab.train.batch import micro_batches
from trimtab.train.images import describe_features, first_with_images
from trimtab.train.job import Job, assemble, begin, open_stream
from trimtab.train.memory import peak_memory_gib
from trimtab.train.metrics import MetricsWriter
from trimtab.train.optimizer import set_learning_rate
from trimtab.train.plan import RunPlan, plan_run
from trimtab.train.reach import Reach
from trimtab.train.reporter import ConsoleReporter, Reporter
from trimtab.train.router_load import RouterLoad
from trimtab.train.run_dir import (
    RunDirectory,
    RunRecord,
    check_owner,
    input_hashes,
)
from trimtab.train.state import TrainState, save_state
from trimtab.train.step import StepResult, train_step
from trimtab.verdict import Verdict


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run ended with.

    Args:
        output: run directory.
        adapter: PEFT directory.
        steps: optimisation steps of the whole run.
        resumed_from: step it continued from, 0 for a new run.
        was_finished: nothing was left to do.
        first_loss, last_loss: mean token loss of the first and last step of this start.
        tokens_per_second: of this start, pads included.
        wall_s: seconds of training over all starts.
        peak_memory_gib: highest resident memory over all starts.
        trainable_parameters, trainable_share: adapter elements, and over base elements.
        verdicts: checks of the adapter.
    """

    output: str
    adapter: str
    steps: int
    resumed_from: int
    was_finished: bool
    first_loss: float | None
    last_loss: float | None
    tokens_per_second: float
    wall_s: float
    peak_memory_gib: float
    trainable_parameters: int
    trainable_share: float
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether every check of the adapter passed."""
        return all(verdict.passed for verdict in self.verdicts)

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {**asdict(self), "passed": self.passed}


def finetune(recipe: Recipe, reporter: Reporter | None = None) -> RunResult:
    """Train an adapter as the recipe says, or continue, or say that it is done.

    The output directory decides: absent or empty starts anew; a directory of the same run
    continues from its newest whole state, bit for bit; a finished one returns at once.

    Args:
        recipe: a checked recipe.
        reporter: None for stderr.

    Raises:
        RunError: TT601 the directory is another run's, TT602 loss not finite, TT603 damaged state.
        TrimtabError: anything wrong with model, data or targets; nothing is written then.
    """
    say = ConsoleReporter() if reporter is None else reporter
    run = RunDirectory(Path(recipe.output))
    inputs = input_hashes(recipe)
    record = check_owner(run, recipe, inputs)
    plan = plan_run(recipe)
    if record is not None and _is_finished(recipe, record, run):
        say.say(f"{run.root} is finished: {record.step} steps; nothing to do")
        return _finished(run, plan, record)
    say.plan(plan)
    stream = open_stream(recipe, plan, say)
    if record is None:
        with say.progress("checking records") as update:
            stream.check_records(update)
    job = assemble(recipe, plan, run, stream, say)
    state, record = begin(job, record, inputs, say)
    losses, speed, record = _run_steps(job, state, record, say)
    record, verdicts = _finish(job, record, say)
    return RunResult(
        output=str(run.root), adapter=str(run.adapter), steps=record.step,
        resumed_from=state.step, was_finished=False,
        first_loss=losses[0] if losses else None, last_loss=losses[-1] if losses else None,
        tokens_per_second=speed, wall_s=record.wall_s, peak_memory_gib=record.peak_memory_gib,
        trainable_parameters=plan.table.num_parameters, trainable_share=plan.trainable_share,
        verdicts=verdicts,
    )


def _is_finished(recipe: Recipe, record: RunRecord, run: RunDirectory) -> bool:
    """Whether nothing is left to do: the same length was reached and the adapter is there."""
    asked = (recipe.finetune.steps, recipe.finetune.epochs)
    same_length = asked == (record.steps_asked, record.epochs_asked)
    return record.status == "finished" and same_length and run.adapter.is_dir()


def _finished(run: RunDirectory, plan: RunPlan, record: RunRecord) -> RunResult:
    return RunResult(
        output=str(run.root), adapter=str(run.adapter), steps=record.step,
        resumed_from=record.step, was_finished=True, first_loss=None,
        last_loss=None, tokens_per_second=0.0, wall_s=record.wall_s,
        peak_memory_gib=record.peak_memory_gib,
        trainable_parameters=plan.table.num_parameters, trainable_share=plan.trainable_share,
        verdicts=record.verdicts,
    )


def _run_steps(
    job: Job, state: TrainState, record: RunRecord, say: Reporter
) -> tuple[list[float], float, RunRecord]:
    """All remaining steps; returns their losses, tokens per second and the record so far."""
    losses: list[float] = []
    parameters = list(job.parameters.values())
    batch, saving = job.plan.batch, job.recipe.checkpoint
    started, before = time.perf_counter(), record.wall_s
    described = False
    reach = Reach(job.parameters, job.plan.targets, resumed=state.step > 0,
                  check_steps=job.recipe.finetune.lora.check_steps)
    with (
        MetricsWriter(job.run.metrics, keep_through=state.step) as metrics,
        say.progress("training") as update,
    ):
        for step in range(state.step, job.total_steps):
            begun = time.perf_counter()
            packs = [job.stream.next_pack() for _ in range(batch.packs_per_step)]
            described = described or _describe_images(job, packs, say)
            factor = job.schedule.factor(step)
            set_learning_rate(job.optimizer, factor)
            rate = job.recipe.finetune.optimizer.lr * factor
            load = RouterLoad()
            result = train_step(job.model, packs, parameters, job.optimizer, step=step,
                                options=job.options, load=load)
            if not result.skipped:
                saw_images = any(pack.images for pack in packs)
                for line in reach.after_step(step, saw_images=saw_images):
                    say.say(line)
            losses.append(result.loss)
            metrics.write(_row(job, step, rate, result, packs, load, time.perf_counter() - begun))
            update(step + 1, job.total_steps, f"loss {result.loss:.4f}")
            if (step + 1) % saving.every_steps == 0 or step + 1 == job.total_steps:
                done = TrainState(step + 1, job.stream.state(), state.identity)
                save_state(job.run.checkpoints, done, job.parameters, job.optimizer,
                           keep=saving.keep)
                record = replace(
                    record, step=step + 1, wall_s=before + time.perf_counter() - started,
                    peak_memory_gib=max(record.peak_memory_gib, peak_memory_gib()),
                )
                job.run.write(record)
    elapsed = record.wall_s - before
    speed = len(losses) * batch.tokens_per_step / elapsed if losses else 0.0
    return losses, speed, record


def _describe_images(job: Job, packs: Sequence[Pack], say: Reporter) -> bool:
    """Say once what the first images become; True where there were some."""
    batch = first_with_images(micro_batches(packs, job.plan.batch))
    if batch is not None:
        say.say(describe_features(job.model, batch))
    return batch is not None


def _row(
    job: Job, step: int, rate: float, result: StepResult, packs: Sequence[Pack],
    load: RouterLoad, elapsed: float,
) -> dict[str, object]:
    """One line of metrics.jsonl; `lr` is that of targets without a rate of their own."""
    tokens = job.plan.batch.tokens_per_step
    real = sum(int(pack.valid.sum()) for pack in packs)
    files = [file.name for file in job.recipe.finetune.data.files if file.role == "domain"]
    domain = sum(pack.tokens_by_source.get(name, 0) for pack in packs for name in files)
    return {
        "step": step + 1,
        "loss": result.loss,
        "lr": rate,
        "grad_norm": result.grad_norm,
        "tokens": tokens,
        "real_tokens": real,
        "supervised_tokens": result.supervised_tokens,
        "domain_share": domain / max(1, real),
        "tokens_per_second": round(tokens / elapsed, 1),
        "step_time_s": round(elapsed, 4),
        "peak_memory_gib": round(peak_memory_gib(), 4),
        "router_max_over_mean": load.max_over_mean(),
        "skipped": result.skipped,
    }


def _finish(
    job: Job, record: RunRecord, say: Reporter
) -> tuple[RunRecord, tuple[Verdict, ...]]:
    """Write the adapter, check it, and close the run's record."""
    adapter = job.run.adapter
    # An adapter from before a kill or from a shorter run is made anew from the same state.
    shutil.rmtree(adapter, ignore_errors=True)
    meta = AdapterMeta(job.recipe.model.path, open_source(job.recipe.model.path).fingerprint(),
                       {"steps": record.step})
    save_adapter(adapter, job.plan.arch, job.plan.targets, job.parameters, meta)
    (probe,) = micro_batches([job.stream.next_pack()], job.plan.batch)
    verdicts = (
        check_adapter_file(adapter, job.plan.arch, job.parameters),
        *check_merge(job.model, probe),
    )
    for verdict in verdicts:
        say.say(str(verdict))
    record = replace(record, status="finished", verdicts=verdicts)
    job.run.write(record)
    return record, verdicts

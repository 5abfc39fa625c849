"""The steps of a run: pack, step, watch, validate, save.

Knows: the order of things around one step. Does not know: how a step computes, where rows go.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.checkpoint.adapter import AdapterMeta, save_adapter
from trimtab.checkpoint.adapter_card import CardFacts, licence_of
from trimtab.checkpoint.source import open_source
from trimtab.data.packing import Pack
from trimtab.train.batch import MicroBatch, micro_batches
from trimtab.train.images import describe_features, first_with_images
from trimtab.train.job import Job
from trimtab.train.lock import StopRequest
from trimtab.train.memory import peak_memory_gib
from trimtab.train.metrics import read_metrics
from trimtab.train.mirror import Mirror
from trimtab.train.optimizer import set_learning_rate
from trimtab.train.reach import Reach
from trimtab.train.reporter import Reporter
from trimtab.train.router_load import RouterLoad
from trimtab.train.run_dir import RunRecord
from trimtab.train.saver import Saver
from trimtab.train.state import TrainState
from trimtab.train.step import train_step
from trimtab.train.trackers import open_trackers
from trimtab.train.validation import LOSS_KEY, Progress, validation_losses
from trimtab.train.watch import ExpertLog, Watch, stretch, words


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the steps of this start ended with.

    Args:
        losses: of every step of this start.
        record: of the run, as last written.
        stopped: asked to end before the last step.
    """

    losses: list[float]
    record: RunRecord
    stopped: bool


def run_steps(
    job: Job, state: TrainState, record: RunRecord, say: Reporter, stop: StopRequest,
    mirror: Mirror | None = None,
) -> Outcome:
    """All remaining steps, or those until the process is asked to stop."""
    with (
        open_trackers(job.recipe.track, job.run.root, job.run.metrics, state.step,
                      say.say) as trackers,
        nullcontext() if mirror is None else mirror,
        Saver(job.run.checkpoints, keep=job.recipe.checkpoint.keep, mirror=mirror) as saver,
        say.progress("training") as update,
    ):
        steps = _Steps(job, state, record, say, saver)
        row = steps.before()
        if row is not None:
            trackers.write(row)
        while not steps.done and not stop:
            row = steps.next()
            trackers.write(row)
            update(steps.step, job.total_steps, words(row))
            steps.save_if_due(stop)
    return Outcome(steps.losses, steps.record, stopped=bool(stop) and not steps.done)


class _Steps:
    """The moving parts of `run_steps`."""

    def __init__(
        self, job: Job, state: TrainState, record: RunRecord, say: Reporter, saver: Saver
    ) -> None:
        self.job, self.say, self.saver = job, say, saver
        self.step, self.record, self.identity = state.step, record, state.identity
        self.losses: list[float] = []
        self._started, self._before = time.perf_counter(), record.wall_s
        self._saved, self._described, self._drift_told = state.step, False, False
        self._watch = Watch(job)
        self._reach = Reach(job.parameters, job.plan.targets, resumed=state.step > 0,
                            check_steps=job.recipe.finetune.lora.check_steps)
        every = stretch(job.total_steps, job.recipe.checkpoint.every_steps)
        self._experts = ExpertLog(job.run.experts, state.step, every)
        metrics = job.run.metrics
        self._progress = Progress.of(read_metrics(metrics) if metrics.exists() else ())
        self._probe: MicroBatch = job.data.probe(job.plan.batch)

    @property
    def done(self) -> bool:
        """The last step is done, or validation has ended the run."""
        limit = self.job.recipe.validation.stop_after
        return self.step >= self.job.total_steps or (
            limit is not None and self._progress.worse >= limit
        )

    def before(self) -> dict[str, object] | None:
        """A row with the validation of the base; None where there is no validation."""
        if self.step > 0 or not self.job.data.held_out:
            return None
        return {"step": 0, **self._validated()}

    def next(self) -> dict[str, object]:
        """One step and its row."""
        job, begun = self.job, time.perf_counter()
        packs = [job.data.stream.next_pack() for _ in range(job.plan.batch.packs_per_step)]
        if not self.losses:
            self._watch.count_operations(next(micro_batches(packs, job.plan.batch)))
            begun = time.perf_counter()
        self._described = self._described or self._describe_images(packs)
        factor = job.schedule.factor(self.step)
        set_learning_rate(job.optimizer, factor)
        rate = job.recipe.finetune.optimizer.lr * factor
        load = RouterLoad(histograms=job.options.routing.balance == "quantile")
        result = train_step(job.model, packs, list(job.parameters.values()), job.optimizer,
                            step=self.step, options=job.options, load=load)
        if result.skipped:
            self.say.say(f"warning: step {self.step + 1} is left out: {result.fault}")
        else:
            saw_images = any(pack.images for pack in packs)
            for line in self._reach.after_step(self.step, saw_images=saw_images):
                self.say.say(line)
        elapsed = time.perf_counter() - begun
        row = self._watch.row(self.step, rate, result, packs, load, elapsed)
        self.losses.append(result.loss)
        self.step += 1
        row |= self._validation() | self._drift()
        self._experts.add(self.step, load, saves=self._save_is_due())
        return row

    def save_if_due(self, stop: StopRequest) -> None:
        """Save at the interval, at the end, and when asked to stop."""
        if not (self._save_is_due() or stop or self.done) or self._saved == self.step:
            return
        self._saved = self.step
        done = TrainState(self.step, self.job.data.stream.state(), self.identity)
        self.saver.save(done, self.job.parameters, self.job.optimizer)
        self.record = replace(
            self.record, step=self.step,
            wall_s=self._before + time.perf_counter() - self._started,
            peak_memory_gib=max(self.record.peak_memory_gib, peak_memory_gib()),
        )
        self.job.run.write(self.record)

    def _save_is_due(self) -> bool:
        every = self.job.recipe.checkpoint.every_steps
        return self.step % every == 0 or self.step == self.job.total_steps

    def _validation(self) -> dict[str, object]:
        every = self.job.recipe.validation.every_steps
        last = self.step == self.job.total_steps
        if every is None or not self.job.data.held_out or (self.step % every and not last):
            return {}
        return self._validated()

    def _validated(self) -> dict[str, object]:
        losses = validation_losses(self.job.model, self.job.data.held_out, self.job.plan.batch)
        found = losses.get(LOSS_KEY["domain"])
        best = found is not None and self._progress.add(self.step, found)
        if best and self.step > 0 and self.job.recipe.validation.keep_best:
            results = [(key, f"{value:.4g} nats per token") for key, value in losses.items()]
            write_adapter(self.job, self.record, self.job.run.best, self.step, results)
        return dict(losses)

    def _drift(self) -> dict[str, object]:
        settings = self.job.recipe.finetune.drift
        every = settings.every_steps
        due = self._save_is_due() if every is None else self.step % every == 0
        found = self._watch.drift(self._probe) if due else None
        if found is None:
            return {}
        layer, kl = found.worst
        if kl > settings.alert and not self._drift_told:
            self._drift_told = True
            self.say.say(
                f"warning: the routing of layer {layer} is {kl:.3g} nats away from the base's "
                f"(finetune.drift.alert {settings.alert:g}): lower the learning rate, or give "
                "the layers before it less rank"
            )
        return found.row()

    def _describe_images(self, packs: Sequence[Pack]) -> bool:
        """Say once what the first images become; True where there were some."""
        batch = first_with_images(micro_batches(packs, self.job.plan.batch))
        if batch is not None:
            self.say.say(describe_features(self.job.model, batch))
        return batch is not None


def write_adapter(
    job: Job, record: RunRecord, path: Path, step: int, results: Sequence[tuple[str, str]]
) -> None:
    """Write the adapter as it is now, in place of one that is there.

    Args:
        job: the run.
        record: its inputs and versions.
        path: directory.
        step: steps trained.
        results: for the model card.
    """
    fresh = path.with_name(f"{path.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    source = open_source(job.recipe.model.path)
    base = job.recipe.model
    facts = CardFacts(
        base.revision, licence_of(source),
        [(Path(name).name, digest) for name, digest in record.inputs.items() if name != base.path],
        [("steps", str(step)), *results], record.versions,
    )
    meta = AdapterMeta(base.path, source.fingerprint(), {"steps": step}, facts=facts)
    save_adapter(fresh, job.plan.arch, job.plan.targets, job.parameters, meta)
    shutil.rmtree(path, ignore_errors=True)
    fresh.rename(path)

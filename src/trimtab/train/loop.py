"""The fine-tuning run: recipe in, checked adapter out.

Knows: the order of things. Does not know: how a run is put together (`job`), how one step computes
(`step`), what a state holds (`state`), whose a directory is (`run_dir`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trimtab.config.recipe import Recipe
from trimtab.errors import RunError
from trimtab.train.adapter_check import check_adapter_file, check_merge
from trimtab.train.allocator import give_blocks_back
from trimtab.train.batch import micro_batches
from trimtab.train.forecast import compared, forecast
from trimtab.train.job import Job, assemble, begin, open_data
from trimtab.train.lock import StopRequest, locked, stop_on_sigterm
from trimtab.train.memory import peak_memory_gib
from trimtab.train.metrics import read_metrics
from trimtab.train.mirror import open_mirror
from trimtab.train.plan import RunPlan, plan_run
from trimtab.train.report_page import write_report
from trimtab.train.reporter import ConsoleReporter, Reporter
from trimtab.train.run_dir import RunDirectory, RunRecord, check_owner, input_hashes
from trimtab.train.saver import MAKE_ROOM, is_full
from trimtab.train.steps import run_steps, write_adapter
from trimtab.train.trackers import require_trackers
from trimtab.train.validation import LOSS_KEY
from trimtab.verdict import Verdict

_LOSSES = ("loss", *LOSS_KEY.values())


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run ended with.

    Args:
        output: run directory.
        adapter: PEFT directory.
        steps: optimisation steps of the whole run.
        resumed_from: step it continued from, 0 for a new run.
        was_finished: nothing was left to do.
        stopped: asked to end before the last step; the state is saved, there is no adapter yet.
        first_loss, last_loss: mean token loss of the first and last step of this start.
        tokens_per_second: of this start, pads included.
        wall_s: seconds of training over all starts.
        peak_memory_gib: highest resident memory over all starts.
        predicted_memory_gib: the peak expected before the first step of this start; None where it
            is not known.
        trainable_parameters, trainable_share: adapter elements, and over base elements.
        verdicts: checks of the adapter.
    """

    output: str
    adapter: str
    steps: int
    resumed_from: int
    was_finished: bool
    stopped: bool
    first_loss: float | None
    last_loss: float | None
    tokens_per_second: float
    wall_s: float
    peak_memory_gib: float
    trainable_parameters: int
    trainable_share: float
    verdicts: tuple[Verdict, ...]
    predicted_memory_gib: float | None = None

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
    continues from its newest whole state, bit for bit; a finished one returns at once. SIGTERM
    ends the run after the step it is in, with its state saved.

    Args:
        recipe: a checked recipe.
        reporter: None for stderr.

    Raises:
        RunError: TT601 the directory is another run's or in use, TT602 loss not finite, TT603
            damaged state, TT311 the disk is full.
        TrimtabError: anything wrong with model, data or targets; nothing is written then.
    """
    say = ConsoleReporter() if reporter is None else reporter
    run = RunDirectory(Path(recipe.output))
    give_blocks_back()
    with locked(run.root) as alone, stop_on_sigterm() as stop:
        if not alone:
            say.say(f"warning: {run.root} cannot be locked; see that no other process uses it")
        try:
            return _finetune(recipe, run, say, stop)
        except OSError as error:
            if not is_full(error):
                raise
            raise RunError("TT311", str(run.root), f"cannot be written: {error.strerror}",
                           hint=MAKE_ROOM) from error


def _finetune(recipe: Recipe, run: RunDirectory, say: Reporter, stop: StopRequest) -> RunResult:
    inputs = input_hashes(recipe)
    record = check_owner(run, recipe, inputs)
    plan = plan_run(recipe)
    if record is not None and _is_finished(recipe, record, run):
        say.say(f"{run.root} is finished: {record.step} steps; nothing to do")
        return _result(run, plan, record, (), resumed_from=record.step, was_finished=True)
    say.plan(plan)
    require_trackers(recipe.track)
    mirror = open_mirror(recipe.checkpoint, say.say)
    data = open_data(recipe, plan, say)
    if record is None:
        with say.progress("checking records") as update:
            data.stream.check_records(update)
        for line in data.stream.left_out():
            say.say(f"warning: {line}")
    job = assemble(recipe, plan, run, data, say)
    state, record = begin(job, record, inputs, say)
    expected = forecast(recipe, plan)
    for line in () if expected is None else expected.lines():
        say.say(line)
    before = record.wall_s
    outcome = run_steps(job, state, record, say, stop, mirror)
    record = outcome.record
    if outcome.stopped:
        say.say(f"stopped after step {state.step + len(outcome.losses)} of {job.total_steps}; "
                "the same command continues")
    else:
        record = _finish(job, record, say)
    for line in (*data.stream.fed(), *data.stream.left_out()):
        say.say(f"data: {line}")
    say.say(compared(expected, peak_memory_gib()))
    say.say(f"curves: {write_report(run)}")
    result = _result(run, plan, record, outcome.losses, resumed_from=state.step)
    tokens = len(outcome.losses) * plan.batch.tokens_per_step
    speed = tokens / (record.wall_s - before) if record.wall_s > before else 0.0
    predicted = None if expected is None else expected.peak_gib
    return replace(result, tokens_per_second=speed, stopped=outcome.stopped,
                   predicted_memory_gib=predicted)


def _is_finished(recipe: Recipe, record: RunRecord, run: RunDirectory) -> bool:
    """Whether nothing is left to do: the same length was reached and the adapter is there."""
    asked = (recipe.finetune.steps, recipe.finetune.epochs)
    same_length = asked == (record.steps_asked, record.epochs_asked)
    return record.status == "finished" and same_length and run.adapter.is_dir()


def _result(
    run: RunDirectory, plan: RunPlan, record: RunRecord, losses: Sequence[float], *,
    resumed_from: int, was_finished: bool = False,
) -> RunResult:
    return RunResult(
        output=str(run.root), adapter=str(run.adapter), steps=record.step,
        resumed_from=resumed_from, was_finished=was_finished, stopped=False,
        first_loss=losses[0] if losses else None, last_loss=losses[-1] if losses else None,
        tokens_per_second=0.0, wall_s=record.wall_s, peak_memory_gib=record.peak_memory_gib,
        trainable_parameters=plan.table.num_parameters, trainable_share=plan.trainable_share,
        verdicts=record.verdicts,
    )


def _finish(job: Job, record: RunRecord, say: Reporter) -> RunRecord:
    """Write the adapter, check it, and close the run's record."""
    (probe,) = micro_batches([job.data.stream.next_pack()], job.plan.batch)
    merged = check_merge(job.model, probe)
    # An adapter from before a kill or from a shorter run is made anew from the same state.
    results = [*_losses(job.run), *((v.name, f"{v.measured:.2g}") for v in merged)]
    write_adapter(job, record, job.run.adapter, record.step, results)
    verdicts = (check_adapter_file(job.run.adapter, job.plan.arch, job.parameters), *merged)
    for verdict in verdicts:
        say.say(str(verdict))
    record = replace(record, status="finished", verdicts=verdicts)
    job.run.write(record)
    return record


def _losses(run: RunDirectory) -> list[tuple[str, str]]:
    """The last value of every loss in the metrics, nats per token."""
    last: dict[str, object] = {}
    for row in read_metrics(run.metrics) if run.metrics.exists() else ():
        last |= {key: value for key, value in row.items() if key in _LOSSES}
    return [(key, f"{value:.4g} nats per token") for key, value in last.items()]

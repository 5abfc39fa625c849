"""Where the numbers of a run go: metrics.jsonl always, TensorBoard or MLflow where asked for.

Knows: rows of numbers and how each tracker takes them. Does not know: what the numbers mean.

A row is flat or one level deep; trackers other than the file get its numbers only, those one level
deep under `key/name`. A resumed run continues the same curves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from trimtab.errors import RunError
from trimtab.train.metrics import MetricsWriter, Row

_RUN_ID_FILE = "mlflow_run_id"


class Tracker(Protocol):
    """Takes the rows of a run."""

    def write(self, row: Row) -> None:
        """One row, with the number of steps done under `step`."""

    def close(self) -> None:
        """Nothing comes any more."""


class TensorBoardTracker:
    """Event files in `RUN/tensorboard`.

    Args:
        root: run directory.
        step: steps done; events of later ones are hidden.

    Raises:
        RunError: TT604 without the package.
    """

    def __init__(self, root: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._writer = SummaryWriter(str(root / "tensorboard"), purge_step=step + 1)

    def write(self, row: Row) -> None:
        """One row as scalars."""
        step = int(str(row["step"]))
        for name, value in numbers(row):
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class MlflowTracker:
    """A run of MLflow, at the place that MLFLOW_TRACKING_URI names.

    Args:
        root: run directory; keeps the id of the MLflow run, so that a resumed run continues it.

    Raises:
        RunError: TT604 without the package.
    """

    def __init__(self, root: Path) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise _missing("mlflow") from None
        self._client = MlflowClient()
        kept = root / _RUN_ID_FILE
        if kept.exists():
            self._run = kept.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
        else:
            experiment = self._client.get_experiment_by_name("trimtab")
            identity = (self._client.create_experiment("trimtab") if experiment is None
                        else experiment.experiment_id)
            self._run = self._client.create_run(identity, run_name=root.name).info.run_id
            kept.write_text(self._run + "\n", encoding="utf-8")

    def write(self, row: Row) -> None:
        """One row as metrics."""
        step = int(str(row["step"]))
        for name, value in numbers(row):
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class Trackers:
    """All trackers of a run as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def write(self, row: Row) -> None:
        """Give a row to each."""
        for tracker in self._trackers:
            tracker.write(row)


@contextmanager
def open_trackers(
    names: Sequence[str], root: Path, metrics: Path, step: int
) -> Iterator[Trackers]:
    """The trackers of a recipe, closed at the end of the block.

    Args:
        names: of `track`; the file is written whether named or not.
        root: run directory.
        metrics: metrics.jsonl.
        step: steps done when the run continues.

    Raises:
        RunError: TT604, a package is missing.
    """
    with ExitStack() as stack:
        found: list[Tracker] = []
        for name in dict.fromkeys(names):
            tracker: Tracker
            if name == "tensorboard":
                tracker = TensorBoardTracker(root, step)
            elif name == "mlflow":
                tracker = MlflowTracker(root)
            else:
                continue
            stack.callback(tracker.close)
            found.append(tracker)
        # The file is opened last: it drops rows of later steps, which a missing package must not.
        file = MetricsWriter(metrics, keep_through=step)
        stack.callback(file.close)
        yield Trackers([file, *found])


def numbers(row: Row) -> Iterator[tuple[str, float]]:
    """The numbers of a row by name, without `step`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            for inner, number in value.items():
                if isinstance(number, int | float):
                    yield f"{name}/{inner}", float(number)
        elif isinstance(value, int | float) and name != "step":
            yield name, float(value)


def _missing(package: str) -> RunError:
    return RunError("TT604", "track", f"{package} is not installed", value=package,
                    hint=f"pip install 'trimtab[{package}]'")

"""Where the numbers of a run go: metrics.jsonl always, TensorBoard or MLflow where asked for.

Knows: rows of numbers and how each tracker takes them. Does not know: what the numbers mean.

A row is flat or one level deep; trackers other than the file get its numbers only, those one level
deep under `key/name`. A resumed run continues the same curves. A tracker that fails once a run is
under way is left alone from then on: the file has every row, and no run ends for a server.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
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
        from mlflow.entities import Metric

        step, now = int(str(row["step"])), int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in numbers(row)]
        self._client.log_batch(self._run, metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class _Guarded:
    """A tracker whose first failure is told, and which then gets no more rows.

    Args:
        name: of the tracker.
        tracker: opened.
        say: told of the failure.
    """

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._works = True

    def write(self, row: Row) -> None:
        """One row, as long as none failed."""
        self._try(lambda: self._tracker.write(row))

    def close(self) -> None:
        """Close what still works."""
        self._try(self._tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001  # clients raise what they like, and none may end a run
            self._works = False
            self._say(f"warning: {self._name} gets no more rows of this run: {_without_secrets(error)}; "
                      "metrics.jsonl has all of them")


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
    names: Sequence[str], root: Path, metrics: Path, step: int, say: Callable[[str], None]
) -> Iterator[Trackers]:
    """The trackers of a recipe, closed at the end of the block.

    Args:
        names: of `track`; the file is written whether named or not.
        root: run directory.
        metrics: metrics.jsonl.
        step: steps done when the run continues.
        say: told of a tracker that fails later.

    Raises:
        RunError: TT604, a package is missing; TT607, a tracker cannot be opened.
    """
    with ExitStack() as stack:
        found: list[Tracker] = []
        for name in dict.fromkeys(names):
            if name == "jsonl":
                continue
            tracker = _Guarded(name, _open(name, root, step), say)
            stack.callback(tracker.close)
            found.append(tracker)
        # The file is opened last: it drops rows of later steps, which a missing package must not.
        file = MetricsWriter(metrics, keep_through=step)
        stack.callback(file.close)
        yield Trackers([file, *found])


def require_trackers(names: Sequence[str]) -> None:
    """Raise TT604 where the package of a tracker is missing; none is opened."""
    for name in names:
        if name != "jsonl" and find_spec(name) is None:
            raise _missing(name)


def _open(name: str, root: Path, step: int) -> Tracker:
    try:
        return TensorBoardTracker(root, step) if name == "tensorboard" else MlflowTracker(root)
    except RunError:
        raise
    except Exception as error:
        raise RunError("TT607", "track", f"cannot be opened: {_without_secrets(error)}", value=name,
                       hint="check its address, or leave it out of `track`") from error


def _without_secrets(error: Exception) -> str:
    """Kind and first line of an error, without what URLs may hold of users, passwords and keys."""
    first = (str(error).strip().splitlines() or [""])[0]
    words = re.sub(r"\?\S+", "", re.sub(r"//[^/\s@]*@", "//", first))
    return f"{type(error).__name__}: {words[:200]}"


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

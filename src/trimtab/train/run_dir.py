"""The run directory: whose it is, how far it got, and its record in run.json.

Knows: the files of a run and when a directory may be continued. Does not know: torch, models.

    resolved.yaml  the recipe with all defaults, itself a valid recipe
    run.json       status, versions, seed, input hashes, times, peak memory
    metrics.jsonl  one row per step
    checkpoints/   training states
    experts.jsonl  tokens per expert, summed over stretches of steps
    adapter/       the result, in PEFT's format
    adapter-best/  the adapter with the lowest validation loss
    report.html    curves and expert maps, self-contained
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from trimtab.checkpoint.adapter import WEIGHTS_NAME
from trimtab.checkpoint.manifest import file_sha256, write_atomic
from trimtab.checkpoint.source import open_source
from trimtab.config.load import dump_recipe, load_recipe
from trimtab.config.recipe import Recipe
from trimtab.data.arrow import arrow_files
from trimtab.errors import RunError
from trimtab.train.identity import FREE_KEYS, fixed_differences
from trimtab.verdict import Verdict

RUN_FORMAT = 1
Status = Literal["running", "finished"]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Contents of run.json.

    Args:
        status: `finished` once the adapter is written.
        step: optimisation steps done when last written.
        total_steps: steps of the run.
        seed: of everything random.
        threads: of the numeric library; bits are the same for the same number only.
        inputs: see `input_hashes`.
        versions: of Python and the packages that matter.
        steps_asked, epochs_asked: length in the recipe's own words.
        wall_s: seconds of training, over all starts.
        peak_memory_gib: highest resident memory of any start.
        starts: how often the run was started.
        verdicts: checks of the finished adapter.
    """

    status: Status
    step: int
    total_steps: int
    seed: int
    threads: int
    inputs: dict[str, str]
    versions: dict[str, str]
    steps_asked: int | None = None
    epochs_asked: float | None = None
    wall_s: float = 0.0
    peak_memory_gib: float = 0.0
    starts: int = 1
    verdicts: tuple[Verdict, ...] = ()
    format: int = RUN_FORMAT


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run."""

    root: Path

    @property
    def resolved(self) -> Path:
        """The resolved recipe."""
        return self.root / "resolved.yaml"

    @property
    def record(self) -> Path:
        """run.json."""
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Directory of training states."""
        return self.root / "checkpoints"

    @property
    def adapter(self) -> Path:
        """Directory of the finished adapter."""
        return self.root / "adapter"

    @property
    def experts(self) -> Path:
        """experts.jsonl."""
        return self.root / "experts.jsonl"

    @property
    def best(self) -> Path:
        """Directory of the best adapter."""
        return self.root / "adapter-best"

    @property
    def report(self) -> Path:
        """report.html."""
        return self.root / "report.html"

    def begin(self, recipe: Recipe, record: RunRecord) -> None:
        """Claim the directory: write the recipe, then the record that marks it as a run's."""
        write_atomic(self.resolved, dump_recipe(recipe).encode())
        self.write(record)

    def write(self, record: RunRecord) -> None:
        """Replace run.json."""
        write_atomic(self.record, (json.dumps(asdict(record), indent=1) + "\n").encode())

    def read(self) -> RunRecord | None:
        """The record, None where there is none."""
        if not self.record.exists():
            return None
        try:
            values = json.loads(self.record.read_text(encoding="utf-8"))
            values["verdicts"] = tuple(Verdict(**v) for v in values["verdicts"])
            return RunRecord(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise RunError("TT603", str(self.record), f"is not a run record: {error}",
                           hint="choose another `output`") from error


def check_owner(run: RunDirectory, recipe: Recipe, inputs: Mapping[str, str]) -> RunRecord | None:
    """The record of the run to continue, None for a new run.

    Args:
        run: the output directory.
        recipe: the recipe asked for.
        inputs: see `input_hashes`.

    Raises:
        RunError: TT601, the directory holds another run or something else.
    """
    record = run.read()
    if record is None:
        # A kill between the two files of `begin` leaves only the recipe: a run that did nothing.
        names = {p.name for p in run.root.iterdir()} if run.root.is_dir() else set()
        if names - {run.resolved.name, f"{run.resolved.name}.tmp", f"{run.record.name}.tmp"}:
            raise RunError("TT601", "output", "holds files that are not a run's", value=run.root,
                           hint="choose another `output`")
        return None
    old = load_recipe(run.resolved, check_paths=False)
    found = fixed_differences(old.model_dump(mode="json"), recipe.model_dump(mode="json"))
    if found:
        listed = "\n".join(f"  {d.key} is {d.ours}, the run has {d.theirs}" for d in found)
        raise RunError("TT601", "output", f"belongs to a run with other values:\n{listed}",
                       value=run.root, hint="choose another `output`, or restore these values; "
                       f"what may change: {', '.join(sorted(FREE_KEYS))}")
    changed = [path for path in inputs if record.inputs.get(path) != inputs[path]]
    if changed:
        raise RunError("TT601", "output", f"belongs to a run on another {changed[0]}",
                       value=run.root, hint="choose another `output`, or restore that input")
    return record


def input_hashes(recipe: Recipe) -> dict[str, str]:
    """sha256 of each training file and of a starting adapter, and the base's fingerprint."""
    paths = [file.path for file in recipe.finetune.data.files]
    if recipe.finetune.lora.init_from is not None:
        paths.append(str(Path(recipe.finetune.lora.init_from) / WEIGHTS_NAME))
    paths += [str(file) for path in paths for file in arrow_files(Path(path))]
    hashes = {path: file_sha256(Path(path)) for path in paths if Path(path).is_file()}
    return {**hashes, recipe.model.path: open_source(recipe.model.path).fingerprint()}


def versions() -> dict[str, str]:
    """Versions that a number may depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("trimtab", "torch", "numpy", "safetensors", "tokenizers", "pillow"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found

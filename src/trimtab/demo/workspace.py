"""The demo's directory: base model, data and recipe put where the user can see and change them.

Knows: which file goes where, and that files of someone else are never overwritten. Does not know:
torch, what the verbs write.

    base/          the released checkpoint        run/           written by finetune
    data/          training and held-out records  merged/        written by merge
    data/images/   pictures to ask about          peft/          written by export
    recipe.yaml    what finetune reads            report.html    the page
    before.json    scores of the base             results.json   the numbers of the page
    after.json     scores of the adapter
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from trimtab.checkpoint.manifest import MANIFEST_NAME, check_output, write_atomic
from trimtab.checkpoint.marker import MARKER_NAME
from trimtab.demo.settings import Settings
from trimtab.errors import CheckpointError, RunError

DATA_FILES = (
    "domain_train", "domain_heldout", "general_train", "general_heldout",
    "digits_train", "digits_rehearsal", "digits_name_heldout", "digits_read_heldout",
)  # fmt: skip

_RECIPE = """\
# A tiny model of the K3.1 family learns two skills, and keeps two that it has:
#   words    `lemma: WORD` is answered with the word's lemma      documentation  is still written
#   digits   `name:` and an image are answered in words           `read:`        still in figures
#   trimtab finetune {recipe}
#   trimtab evaluate {recipe}
model: {{path: {base}}}
finetune:
  method: lora
  base_dtype: bf16
  lora:
    rank: {s.rank}
    alpha: {s.alpha}
    dropout: {s.dropout}
    target_modules: [{targets}]
  optimizer:
    lr: {s.lr:.1e}
    lr_by_branch: {{projector: {s.projector_lr:.1e}}}
    scheduler: cosine
    warmup_ratio: {s.warmup_ratio}
  vision: {{tower: frozen, projector: lora}}
  recompute: {s.recompute}      # the model is tiny: memory is cheaper than time
  steps: {s.steps}
  batch: {{tokens_per_step: {s.tokens_per_step}, micro_batch_tokens: {s.micro_batch_tokens}}}
  data:
    domain: {{path: [{domain_train}, {digits_train}], weights: [{words:g}, {s.domain_digits:g}]}}
    general: {{path: [{general_train}, {digits_rehearsal}], weights: [{text:g}, {s.general_digits:g}]}}
    domain_ratio: {s.domain_ratio}
    general_ratio: {general_ratio}
    max_seq_len: {s.max_seq_len}
    packing: true
evaluate:
  domain:
    - {{name: words, path: {domain_heldout}, max_new_tokens: {s.max_new_tokens}{domain_limit}}}
    - {{name: digits named, path: {digits_name_heldout}, max_new_tokens: {s.max_new_tokens}{domain_limit}}}
  general:
    - {{name: documentation, path: {general_heldout}{general_limit}}}
    - {{name: digits read, path: {digits_read_heldout}, kind: generate,
       max_new_tokens: {s.max_new_tokens}, max_loss: {s.max_read_bound:g}{general_limit}}}
  gate: {{min_domain_gain: {gain:.2f}, max_general_loss: {s.max_general_rise}}}
checkpoint: {{every_steps: {s.every_steps}, keep: 2}}
output: {run}
seed: {s.seed}
"""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths below the demo's directory, relative where it is."""

    root: Path

    @property
    def base(self) -> Path:
        """The base checkpoint."""
        return self.root / "base"

    @property
    def recipe(self) -> Path:
        """The recipe."""
        return self.root / "recipe.yaml"

    @property
    def run(self) -> Path:
        """The run directory of finetune."""
        return self.root / "run"

    @property
    def adapter(self) -> Path:
        """The trained adapter."""
        return self.run / "adapter"

    @property
    def merged(self) -> Path:
        """Base and adapter in one checkpoint."""
        return self.root / "merged"

    @property
    def peft(self) -> Path:
        """The adapter as exported."""
        return self.root / "peft"

    @property
    def before(self) -> Path:
        """Scores of the base."""
        return self.root / "before.json"

    @property
    def after(self) -> Path:
        """Scores of base and adapter."""
        return self.root / "after.json"

    @property
    def report(self) -> Path:
        """The page."""
        return self.root / "report.html"

    @property
    def results(self) -> Path:
        """The numbers of the page."""
        return self.root / "results.json"

    @property
    def images(self) -> Path:
        """Pictures to ask about."""
        return self.root / "data" / "images"

    def data(self, name: str) -> Path:
        """One of the files of `DATA_FILES`."""
        return self.root / "data" / f"{name}.jsonl"


def packaged_base() -> Traversable:
    """The pretrained base that comes with the package."""
    return resources.files("trimtab.demo") / "base"


def prepare(workspace: Workspace, settings: Settings, base: Traversable) -> None:
    """Put base, data and recipe in place; what is there already and equal is kept.

    Args:
        workspace: where.
        settings: for the recipe.
        base: a checkpoint directory with a manifest.

    Raises:
        CheckpointError: TT305 if `base` has no manifest, TT309 if another base is in place.
        RunError: TT601 if a file of the same name and other content is in place.
    """
    _copy_checkpoint(base, workspace.base)
    packaged = resources.files("trimtab.demo") / "data"
    for name in DATA_FILES:
        place_file(workspace.data(name), (packaged / f"{name}.jsonl").read_bytes())
    place_file(workspace.recipe, recipe_text(workspace, settings).encode())


def recipe_text(workspace: Workspace, settings: Settings) -> str:
    """The recipe, with paths as they are typed from the current directory."""
    names = {name: _scalar(workspace.data(name)) for name in DATA_FILES}
    return _RECIPE.format(
        s=settings, recipe=workspace.recipe, base=_scalar(workspace.base),
        run=_scalar(workspace.run), targets=", ".join(settings.target_modules),
        general_ratio=round(1 - settings.domain_ratio, 12),
        words=round(1 - settings.domain_digits, 12), text=round(1 - settings.general_digits, 12),
        gain=settings.min_words - settings.max_before,
        domain_limit=_limit(settings.domain_limit), general_limit=_limit(settings.general_limit),
        **names,
    )


def discard_artefact(directory: Path) -> bool:
    """Remove an artefact that an earlier demo wrote; other directories are left alone."""
    ours = any((directory / name).exists() for name in (MANIFEST_NAME, MARKER_NAME))
    if ours:
        shutil.rmtree(directory)
    return ours


def _limit(records: int | None) -> str:
    return "" if records is None else f", limit: {records}"


def _scalar(path: Path) -> str:
    """A path as YAML reads it back inside braces."""
    text = str(path)
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return "'" + text.replace("'", "''") + "'"


def _copy_checkpoint(source: Traversable, target: Path) -> None:
    if not (source / MANIFEST_NAME).is_file():
        raise CheckpointError("TT305", str(source), f"has no {MANIFEST_NAME}",
                              hint="install the package again")
    manifest = target / MANIFEST_NAME
    if manifest.is_file() and manifest.read_bytes() == (source / MANIFEST_NAME).read_bytes():
        return
    check_output(target)
    discard_artefact(target)
    staging = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for item in source.iterdir():
        if item.is_file():
            (staging / item.name).write_bytes(item.read_bytes())
    staging.replace(target)


def place_file(path: Path, data: bytes) -> None:
    """Write a file of the demo, unless it is there already.

    Raises:
        RunError: TT601 if a file of the same name and other content is there.
    """
    if path.exists():
        if path.read_bytes() == data:
            return
        raise RunError("TT601", str(path), "is there already and differs from the demo's",
                       hint="name another directory with --out, or remove this one")
    write_atomic(path, data)

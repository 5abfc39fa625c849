"""`trimtab data`: the records of a recipe as the model sees them, and records of the base's answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.config.data import DataSection, SourceFile
from trimtab.config.load import load_recipe
from trimtab.config.recipe import Recipe
from trimtab.data.preview import (
    PackSummary,
    Run,
    SourceSummary,
    summarise_packs,
    summarise_source,
    token_runs,
)
from trimtab.data.prompt import ImageProcessor, load_image_processor, may_leave_out
from trimtab.data.records import Record, open_records
from trimtab.data.tokenizer import Tokenizer, load_tokenizer
from trimtab.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

app = typer.Typer(add_completion=False, no_args_is_help=True)

_LOOKED_AT = 2000
_PACKS = 8
_LONGEST_SHOWN = 1200
_STYLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "tool": "yellow",
           "assistant": "green", "text": "green", "template": "dim",
           "image": "black on yellow"}  # fmt: skip


@app.callback()
def data() -> None:
    """Show what training reads, and make general records."""


@app.command()
def preview(
    recipe_path: Annotated[str, typer.Argument(metavar="RECIPE", help="recipe file")],
    count: Annotated[int, typer.Option("--n", min=0, help="records shown per file")] = 3,
    every: Annotated[bool, typer.Option("--all", help="add up all records")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="a.b=value")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="write a page to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Show records as tokens by role, with images and loss mask, and totals per source."""
    recipe = load_recipe(recipe_path, overrides or ())
    section = recipe.finetune.data
    tokenizer = load_tokenizer(recipe.model.path)
    processor = load_image_processor(recipe.model.path, section.image)
    shown = {
        file.name: [
            (record.where, token_runs(record, tokenizer, processor, pictures=html is not None))
            for record in islice(_records(file, section), count)
        ]
        for file in section.files
    }
    totals = _totals(section, tokenizer, processor, None if every else _LOOKED_AT)
    packs = summarise_packs(section, tokenizer, recipe.seed, _PACKS, processor)
    if html is not None:
        from trimtab.checkpoint.manifest import write_atomic
        from trimtab.data.preview_page import preview_page

        html.parent.mkdir(parents=True, exist_ok=True)
        page = preview_page(recipe_path, section, shown, totals, packs)
        write_atomic(html, page.encode())
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(shown, totals, packs), ensure_ascii=False) + "\n")
    else:
        _print_page(recipe, recipe_path, shown, totals, packs)


@app.command()
def replay(
    model: Annotated[str, typer.Argument(help="checkpoint directory or URL")],
    prompts: Annotated[Path, typer.Option("--prompts", help="JSONL of records or prompts")],
    out: Annotated[Path, typer.Option("--out", help="JSONL that answers are appended to")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2)] = 512,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="only the first prompts")] = None,
    base_dtype: Annotated[str, typer.Option("--base-dtype", help="native, bf16 or fp32")] = "bf16",
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", min=1, help="of prompts and answers made together")
    ] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Store the untouched model's own answers as general records; the same command continues."""
    from trimtab.evaluate.replay import ReplayOptions
    from trimtab.evaluate.replay import replay as run
    from trimtab.train.reporter import ConsoleReporter

    if base_dtype not in ("native", "bf16", "fp32"):
        raise ConfigError("TT108", "--base-dtype", "must be native, bf16 or fp32", value=base_dtype)
    options = ReplayOptions(max_new_tokens, limit, base_dtype, batch_tokens)
    done = run(model, prompts, out, options, ConsoleReporter())
    if as_json:
        sys.stdout.write(json.dumps(done.as_dict()) + "\n")
        return
    sys.stdout.write(f"{done.path}: {done.records:,} answers to {done.prompts:,} prompts\n")
    if done.before:
        sys.stdout.write(f"{done.before:,} of them were there already\n")
    if done.cut:
        sys.stdout.write(
            f"{done.cut:,} prompts without a record: the answer had not ended after "
            f"{max_new_tokens:,} tokens (--max-new-tokens), was empty or malformed\n"
        )
    sys.stderr.write(f"next: finetune.data.general: {{path: {done.path}}} in the recipe\n")


def _records(source: SourceFile, section: DataSection) -> Iterator[Record]:
    """Records that are trained on."""
    file = open_records(source.path, source.form, last_only=source.last_only)
    for index in range(len(file)):
        try:
            yield file.record(index)
        except DataError as error:
            if not may_leave_out(error, section):
                raise


def _totals(
    section: DataSection,
    tokenizer: Tokenizer,
    processor: ImageProcessor | None,
    limit: int | None,
) -> dict[str, SourceSummary]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        totals = {}
        for file in section.files:
            task = progress.add_task(f"reading {file.name}", total=limit)
            advance = partial(progress.advance, task)
            totals[file.name] = summarise_source(
                file, section, tokenizer, limit, advance, processor
            )
    return totals


def _as_dict(
    shown: dict[str, list[tuple[str, list[Run]]]],
    totals: dict[str, SourceSummary],
    packs: PackSummary,
) -> dict[str, object]:
    return {
        "records": {
            name: [{"where": where, "runs": [asdict(run) for run in runs]} for where, runs in items]
            for name, items in shown.items()
        },
        "sources": {name: asdict(total) for name, total in totals.items()},
        "packs": asdict(packs),
    }


def _print_page(
    recipe: Recipe,
    recipe_path: str,
    shown: dict[str, list[tuple[str, list[Run]]]],
    totals: dict[str, SourceSummary],
    packs: PackSummary,
) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for name, items in shown.items():
        for where, runs in items:
            tokens = sum(run.num_tokens for run in runs)
            trained = sum(run.num_tokens for run in runs if run.supervised)
            console.print(f"{name}  {where}  {tokens} tokens, {trained} in the loss", style="bold")
            console.print(_coloured(runs))
            console.print()
    console.print("\u00ab \u00bb marks what enters the loss; colours: system, user, assistant\n")
    _print_totals(console, recipe.finetune.data, totals, packs)
    console.print(f"\nnext: trimtab finetune {recipe_path}")


def _coloured(runs: list[Run]) -> Text:
    from rich.text import Text

    text = Text()
    inside = False
    for run in runs:
        if run.supervised != inside:
            text.append("\u00ab" if run.supervised else "\u00bb", style="bold")
            inside = run.supervised
        bold = " bold" if run.supervised else ""
        shown = f"[{run.text}]" if run.image is not None else run.text
        text.append(shown, style=_STYLES.get(run.role, "") + bold)
    if inside:
        text.append("\u00bb", style="bold")
    if len(text) > _LONGEST_SHOWN:
        rest = len(text) - _LONGEST_SHOWN
        text.truncate(_LONGEST_SHOWN)
        text.append(f" ... {rest} more characters", style="dim")
    return text


def _print_totals(
    console: Console, section: DataSection, totals: dict[str, SourceSummary], packs: PackSummary
) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("source")
    columns = ("form", "records", "looked at", "tokens", "in the loss", "longest", "too long", "images",
               "share")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right")
    for name, total in totals.items():
        supervised = total.supervised / total.tokens if total.tokens else 0.0
        table.add_row(
            name, total.form, f"{total.records:,}", f"{total.looked_at:,}", f"{total.tokens:,}",
            f"{supervised:.0%}", f"{total.longest:,}", f"{total.overlong:,} ({section.overlong})",
            f"{total.images:,}", f"{packs.shares.get(name, 0.0):.3f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"\npacks of {section.max_seq_len}: the first {packs.packs} hold {packs.records} records, "
        f"{packs.filled:.1%} filled, {packs.supervised:.1%} of positions in the loss"
    )
    for name, total in totals.items():
        if total.images:
            sizes = total.image_sizes
            console.print(
                f"{name}: {total.images:,} images of {min(sizes):,} to {max(sizes):,} tokens, "
                f"{total.image_tokens / total.images:,.1f} on average, "
                f"{total.image_tokens / max(1, total.tokens):.1%} of the tokens"
            )
    dropped = sum(total.unreadable for total in totals.values())
    if dropped:
        console.print(f"{dropped} records are left out as unreadable or with too long images")
        for total in totals.values():
            for line in total.left_out:
                console.print(f"  {line}", markup=False)

"""`trimtab init`: a random checkpoint of a preset in the released format."""

from __future__ import annotations

from importlib import resources
from typing import Annotated

import typer

from trimtab.cli.report import byte_progress, print_json, print_next

app = typer.Typer(add_completion=False)


@app.command()
def init(
    preset: Annotated[str, typer.Option(help="see `trimtab inspect --list`")],
    out: Annotated[str, typer.Option(help="new directory")],
    seed: Annotated[int, typer.Option(help="decides every value")] = 17,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Write random weights with config, manifest and, where the preset has one, tokenizer."""
    from trimtab.arch.load import load_arch
    from trimtab.arch.presets import preset_config
    from trimtab.checkpoint.init import init_checkpoint
    from trimtab.checkpoint.manifest import read_manifest

    config = preset_config(preset)
    arch = load_arch(config, f"preset {preset}")
    with byte_progress(f"writing {preset}") as progress:
        init_checkpoint(
            arch, config, out, seed, extra_files=_tokenizer_files(preset), progress=progress
        )
    manifest = read_manifest(out)
    assert manifest is not None, "a finished directory has a manifest"
    total = sum(record.bytes for record in manifest.files.values())
    if as_json:
        print_json({"out": out, "preset": preset, "seed": seed, "bytes": total,
                    "files": sorted(manifest.files)})
        return
    for name, record in sorted(manifest.files.items()):
        typer.echo(f"{record.bytes:>14,}  {out}/{name}")
    print_next(f"trimtab inspect {out}")


def _tokenizer_files(preset: str) -> dict[str, bytes]:
    """The byte tokenizer that all tiny presets share; the large ones have theirs elsewhere."""
    if not preset.endswith("-tiny"):
        return {}
    root = resources.files("trimtab") / "demo" / "base"
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return {name: (root / name).read_bytes() for name in names}

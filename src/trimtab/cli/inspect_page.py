"""The page that `trimtab inspect` prints for people.

Knows: how a Summary looks in a terminal, with and without colour. Does not know: where the
numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trimtab.arch.summary import LayerSummary, Summary
from trimtab.cli.target import Target, Weights
from trimtab.units import format_bytes, format_count

PAGE_WIDTH = 96
_CONTEXT = 128 * 1024
_DEVICE_BYTES = 80 * 2**30
_MAX_LINES = 20

# kind -> (glyph, glyph without Unicode, style, words)
_MIXERS = {
    "kda": ("░", "k", "cyan", "KDA linear attention"),
    "gqa": ("█", "G", "magenta", "softmax attention"),
    "gdn": ("░", "d", "cyan", "gated DeltaNet"),
    "mla": ("█", "M", "magenta", "MLA attention"),
    "mla+full": ("▓", "S", "magenta", "MLA with indexer"),
    "mla+shared": ("▒", "s", "magenta", "MLA, selection shared"),
}
_FFNS = {
    "dense": ("▂", "d", "yellow", "dense FFN"),
    "moe": ("▇", "e", "green", "mixture of experts"),
}
_OWNERS = {
    "routed_expert": "routed experts", "shared_expert": "shared experts", "latent": "latent projections",
    "gqa": "attention", "gated_delta": "gated DeltaNet",
    "kda": "KDA", "mla": "MLA", "indexer": "indexer", "dense_ffn": "dense FFN",
    "embedding": "embedding", "head": "output head", "router": "router", "vision": "vision tower",
    "projector": "projector", "norm": "norms", "residual": "residual mixing",
}


def render_page(target: Target, summary: Summary, next_command: str, console: Console) -> None:
    """Print the page.

    Args:
        target: what was inspected.
        summary: its numbers.
        next_command: the command to type next.
        console: width and colour of the output.
    """
    fancy = console.encoding.lower().replace("-", "").startswith("utf")
    sections: list[tuple[str, RenderableType]] = [
        ("Layers", _layers(summary, console.width - 14, fancy)),
        ("Weights as stored", _memory(summary, fancy)),
        ("To run it", _needs(summary)),
        ("Unusual", _bullets(summary.unusual, fancy)),
    ]
    if summary.unsupported:
        sections.append(("Not supported yet", _bullets(summary.unsupported, fancy)))
    if target.weights is not None:
        sections.append(("Files against inventory", _differences(target.weights)))
    console.print()
    console.print(_headline(target, summary))
    line = "─" if fancy else "-"
    for title, body in sections:
        console.print()
        console.print(Rule(title, align="left", characters=line, style="dim"))
        console.print(Padding(body, (0, 0, 0, 2), expand=False))
    console.print()
    console.print(Text.assemble(("next  ", "dim"), (next_command, "bold")))


def _headline(target: Target, summary: Summary) -> Text:
    arch = target.arch
    where = target.where if target.kind != "preset" else f"preset {target.where}"
    total = format_count(summary.total_parameters)
    active = format_count(summary.active_parameters_per_token)
    tensors = "" if summary.num_tensors is None else f", {summary.num_tensors:,} tensors"
    share = summary.active_parameters_per_token / summary.total_parameters
    return Text.assemble(
        (summary.name, "bold"), f"  {total} parameters, ", (f"{active} active", "bold"),
        f" per token ({share:.1%}), {len(summary.layers)} layers{tensors}\n",
        (
            f"{summary.model_type}, hidden {arch.hidden_size:,}, vocabulary {arch.vocab_size:,}, "
            f"up to {arch.max_position_embeddings:,} positions\n{where}", "dim",
        ),
    )


def _layers(summary: Summary, width: int, fancy: bool) -> RenderableType:
    mixers = [_mixer_kind(layer) for layer in summary.layers]
    ffns = [layer.ffn for layer in summary.layers]
    rows: list[Text] = []
    lines = -(-len(mixers) // width)
    # Lines of equal length, in whole tens so that the rulers agree.
    step = -(-len(mixers) // lines // 10) * 10
    for start in range(0, len(mixers), step):
        chunk = slice(start, start + step)
        rows.append(Text.assemble(("mixer  ", "dim"), _strip(mixers[chunk], _MIXERS, fancy)))
        rows.append(Text.assemble(("ffn    ", "dim"), _strip(list(ffns[chunk]), _FFNS, fancy)))
        rows.append(Text(f"       {_ruler(start, len(mixers[chunk]))}", style="dim"))
    rows.append(Text(""))
    rows += [*_legend(mixers, _MIXERS, fancy), *_legend(list(ffns), _FFNS, fancy)]
    return Group(*rows)


def _mixer_kind(layer: LayerSummary) -> str:
    return layer.mixer if layer.indexer is None else f"{layer.mixer}+{layer.indexer}"


def _strip(kinds: list[str], glyphs: dict[str, tuple[str, str, str, str]], fancy: bool) -> Text:
    text = Text()
    for kind in kinds:
        block, letter, style, _ = glyphs[kind]
        text.append(block if fancy else letter, style=style)
    return text


def _ruler(start: int, length: int) -> str:
    """Layer numbers under the strip, one every ten layers."""
    line = [" "] * (length + 4)
    for index in range(start, start + length):
        if index % 10 == 0:
            line[index - start:index - start + len(str(index))] = str(index)
    return "".join(line).rstrip()


def _legend(
    kinds: list[str], glyphs: dict[str, tuple[str, str, str, str]], fancy: bool
) -> Iterator[Text]:
    for kind in dict.fromkeys(kinds):
        block, letter, style, words = glyphs[kind]
        found = [index for index, item in enumerate(kinds) if item == kind]
        yield Text.assemble(
            (block if fancy else letter, style), f" {words:<22}{len(found):>4} ",
            "layer   " if len(found) == 1 else "layers  ",
            (_where(found), "dim"),
        )


def _where(indices: list[int]) -> str:
    """`0-2, 4-6, ...`: the first runs of layer numbers."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if len(shown) > 5:
        shown = [*shown[:3], "...", shown[-1]]
    return ", ".join(shown)


def _memory(summary: Summary, fancy: bool) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("owner")
    for title in ("parameters", "stored", "share"):
        table.add_column(title, justify="right")
    table.add_column("")
    ordered = sorted(summary.owners, key=lambda owner: -owner.stored_bytes)
    for owner in ordered:
        share = owner.stored_bytes / summary.stored_bytes
        bar = ("█" if fancy else "#") * round(share * 24)
        if not bar and fancy and share >= 0.0005:
            bar = "▏"
        table.add_row(
            _OWNERS.get(owner.owner, owner.owner), format_count(owner.parameters),
            format_bytes(owner.stored_bytes), f"{share:.1%}", Text(bar, style="green"),
        )
    table.add_row(
        Text("total", style="bold"), format_count(summary.total_parameters),
        Text(format_bytes(summary.stored_bytes), style="bold"), "", "",
    )
    parts = [f"{name} {format_bytes(size)}" for name, size in summary.bytes_by_dtype.items()]
    return Group(table, Text.assemble(("by dtype  ", "dim"), ", ".join(parts)))


def _needs(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for label, size in (
        ("weights as stored", summary.stored_bytes), ("weights in bf16", summary.bf16_bytes),
    ):
        devices = -(-size // _DEVICE_BYTES)
        note = f"at least {devices} devices of 80 GiB" if devices > 1 else "fits one device"
        table.add_row(label, format_bytes(size), note)
    cache = summary.kv_bytes_per_token * _CONTEXT
    per_token = f"{summary.kv_bytes_per_token:,} B per token, bf16"
    table.add_row("cache per 128K tokens", format_bytes(cache), per_token)
    state = summary.state_bytes_per_sequence
    if state:
        tail = format_bytes(summary.conv_bytes_per_sequence)
        table.add_row("state per sequence", format_bytes(state), f"fp32, plus {tail} of conv tail")
    return table


def _bullets(lines: tuple[str, ...], fancy: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for line in lines:
        table.add_row("•" if fancy else "*", line)
    return table


def _differences(weights: Weights) -> RenderableType:
    size = format_bytes(weights.num_bytes)
    files = "file" if weights.files == 1 else "files"
    found = f"{weights.num_tensors:,} tensors, {size}, in {weights.files} {files}"
    if weights.skipped:
        found += f", of which {weights.skipped:,} are skipped"
    if not weights.is_compared:
        return Text.assemble(found, ": ", ("not compared, for want of support", "yellow"))
    if not weights.lines:
        return Text.assemble(found, ": ", ("all as config.json says", "green"))
    count = len(weights.differences)
    rows = [Text.assemble(found, ": ", (f"{count:,} differences", "bold red"))]
    rows += [Text(line, style="red") for line in weights.lines[:_MAX_LINES]]
    hidden = len(weights.lines) - _MAX_LINES
    if hidden > 0:
        rows.append(Text(f"... and {hidden:,} more; --json lists all", style="dim"))
    return Group(*rows)

"""`trimtab generate MODEL`: stream an answer, with an adapter, or base and adapter in turn."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trimtab.evaluate.answer import Speaker

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="checkpoint directory or URL")],
    adapter: Annotated[Path | None, typer.Option("--adapter", help="PEFT directory")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="what the user says")] = None,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="image before the prompt; may be repeated")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="a conversation; an empty line or Ctrl-D ends it")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="answer with the base and with the adapter")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    raw: Annotated[
        bool, typer.Option("--raw", help="continue the prompt as text, without chat template")
    ] = False,
    base_dtype: Annotated[str, typer.Option("--base-dtype", help="native, bf16 or fp32")] = "bf16",
    accept_base: Annotated[
        str | None, typer.Option(help="fingerprint of a base the adapter was not trained on")
    ] = None,
) -> None:
    """Answer a prompt greedily and stream the text to stdout."""
    from trimtab.errors import ConfigError

    if (prompt is None) == (not interactive):
        raise ConfigError("TT108", "--prompt", "give either --prompt or --interactive")
    if raw and images:
        raise ConfigError("TT108", "--image", "needs the chat template; leave out --raw")
    if compare and adapter is None:
        raise ConfigError("TT108", "--compare", "needs --adapter")
    if base_dtype not in ("native", "bf16", "fp32"):
        raise ConfigError("TT108", "--base-dtype", "must be native, bf16 or fp32", value=base_dtype)
    if adapter is not None and not adapter.is_dir():
        raise ConfigError("TT107", "--adapter", "no such directory", value=adapter)
    from trimtab.evaluate.answer import Speaker, user_message

    speaker = Speaker.load(model, adapter, base_dtype=base_dtype, max_new_tokens=max_new_tokens,
                           raw=raw, accept_base=accept_base)
    if prompt is not None:
        _answer(speaker, [user_message(prompt, images or ())], compare)
    else:
        _converse(speaker, compare, images or ())
    if adapter is not None:
        typer.echo(f"next: trimtab merge {model} {adapter} --out DST", err=True)


def _converse(speaker: Speaker, compare: bool, images: Sequence[Path]) -> None:
    """Question and answer until end of input; with --compare the adapter's answer is kept.

    Images belong to the first question.
    """
    from trimtab.evaluate.answer import user_message

    messages: list[Mapping[str, object]] = []
    while True:
        typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        messages.append(user_message(line.rstrip("\n"), () if messages else images))
        messages.append(_answer(speaker, messages, compare))


def _answer(
    speaker: Speaker, messages: Sequence[Mapping[str, object]], compare: bool
) -> Mapping[str, object]:
    """Stream one answer, or the base's and then the adapter's; return the last as a message."""
    for title, use_adapter in (("base", False), ("adapter", True)) if compare else (("", True),):
        if title:
            typer.echo(f"{title}: ", nl=False)
        reply = speaker.stream(messages, use_adapter=use_adapter)
        for piece in reply:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo()
    return reply.message()

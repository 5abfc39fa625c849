"""Held-out loss of text in bits per byte, which does not depend on the tokenizer.

    bits per byte = nats over all predicted tokens / ln 2 / UTF-8 bytes of the text

Knows: texts, windows, token losses. Does not know: recipes, adapters.

Shape letters: T tokens, W vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trimtab.data.tokenizer import Tokenizer
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TextLoss:
    """Loss of each text, in file order.

    Args:
        nats: sum over the predicted tokens of one text.
        num_bytes: UTF-8 bytes of one text.
        num_tokens: predicted tokens of one text.
    """

    nats: tuple[float, ...]
    num_bytes: tuple[int, ...]
    num_tokens: tuple[int, ...]

    @property
    def bits(self) -> tuple[float, ...]:
        """Bits of each text."""
        return tuple(n / math.log(2) for n in self.nats)

    @property
    def bits_per_byte(self) -> float:
        """Over all texts together."""
        return sum(self.bits) / max(1, sum(self.num_bytes))


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive tokens of one text; the first is context, the others are predicted."""

    text: int
    ids: tuple[int, ...]


def text_loss(
    model: CausalLM,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    max_seq_len: int,
    batch_tokens: int,
    progress: Progress | None = None,
) -> TextLoss:
    """Loss of every token of every text, packed, without gradients.

    A text longer than `max_seq_len` is cut into windows that share one token, so that each token
    is predicted once. Where the tokenizer puts no begin id before a text, its first token has
    nothing to be predicted from and is left out.

    Args:
        model: as it is, adapters included.
        tokenizer: of the checkpoint.
        texts: held-out texts.
        max_seq_len: longest window.
        batch_tokens: tokens per forward.
        progress: told (windows done, windows in all).
    """
    bos_id = tokenizer.bos_id if tokenizer.add_bos else None
    windows = [
        _Window(index, piece)
        for index, text in enumerate(texts)
        for piece in _cut(tokenizer.encode(text), bos_id, max_seq_len)
    ]
    nats = [0.0] * len(texts)
    tokens = [0] * len(texts)
    done = 0
    with torch.no_grad():
        for batch in _batches(windows, batch_tokens):
            for window, loss in zip(batch, _losses(model, batch), strict=True):
                nats[window.text] += loss
                tokens[window.text] += len(window.ids) - 1
            done += len(batch)
            if progress is not None:
                progress(done, len(windows))
    return TextLoss(tuple(nats), tuple(len(t.encode()) for t in texts), tuple(tokens))


def _cut(ids: Sequence[int], bos_id: int | None, length: int) -> Iterator[tuple[int, ...]]:
    whole = tuple(ids) if bos_id is None else (bos_id, *ids)
    for start in range(0, len(whole) - 1, length - 1):
        yield whole[start : start + length]


def _batches(windows: Sequence[_Window], batch_tokens: int) -> Iterator[list[_Window]]:
    batch: list[_Window] = []
    size = 0
    for window in windows:
        if batch and size + len(window.ids) > batch_tokens:
            yield batch
            batch, size = [], 0
        batch.append(window)
        size += len(window.ids)
    if batch:
        yield batch


def _losses(model: CausalLM, batch: Sequence[_Window]) -> list[float]:
    """Sum of token losses of each window, in nats."""
    device = model.embed.weight.device
    lengths = [len(window.ids) for window in batch]
    ids = torch.tensor([i for window in batch for i in window.ids], device=device)
    hidden = model(ids, ForwardContext.packed(lengths, device))  # [T, D]
    losses = model.token_losses(hidden[:-1], ids[1:])
    # The prediction that crosses from one window into the next is nobody's.
    sums, start = [], 0
    for length in lengths:
        sums.append(float(losses[start : start + length - 1].sum(dtype=torch.float64)))
        start += length
    return sums

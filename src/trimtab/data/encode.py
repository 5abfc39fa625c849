"""One record to token ids, loss mask, images and byte count.

Knows: records, tokenizers, images. Does not know: mixtures, packs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.data.images import ImagePatches
from trimtab.data.prompt import ImageProcessor, build_prompt
from trimtab.data.records import Record
from trimtab.data.tokenizer import Tokenizer

NO_ROWS: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """A record as tokens.

    Args:
        token_ids: int64 [T].
        loss_mask: bool [T]; True where the token is to be predicted. The first token of a
            sequence never is, whatever the mask says: nothing stands before it.
        num_bytes: UTF-8 bytes of the text that the mask covers, for bits per byte.
        images: in the order of their tokens.
        image_rows: positions of their placeholder tokens, ascending.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    num_bytes: int
    images: tuple[ImagePatches, ...] = ()
    image_rows: tuple[int, ...] = NO_ROWS

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_supervised(self) -> int:
        """Tokens that enter the loss."""
        return int(self.loss_mask[1:].sum())

    def truncated(self, length: int) -> Encoded:
        """At most the first `length` tokens; `num_bytes` still is that of the whole record.

        An image is never cut: the record ends before the first one that does not fit whole.
        """
        kept = 0  # images
        rows = 0  # their tokens
        for image in self.images:
            if self.image_rows[rows + image.num_tokens - 1] >= length:
                length = min(length, self.image_rows[rows])
                break
            kept, rows = kept + 1, rows + image.num_tokens
        return Encoded(
            self.token_ids[:length], self.loss_mask[:length], self.num_bytes,
            self.images[:kept], self.image_rows[:rows],
        )  # fmt: skip


def encode_record(
    record: Record, tokenizer: Tokenizer, processor: ImageProcessor | None = None
) -> Encoded:
    """Encode a text with its begin and end ids, or a conversation through the template.

    All of a text is supervised; of a conversation the answers with their end marker, or the last.

    Args:
        record: text or conversation.
        tokenizer: of the model.
        processor: of the model; None for a model of text only.

    Raises:
        DataError: TT404 where the template does not fit the conversation, TT406 and TT407 for
            images.
    """
    if record.text is not None:
        ids = tokenizer.encode_document(record.text)
        mask = np.ones(len(ids), np.bool_)
        return Encoded(np.asarray(ids, np.int64), mask, len(record.text.encode()))
    prompt = build_prompt(
        record.messages, tokenizer, processor, where=record.where, tools=record.tools,
        last_only=record.last_only,
    )  # fmt: skip
    answers = [m.get("content") for m in record.messages if m["role"] == "assistant"]
    answers = answers[-1:] if record.last_only else answers
    return Encoded(
        np.asarray(prompt.token_ids, np.int64),
        np.asarray(prompt.loss_mask, np.bool_),
        sum(len(_text(answer).encode()) for answer in answers),
        prompt.images,
        prompt.image_rows,
    )


def _text(content: object) -> str:
    """Text of a message, whether it is one text or a list of parts."""
    if isinstance(content, list | tuple):
        parts = (p.get("text") for p in content if isinstance(p, Mapping))
        return "".join(text for text in parts if isinstance(text, str))
    return content if isinstance(content, str) else ""

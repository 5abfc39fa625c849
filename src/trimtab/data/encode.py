"""One record to token ids, loss mask and byte count.

Knows: records and tokenizers. Does not know: mixtures, packs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.data.records import Record
from trimtab.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoded:
    """A record as tokens.

    Args:
        token_ids: int64 [T].
        loss_mask: bool [T]; True where the token is to be predicted. The first token of a
            sequence never is, whatever the mask says: nothing stands before it.
        num_bytes: UTF-8 bytes of the text that the mask covers, for bits per byte.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    num_bytes: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_supervised(self) -> int:
        """Tokens that enter the loss."""
        return int(self.loss_mask[1:].sum())

    def truncated(self, length: int) -> Encoded:
        """The first `length` tokens; `num_bytes` still is that of the whole record."""
        return Encoded(self.token_ids[:length], self.loss_mask[:length], self.num_bytes)


def encode_record(record: Record, tokenizer: Tokenizer) -> Encoded:
    """Encode a text with its begin and end ids, or a conversation through the template.

    All of a text is supervised; of a conversation the answers with their end marker.

    Raises:
        DataError: TT404 where the template does not fit the conversation.
    """
    if record.text is not None:
        ids = tokenizer.encode_document(record.text)
        mask = np.ones(len(ids), np.bool_)
        return Encoded(np.asarray(ids, np.int64), mask, len(record.text.encode()))
    rendered = tokenizer.render(record.messages, record.tools)
    answers = (m.get("content") for m in record.messages if m["role"] == "assistant")
    num_bytes = sum(len(text.encode()) for text in answers if isinstance(text, str))
    return Encoded(
        np.asarray(rendered.token_ids, np.int64),
        np.asarray(rendered.loss_mask, np.bool_),
        num_bytes,
    )

"""What a recipe's data looks like to the model: token runs by origin, and totals.

Knows: records, tokenizers, streams. Does not know: terminals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimtab.config.recipe import DataSection
from trimtab.data.encode import Encoded, encode_record
from trimtab.data.packing import Pack
from trimtab.data.records import JsonlFile, Record
from trimtab.data.stream import DataStream
from trimtab.data.tokenizer import Tokenizer
from trimtab.errors import DataError


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one origin.

    Args:
        text: decoded.
        role: role of the message, `text` for plain text, `template` for the format's own.
        supervised: the tokens enter the loss.
        num_tokens: how many they are.
    """

    text: str
    role: str
    supervised: bool
    num_tokens: int


@dataclass(slots=True)
class SourceSummary:
    """Totals over the records that were looked at.

    Args:
        path: file.
        records: in the whole file.
        looked_at: records read for the numbers below.
        tokens: their tokens, cut to the longest length.
        supervised: tokens that enter the loss.
        longest: tokens of the longest record before cutting.
        overlong: records longer than the longest length.
        unreadable: records left out because `on_error` is skip.
    """

    path: str
    records: int
    looked_at: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    overlong: int = 0
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class PackSummary:
    """Totals over the first packs of the stream.

    Args:
        packs: how many were built.
        records: records in them.
        filled: share of positions that are not padding.
        supervised: share of positions that enter the loss.
        shares: share of the tokens by source.
    """

    packs: int
    records: int
    filled: float
    supervised: float
    shares: dict[str, float]


def token_runs(record: Record, tokenizer: Tokenizer) -> list[Run]:
    """Cut a record into runs of tokens with one role and one loss mask."""
    if record.text is not None:
        encoded = encode_record(record, tokenizer)
        origins = ["text"] * len(encoded)
        ids, mask = encoded.token_ids.tolist(), encoded.loss_mask.tolist()
    else:
        rendered = tokenizer.render(record.messages, record.tools)
        roles = [str(message["role"]) for message in record.messages]
        origins = ["template" if m is None else roles[m] for m in rendered.messages]
        ids, mask = rendered.token_ids, rendered.loss_mask
    runs: list[Run] = []
    begin = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or (origins[end], mask[end]) != (origins[begin], mask[begin]):
            text = tokenizer.decode(ids[begin:end])
            runs.append(Run(text, origins[begin], bool(mask[begin]), end - begin))
            begin = end
    return runs


def summarise_source(
    path: str,
    data: DataSection,
    tokenizer: Tokenizer,
    limit: int | None,
    advance: Callable[[float], None] | None = None,
) -> SourceSummary:
    """Encode the first records of a file and add up.

    Args:
        path: JSONL file.
        data: for the longest length and what to do with unreadable records.
        tokenizer: of the model.
        limit: how many records to read; None for all.
        advance: called with 1 after each record, for a progress bar.

    Raises:
        DataError: TT401, TT402, TT404 unless `on_error` is skip.
    """
    file = JsonlFile(path)
    total = SourceSummary(path, len(file))
    for index in range(len(file) if limit is None else min(limit, len(file))):
        total.looked_at += 1
        try:
            encoded = encode_record(file.record(index), tokenizer)
        except DataError:
            if data.on_error == "error":
                raise
            total.unreadable += 1
            continue
        _add(total, encoded, data.max_seq_len)
        if advance is not None:
            advance(1)
    return total


def _add(total: SourceSummary, encoded: Encoded, max_seq_len: int) -> None:
    total.longest = max(total.longest, len(encoded))
    total.overlong += len(encoded) > max_seq_len
    kept = encoded.truncated(max_seq_len)
    total.tokens += len(kept)
    total.supervised += kept.num_supervised


def summarise_packs(data: DataSection, tokenizer: Tokenizer, seed: int, count: int) -> PackSummary:
    """Build the first packs of a run and measure how full they are."""
    stream = DataStream(data, tokenizer, seed)
    packs: list[Pack] = [stream.next_pack() for _ in range(count)]
    positions = count * data.max_seq_len
    tokens: dict[str, int] = {}
    for pack in packs:
        for name, number in pack.tokens_by_source.items():
            tokens[name] = tokens.get(name, 0) + number
    fed = sum(tokens.values())
    return PackSummary(
        packs=count,
        records=sum(len(pack.lengths) for pack in packs),
        filled=fed / positions,
        supervised=sum(pack.num_supervised for pack in packs) / positions,
        shares={name: number / fed for name, number in tokens.items()},
    )

"""Rank files for tests: byte pairs merged by how often they stand together in a text."""

from __future__ import annotations

import base64
import collections
import itertools
import json
from pathlib import Path

import regex

from trimtab.data.ranks import PRE_TOKENIZER

# The names of facts that a K3 vocabulary has as single tokens, in a text to learn them from.
LEARNED = 'message role="assistant" type="system"\nthink\nresponse\ntools\ncall\nargument key\n' * 8
SPECIALS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
    9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip


def split(text: str) -> list[str]:
    """Pre-tokenize with another engine than the one under test."""
    return [m.group() for m in regex.finditer(PRE_TOKENIZER, text, flags=regex.V1)]


def learn_ranks(text: str, merges: int) -> list[bytes]:
    """Byte-pair encoding learned from a text: 256 bytes, then the merged tokens in order."""
    ranks = [bytes([byte]) for byte in range(256)]
    words = collections.Counter(
        tuple(bytes([byte]) for byte in word.encode()) for word in split(text)
    )
    for _ in range(merges):
        pairs: collections.Counter[tuple[bytes, bytes]] = collections.Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.append(best[0] + best[1])
        merged: collections.Counter[tuple[bytes, ...]] = collections.Counter()
        for word, count in words.items():
            merged[_merge(word, best)] += count
        words = merged
    return ranks


def _merge(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    out: list[bytes] = []
    for token in word:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return tuple(out)


def rank_file(ranks: list[bytes]) -> bytes:
    """The bytes of a tiktoken.model file."""
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
    return b"".join(lines)


def write_k3_tokenizer(folder: Path, ranks: bytes, base: int) -> None:
    """Write the tokenizer files of a checkpoint of the family, with K3's table after `base`."""
    (folder / "tiktoken.model").write_bytes(ranks)
    config = {
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "added_tokens_decoder": {
            str(base + offset): {"content": text, "special": True}
            for offset, text in SPECIALS.items()
        },
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = {
        "model_type": "kimi_k3", "eos_token_id": base + 2,
        "text_config": {"vocab_size": base + 256},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(model))

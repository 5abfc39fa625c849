"""Rank files (`tiktoken.model`), the vocabulary of Kimi checkpoints.

Knows: the file format, Kimi's pre-tokenizer and the control tokens after the base vocabulary.
Does not know: chat formats.

A rank file has one line per token: the bytes in base64, a blank, the rank, which is the id. The
control tokens have the ids that follow; tokenizer_config.json names some of them, the rest are
`<|reserved_token_ID|>`, so that no id moves whichever are named.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence

import tiktoken

from trimtab.errors import DataError

CONTROL_TOKENS = 256  # where config.json does not state the size of the vocabulary
# The pattern matcher's cost on one piece is not linear, so pieces are cut as in training.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CLITIC = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PRE_TOKENIZER = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CLITIC}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CLITIC}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_RUN = re.compile(r"\s+|\S+")


class RankVocabulary:
    """A rank file with its control tokens.

    Args:
        data: content of the file.
        config: tokenizer_config.json; `added_tokens_decoder` names control tokens.
        vocab_size: rows of the model's embedding, None where config.json does not say.
        where: the file, for errors.

    Raises:
        DataError: TT405 where the file is damaged or a control token has an impossible id.
    """

    def __init__(
        self, data: bytes, config: Mapping[str, object], vocab_size: int | None, where: str
    ) -> None:
        ranks = parse_ranks(data, where)
        self.size = len(ranks) + CONTROL_TOKENS if vocab_size is None else vocab_size
        if self.size < len(ranks):
            raise DataError(
                "TT405", where, f"has {len(ranks)} tokens, config.json states a vocabulary of "
                f"{self.size}",
            )  # fmt: skip
        self.specials: Mapping[int, str] = _control_tokens(config, len(ranks), self.size, where)
        self._ids = {text: i for i, text in self.specials.items()}
        self._encoding = tiktoken.Encoding(
            where, pat_str=PRE_TOKENIZER, mergeable_ranks=ranks, special_tokens=self._ids
        )

    def encode(self, text: str, allow_special: bool) -> list[int]:
        """Ids of a text; texts and runs that are too long are cut first."""
        if allow_special:
            return [i for p in pieces(text) for i in self._encoding.encode(p, allowed_special="all")]
        return [i for p in pieces(text) for i in self._encoding.encode_ordinary(p)]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Text of ids; ids beyond the vocabulary have none."""
        kept = [
            i for i in ids if 0 <= i < self.size and not (skip_special and i in self.specials)
        ]  # fmt: skip
        return self._encoding.decode(kept, errors="replace")

    def token_id(self, text: str) -> int | None:
        """Id of a control token by its text."""
        return self._ids.get(text)


def parse_ranks(data: bytes, where: str) -> dict[bytes, int]:
    """Read a rank file.

    Returns:
        Rank by token.

    Raises:
        DataError: TT405 with the line that is wrong.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            if token in ranks:
                raise ValueError
            ranks[token] = int(rank)
        except ValueError:
            raise DataError(
                "TT405", f"{where}:{number}", "must be a token in base64 and its rank, each token "
                "once", value=line[:40].decode("utf-8", "replace"),
                hint="copy the file again; a few lines of text may stand for a large file that "
                "was not downloaded",
            ) from None  # fmt: skip
    if set(ranks.values()) != set(range(len(ranks))):
        raise DataError("TT405", where, f"its {len(ranks)} ranks must be 0 to {len(ranks) - 1}")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError("TT405", where, "lacks single bytes", value=missing[0])
    return ranks


def pieces(text: str) -> Iterator[str]:
    """Cut a text that the pre-tokenizer could not handle at once; joined they are the text."""
    for start in range(0, len(text), MAX_PIECE_CHARS):
        chunk = text[start : start + MAX_PIECE_CHARS]
        begin = 0
        if len(chunk) > MAX_RUN_CHARS:
            for run in _RUN.finditer(chunk):
                for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                    yield chunk[begin:cut]
                    begin = cut
        yield chunk[begin:]


def _control_tokens(
    config: Mapping[str, object], begin: int, end: int, where: str
) -> dict[int, str]:
    """Text of every id from `begin` to `end`, named by the config or by its id."""
    tokens = {i: f"<|reserved_token_{i}|>" for i in range(begin, end)}
    named = config.get("added_tokens_decoder")
    for key, token in (named if isinstance(named, Mapping) else {}).items():
        text = token.get("content") if isinstance(token, Mapping) else token
        place = f"{where}, token {text} of tokenizer_config.json"
        if not str(key).isdecimal() or not begin <= int(key) < end:
            raise DataError(
                "TT405", place, f"must have an id from {begin}, after the file's tokens, to "
                f"{end - 1}, the end of the vocabulary", value=key,
            )  # fmt: skip
        if not isinstance(text, str) or not text:
            raise DataError("TT405", place, "must be a text that is not empty")
        tokens[int(key)] = text
    if len(set(tokens.values())) < len(tokens):
        raise DataError("TT405", where, "two control tokens have the same text")
    return tokens

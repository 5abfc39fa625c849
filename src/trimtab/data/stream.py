"""The data of a run: one endless, reproducible sequence of packs.

Knows: the data section of a recipe. Does not know: ranks, models. The sequence depends on the
recipe's data section, the seed, the files and the tokenizer, and on nothing else: ranks take
turns on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from trimtab.config.data import DataSection
from trimtab.data.encode import Encoded, encode_record
from trimtab.data.left_out import LeftOut
from trimtab.data.mixture import Mixture, RecordRef
from trimtab.data.packing import Pack, RowFiller, build_pack
from trimtab.data.prompt import ImageProcessor, may_leave_out
from trimtab.data.records import RecordFile, open_records
from trimtab.data.tokenizer import Tokenizer, check_token_ids
from trimtab.errors import DataError, RunError


@dataclass(slots=True)
class SourceCounts:
    """What was read from one file so far.

    Args:
        records: records fed.
        tokens: their tokens.
        supervised: tokens of them that enter the loss.
        truncated: records cut to the longest length.
        skipped: records dropped as unreadable, too long (or with an image that is) or without
            anything to predict.
        left_out: each of those once.
    """

    records: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    skipped: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    role: str
    file: RecordFile
    ratio: float
    counts: SourceCounts = field(default_factory=SourceCounts)


class DataStream:
    """Yields packs; `state` and `restore` continue exactly.

    Args:
        data: the `finetune.data` section.
        tokenizer: of the model.
        seed: the recipe's seed.
        vocab_size: rows of the model's embedding; larger ids are refused.
        processor: of the model's images; None for a model of text only.
        files: the records of each file of `data`, where some are held out; else all are read.

    Attributes:
        position: number of packs dealt so far; the one counter that names a place.

    Raises:
        DataError: TT402, TT107 for the files.
    """

    def __init__(
        self,
        data: DataSection,
        tokenizer: Tokenizer,
        seed: int,
        vocab_size: int | None = None,
        processor: ImageProcessor | None = None,
        files: Sequence[RecordFile] | None = None,
    ) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._seed = seed
        self._vocab_size = vocab_size
        self._processor = processor
        opened = [open_records(f.path, f.form, last_only=f.last_only) for f in data.files] if files is None else files
        self._sources = [
            _Source(f.name, f.role, file, f.share)
            for f, file in zip(data.files, opened, strict=True)
        ]
        self.position = 0
        self._start()

    def _start(self) -> None:
        sizes = [len(source.file) for source in self._sources]
        self._mixture = Mixture(sizes, [source.ratio for source in self._sources], self._seed)
        self._filler: RowFiller[RecordRef] = RowFiller(self._data.max_seq_len, self._data.packing)
        self._idle = [0] * len(sizes)  # records skipped in a row

    @property
    def counts(self) -> dict[str, SourceCounts]:
        """What was read by this object, by the name of the file in the recipe."""
        return {source.name: source.counts for source in self._sources}

    def check_records(self, progress: Callable[[int, int], None]) -> None:
        """Read every record once, so that broken lines end a run, or are known, before it begins.

        Only the form is checked, not the tokens.

        Args:
            progress: called with records read and records in all.

        Raises:
            DataError: TT401 for the first record that is none, unless `on_error` skips such.
        """
        done, total = 0, sum(len(source.file) for source in self._sources)
        for source in self._sources:
            for index in range(len(source.file)):
                try:
                    source.file.record(index)
                except DataError as error:
                    if self._data.on_error == "error":
                        raise
                    source.counts.left_out.add(source.file.where(index), error.rule)
                done += 1
                progress(done, total)

    def left_out(self) -> list[str]:
        """One line per file with records that are known to be left out."""
        return [
            f"{source.file.path}: {source.counts.left_out} of {len(source.file):,} records left out: "
            f"{source.counts.left_out.places()}"
            for source in self._sources if source.counts.left_out
        ]

    def fed(self) -> list[str]:
        """One line per file on what was read from it by this object."""
        lines = []
        for source in self._sources:
            counts = source.counts
            line = (f"{source.name}: {counts.records:,} records with {counts.tokens:,} tokens, "
                    f"{counts.supervised:,} of them in the loss")
            if counts.truncated:
                line += f"; {counts.truncated:,} cut to {self._data.max_seq_len:,} tokens"
            lines.append(line)
        return lines

    def __iter__(self) -> Iterator[Pack]:
        while True:
            yield self.next_pack()

    def next_pack(self) -> Pack:
        """The pack at `position`, which then moves on by one.

        Raises:
            DataError: TT401, TT403, TT404 for a record; TT402 where a source yields none.
        """
        row, free = self._filler.open_row()
        while self._filler.wants_more(row, free):
            ref = self._mixture.next_ref()
            encoded = self._read(ref)
            self._mixture.feed(ref, 0 if encoded is None else len(encoded))
            if encoded is not None:
                free = self._filler.add(row, free, (ref, encoded))
        pack = build_pack(
            self.position,
            [encoded for _, encoded in row],
            [self._sources[ref.source].name for ref, _ in row],
            self._data.max_seq_len,
            self._tokenizer.pad_id,
        )
        self.position += 1
        return pack

    def state(self) -> dict[str, object]:
        """Place in the stream as plain values, for a checkpoint; a few hundred bytes."""
        return {
            "position": self.position,
            "sources": self._mixture.state(),
            "waiting": [asdict(ref) for ref, _ in self._filler.waiting],
            "files": [[len(source.file), source.file.num_bytes] for source in self._sources],
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue where `state` was taken; the next packs are the same bit for bit.

        Raises:
            RunError: TT603 where the data files differ from those of the state.
        """
        files = [[len(source.file), source.file.num_bytes] for source in self._sources]
        if state["files"] != files:
            raise RunError(
                "TT603", "finetune.data", "the data files have changed since the state was saved",
                value=files, hint="put the files back, or start a new run in another directory",
            )  # fmt: skip
        self._start()
        self._mixture.restore(state["sources"])  # type: ignore[arg-type]
        for item in state["waiting"]:  # type: ignore[attr-defined]
            ref = RecordRef(**item)
            encoded, _ = self._encode(ref)
            self._filler.waiting.append((ref, encoded))
        self.position = int(state["position"])  # type: ignore[call-overload]

    def fresh(self) -> DataStream:
        """Another stream of the same packs, at their beginning."""
        files = [source.file for source in self._sources]
        return DataStream(
            self._data, self._tokenizer, self._seed, self._vocab_size, self._processor, files
        )

    def seek(self, position: int) -> None:
        """Go to the pack of that number by reading from the start; `restore` is faster."""
        if position < self.position:
            self._start()
            self.position = 0
        while self.position < position:
            self.next_pack()

    def steps_for_epochs(self, epochs: float, tokens_per_step: int) -> int:
        """Optimizer steps after which `epochs` passes over the domain records were fed.

        With several files, as many records as they hold together count as a pass.

        Reads the records once through a second stream, so it takes as long as encoding them.
        """
        domain = [i for i, source in enumerate(self._sources) if source.role == "domain"]
        sizes = [len(self._sources[i].file) for i in domain]
        wanted = math.ceil(epochs * sum(sizes))
        probe = self.fresh()
        progress = [probe._mixture.progress[i] for i in domain]

        def dealt() -> int:
            return sum(p.epoch * n + p.position for p, n in zip(progress, sizes, strict=True))

        while dealt() < wanted:
            probe.next_pack()
        return max(1, math.ceil(probe.position * self._data.max_seq_len / tokens_per_step))

    def _encode(self, ref: RecordRef) -> tuple[Encoded, bool]:
        """A record as tokens, cut if need be, and whether it was cut."""
        source = self._sources[ref.source]
        record = source.file.record(self._mixture.index(ref))
        encoded = encode_record(record, self._tokenizer, self._processor)
        if self._vocab_size is not None and encoded.token_ids.max(initial=0) >= self._vocab_size:
            check_token_ids(encoded.token_ids.tolist(), self._vocab_size, record.where)
        limit = self._data.max_seq_len
        if len(encoded) <= limit:
            return encoded, False
        if self._data.overlong == "error":
            raise DataError(
                "TT401", record.where, f"has {len(encoded)} tokens; max_seq_len is {limit}",
                hint="raise finetune.data.max_seq_len, or set overlong to truncate or skip",
            )  # fmt: skip
        return encoded.truncated(limit), True

    def _read(self, ref: RecordRef) -> Encoded | None:
        """A record to feed, or None where the recipe says to leave it out."""
        source = self._sources[ref.source]
        try:
            encoded, cut = self._encode(ref)
        except DataError as error:
            if not may_leave_out(error, self._data):
                raise
            self._skip(ref, error.rule)
            return None
        too_long = cut and self._data.overlong == "skip"
        if too_long or encoded.num_supervised == 0:
            self._skip(ref, "too long" if too_long else "nothing in it is to be predicted")
            return None
        self._idle[ref.source] = 0
        source.counts.records += 1
        source.counts.tokens += len(encoded)
        source.counts.supervised += encoded.num_supervised
        source.counts.truncated += cut
        return encoded

    def _skip(self, ref: RecordRef, reason: str) -> None:
        source = self._sources[ref.source]
        source.counts.skipped += 1
        source.counts.left_out.add(source.file.where(self._mixture.index(ref)), reason)
        self._idle[ref.source] += 1
        # Records in a row can be the end of one pass and the beginning of the next; twice the
        # size covers a whole pass.
        if self._idle[ref.source] >= 2 * len(source.file):
            raise DataError(
                "TT402",
                source.file.path,
                "no record in it can be used",
                hint="see `trimtab data preview RECIPE`",
            )

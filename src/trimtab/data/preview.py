"""What a recipe's data looks like to the model: token runs by origin, images, and totals.

Knows: records, tokenizers, streams. Does not know: terminals, pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.config.data import DataSection, SourceFile
from trimtab.data.encode import Encoded, encode_record
from trimtab.data.image_source import message_images, thumbnail
from trimtab.data.left_out import LeftOut
from trimtab.data.packing import Pack
from trimtab.data.prompt import ImageProcessor, Prompt, build_prompt, may_leave_out
from trimtab.data.records import Record, open_records
from trimtab.data.stream import DataStream
from trimtab.data.tokenizer import Tokenizer
from trimtab.errors import DataError


@dataclass(frozen=True, slots=True)
class ImageBox:
    """One image as the model takes it.

    Args:
        width: of the original, in pixels.
        height: of the original, in pixels.
        rows: of tokens.
        columns: of tokens.
        picture: a small copy as a data: URL, empty where none was asked for.
    """

    width: int
    height: int
    rows: int
    columns: int
    picture: str = ""

    def __str__(self) -> str:
        count = self.rows * self.columns
        unit = "token" if count == 1 else "tokens"
        return f"image {self.width}x{self.height}: {self.rows}x{self.columns} = {count} {unit}"


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one origin.

    Args:
        text: decoded, or what an image is.
        role: role of the message, `text` for plain text, `template` for the format's own, `image`
            for the placeholders of one image.
        supervised: the tokens enter the loss.
        num_tokens: how many they are.
        image: the image.
    """

    text: str
    role: str
    supervised: bool
    num_tokens: int
    image: ImageBox | None = None


@dataclass(slots=True)
class SourceSummary:
    """Totals over the records that were looked at.

    Args:
        path: file.
        records: in the whole file.
        form: of its records.
        looked_at: records read for the numbers below.
        tokens: their tokens, cut to the longest length.
        supervised: tokens that enter the loss.
        longest: tokens of the longest record before cutting.
        overlong: records longer than the longest length.
        unreadable: records left out because `on_error` is skip, or their images are too long.
        left_out: `file:line: reason` of the first of those.
        image_sizes: number of images by tokens they take.
    """

    path: str
    records: int
    form: str
    looked_at: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    overlong: int = 0
    unreadable: int = 0
    left_out: list[str] = field(default_factory=list)
    image_sizes: dict[int, int] = field(default_factory=dict)

    @property
    def images(self) -> int:
        """Images in the records looked at."""
        return sum(self.image_sizes.values())

    @property
    def image_tokens(self) -> int:
        """Their tokens."""
        return sum(size * count for size, count in self.image_sizes.items())


@dataclass(frozen=True, slots=True)
class PackSummary:
    """Totals over the first packs of the stream.

    Args:
        packs: how many were built.
        records: records in them.
        filled: share of positions that are not padding.
        supervised: share of positions that enter the loss.
        shares: share of the tokens by source.
        images: images in them.
        image_share: share of positions that are image tokens.
    """

    packs: int
    records: int
    filled: float
    supervised: float
    shares: dict[str, float]
    images: int = 0
    image_share: float = 0.0


def token_runs(
    record: Record,
    tokenizer: Tokenizer,
    processor: ImageProcessor | None = None,
    *,
    pictures: bool = False,
) -> list[Run]:
    """Cut a record into runs of tokens with one role and one loss mask.

    Args:
        record: text or conversation.
        tokenizer: of the model.
        processor: of the model; None for a model of text only.
        pictures: put a small copy of each image into its box.
    """
    if record.text is not None:
        encoded = encode_record(record, tokenizer)
        prompt = Prompt(encoded.token_ids.tolist(), encoded.loss_mask.tolist(), [])
        origins = ["text"] * len(encoded)
    else:
        prompt = build_prompt(
            record.messages, tokenizer, processor, where=record.where, tools=record.tools,
            last_only=record.last_only,
        )  # fmt: skip
        roles = [str(message["role"]) for message in record.messages]
        origins = ["template" if m is None else roles[m] for m in prompt.messages]
    boxes = _boxes(record, prompt, processor, pictures)
    owners = _image_of_token(prompt)
    # Neighbours with the same three belong to one run.
    keys = list(zip(origins, prompt.loss_mask, owners, strict=True))
    runs: list[Run] = []
    begin = 0
    for end in range(1, len(keys) + 1):
        if end == len(keys) or keys[end] != keys[begin]:
            origin, supervised, image = keys[begin]
            if image is not None:
                box = boxes[image]
                runs.append(Run(str(box), "image", supervised, end - begin, box))
            else:
                text = tokenizer.decode(prompt.token_ids[begin:end])
                runs.append(Run(text, origin, supervised, end - begin))
            begin = end
    return runs


def _image_of_token(prompt: Prompt) -> list[int | None]:
    """Number of the image that each token stands for, None for text."""
    owners: list[int | None] = [None] * len(prompt.token_ids)
    rows = iter(prompt.image_rows)
    for number, image in enumerate(prompt.images):
        for _ in range(image.num_tokens):
            owners[next(rows)] = number
    return owners


def _boxes(
    record: Record, prompt: Prompt, processor: ImageProcessor | None, pictures: bool
) -> list[ImageBox]:
    if processor is None:
        return []
    rule, limits = processor.rule, processor.limits
    sources = message_images(record.messages)
    boxes = []
    height, width = (side // rule.patch_size for side in rule.token_side)
    for source, image in zip(sources, prompt.images, strict=True):
        _, rows, columns = image.grid
        picture = thumbnail(source.read(limits.root, fetch=limits.fetch)) if pictures else ""
        boxes.append(ImageBox(image.width, image.height, rows // height, columns // width, picture))  # fmt: skip
    return boxes


def summarise_source(
    source: SourceFile,
    data: DataSection,
    tokenizer: Tokenizer,
    limit: int | None,
    advance: Callable[[float], None] | None = None,
    processor: ImageProcessor | None = None,
) -> SourceSummary:
    """Encode the first records of a file and add up.

    Args:
        source: the file.
        data: for the longest length and what to do with unreadable records.
        tokenizer: of the model.
        limit: how many records to read; None for all.
        advance: called with 1 after each record, for a progress bar.
        processor: of the model's images; None for a model of text only.

    Raises:
        DataError: TT401, TT402, TT404, TT406, TT407 unless the recipe leaves such records out.
    """
    file = open_records(source.path, source.form, last_only=source.last_only)
    total, left_out = SourceSummary(source.path, len(file), file.form), LeftOut()
    for index in range(len(file) if limit is None else min(limit, len(file))):
        total.looked_at += 1
        try:
            encoded = encode_record(file.record(index), tokenizer, processor)
        except DataError as error:
            if not may_leave_out(error, data):
                raise
            left_out.add(file.where(index), error.rule)
            continue
        _add(total, encoded, data.max_seq_len)
        if advance is not None:
            advance(1)
    total.unreadable, total.left_out = len(left_out), left_out.first()
    return total


def _add(total: SourceSummary, encoded: Encoded, max_seq_len: int) -> None:
    total.longest = max(total.longest, len(encoded))
    total.overlong += len(encoded) > max_seq_len
    kept = encoded.truncated(max_seq_len)
    total.tokens += len(kept)
    total.supervised += kept.num_supervised
    for image in encoded.images:
        size = image.num_tokens
        total.image_sizes[size] = total.image_sizes.get(size, 0) + 1


def summarise_packs(
    data: DataSection,
    tokenizer: Tokenizer,
    seed: int,
    count: int,
    processor: ImageProcessor | None = None,
) -> PackSummary:
    """Build the first packs of a run and measure how full they are."""
    stream = DataStream(data, tokenizer, seed, processor=processor)
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
        images=sum(len(pack.images) for pack in packs),
        image_share=sum(len(pack.image_rows) for pack in packs) / positions,
    )

"""Records with images: placeholders, loss mask, packs, files, and counts that disagree."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.pictures import encoded, file_bytes, image_record, picture
from trimtab.config.data import DataSection, ImageSection
from trimtab.data.encode import encode_record
from trimtab.data.image_totals import count_images
from trimtab.data.images import VisionRule
from trimtab.data.packing import IGNORED, build_pack
from trimtab.data.prompt import ImageProcessor, build_prompt
from trimtab.data.records import JsonlFile, Record, open_records, parse_record, read_records
from trimtab.data.stream import DataStream
from trimtab.data.template import ChatTemplate
from trimtab.data.tokenizer import Tokenizer
from trimtab.errors import DataError

Writer = Callable[[str, Iterable[object]], str]
BEGIN, CONTENT, END, PAD = 264, 265, 266, 267


@pytest.fixture
def processor() -> ImageProcessor:
    return ImageProcessor(VisionRule(), PAD, ImageSection())


def parsed(value: object, where: str = "d.jsonl:3") -> Record:
    return parse_record(json.dumps(value).encode(), where)


def framed(width: int, height: int, tokens: int) -> list[int]:
    size = list(f"image {width}x{height}".encode())
    return [BEGIN, *size, CONTENT, *[PAD] * tokens, END]


def test_an_image_becomes_framing_and_its_placeholders(
    tokenizer: Tokenizer, processor: ImageProcessor
) -> None:
    record = parsed(image_record("read:", "73", encoded(56, 28)))
    item = encode_record(record, tokenizer, processor)
    want = [261, *framed(56, 28, 2), *b"read:", 258, 262, *b"73", 258]
    assert item.token_ids.tolist() == want
    assert item.image_rows == tuple(n for n, i in enumerate(want) if i == PAD)
    assert [image.num_tokens for image in item.images] == [2]
    assert item.token_ids[item.loss_mask].tolist() == [*b"73", 258]
    assert item.num_bytes == 2


def test_images_keep_their_order_and_place(tokenizer: Tokenizer, processor: ImageProcessor) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image", "base64": encoded(28, 28)},
               {"type": "text", "text": "b"}, {"type": "image", "base64": encoded(84, 28)}]  # fmt: skip
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "c"},
                {"role": "user", "content": [{"type": "image", "base64": encoded(28, 56)}]},
                {"role": "assistant", "content": "d"}]  # fmt: skip
    item = encode_record(parsed({"messages": messages}), tokenizer, processor)
    assert [(i.width, i.height, i.num_tokens) for i in item.images] == [
        (28, 28, 1), (84, 28, 3), (28, 56, 2)]  # fmt: skip
    want = [261, *b"a", *framed(28, 28, 1), *b"b", *framed(84, 28, 3), 258, 262, *b"c", 258,
            261, *framed(28, 56, 2), 258, 262, *b"d", 258]  # fmt: skip
    assert item.token_ids.tolist() == want


def test_placeholders_are_never_supervised_even_in_an_answer(
    tokenizer: Tokenizer, processor: ImageProcessor
) -> None:
    answer = [{"type": "image", "base64": encoded(56, 56)}, {"type": "text", "text": "x"}]
    messages = [{"role": "user", "content": "draw"}, {"role": "assistant", "content": answer}]
    item = encode_record(parsed({"messages": messages}), tokenizer, processor)
    assert len(item.image_rows) == 4
    assert not item.loss_mask[list(item.image_rows)].any()
    assert item.loss_mask[-1] and item.num_bytes == 1
    pack = build_pack(0, [item], ["a"], len(item), 0)
    assert not (pack.labels == PAD).any()


def test_a_typed_placeholder_stays_text(tokenizer: Tokenizer, processor: ImageProcessor) -> None:
    text = "<|media_pad|><image><|media_begin|>"
    item = encode_record(parsed(image_record(text, "y", encoded())), tokenizer, processor)
    assert (item.token_ids == PAD).sum() == 1 == len(item.images)
    assert text.encode() in bytes(i for i in item.token_ids.tolist() if i < 256)


def test_bare_parts_take_the_images_of_the_record_in_order(
    tokenizer: Tokenizer, processor: ImageProcessor
) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "?"}, {"type": "image"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "y"}]
    images = [encoded(28, 28), {"base64": encoded(56, 28)}]
    item = encode_record(parsed({"messages": messages, "images": images}), tokenizer, processor)
    assert [image.width for image in item.images] == [28, 56]
    prompt = {"prompt": content, "completion": "y", "images": images}
    assert np.array_equal(encode_record(parsed(prompt), tokenizer, processor).token_ids,
                          item.token_ids)  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "images", "said"),
    [
        (2, 1, r"more image parts than images \(1 in `images`\)"),
        (1, 0, r"more image parts than images \(0"),
        (1, 2, "lists 2 images for 1 image parts"),
        (0, 1, "lists 1 images for 0 image parts"),
    ],
)
def test_counts_that_differ_name_the_record(parts: int, images: int, said: str) -> None:
    content = [*[{"type": "image"}] * parts, {"type": "text", "text": "<image>?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "y"}]
    with pytest.raises(DataError, match=said) as caught:
        parsed({"messages": messages, "images": [encoded()] * images}, "d.jsonl:41")
    assert (caught.value.code, caught.value.where) == ("TT407", "d.jsonl:41")


@pytest.mark.parametrize(
    ("content", "said"),
    [([], "at least one part"), ([{"type": "video", "path": "a"}], "type: image"), (["a"], "type"),
     ([{"type": "text"}], "type: text"), ([{"type": "image", "image": "ftp://a/b"}], "address"),
     ([{"type": "image", "image": 3}], "must be a text")],
)  # fmt: skip
def test_a_bad_part_is_named(content: list[object], said: str) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "y"}]
    with pytest.raises(DataError, match=said) as caught:
        parsed({"messages": messages})
    assert caught.value.where.startswith("d.jsonl:3: messages[0].content")


def with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    import copy

    other = copy.copy(tokenizer)
    other.template = ChatTemplate(source, {}, ["<|media_pad|>"], "t.jinja")
    return other


@pytest.mark.parametrize("pads", [0, 2])
def test_a_template_with_other_placeholders_than_images_names_the_record(
    tokenizer: Tokenizer, processor: ImageProcessor, pads: int
) -> None:
    other = with_template(tokenizer, "{% for m in messages %}" + "<|media_pad|>" * pads
                          + "{% endfor %}{{ messages[1].content }}")  # fmt: skip
    with pytest.raises(DataError, match=rf"1 images, but .* writes {2 * pads} ") as caught:
        encode_record(parsed(image_record("q", "y", encoded()), "d.jsonl:8"), other, processor)
    assert (caught.value.code, caught.value.where) == ("TT407", "d.jsonl:8")


def test_a_template_that_writes_placeholders_without_images_names_the_record(
    tokenizer: Tokenizer, processor: ImageProcessor
) -> None:
    other = with_template(tokenizer, "<|media_pad|>{{ messages[1].content }}")
    with pytest.raises(DataError, match=r"0 images, but .* writes 1 "):
        encode_record(parsed({"prompt": "q", "completion": "y"}), other, processor)


def test_a_model_of_text_only_refuses_images(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="takes text only") as caught:
        encode_record(parsed(image_record("q", "y", encoded())), tokenizer)
    assert caught.value.where == "d.jsonl:3: messages[0].content[0]"


def test_a_prompt_without_answer_ends_with_the_opening_of_one(
    tokenizer: Tokenizer, processor: ImageProcessor
) -> None:
    messages, answer = parsed(image_record("q", "y", encoded())).prompt_and_answer()
    prompt = build_prompt(messages, tokenizer, processor, where="x", add_generation_prompt=True)
    assert prompt.token_ids[-1] == 262 and len(prompt.images) == 1 and answer == "y"


def test_truncation_never_cuts_an_image(tokenizer: Tokenizer, processor: ImageProcessor) -> None:
    record = parsed(image_record("q", "y", encoded(28, 28), encoded(84, 28)))
    item = encode_record(record, tokenizer, processor)
    first, second = item.image_rows[0], item.image_rows[1:]
    for length in range(1, len(item) + 1):
        cut = item.truncated(length)
        assert len(cut) <= length
        assert sum(image.num_tokens for image in cut.images) == len(cut.image_rows)
        assert (cut.token_ids == PAD).sum() == len(cut.image_rows)
        assert len(cut.images) == (length > first) + (length > second[-1])
    assert item.truncated(len(item)).images == item.images


def test_packs_shift_the_rows_of_images(tokenizer: Tokenizer, processor: ImageProcessor) -> None:
    items = [
        encode_record(parsed(image_record("q", "y", encoded(28 * n, 28))), tokenizer, processor)
        for n in (2, 1)
    ]
    total = sum(len(item) for item in items)
    pack = build_pack(0, items, ["a", "b"], total + 5, 259)
    assert pack.image_rows.tolist() == np.flatnonzero(pack.input_ids == PAD).tolist()
    assert [image.num_tokens for image in pack.images] == [2, 1]
    assert (pack.labels[pack.image_rows - 1] == IGNORED).all()


def section(path: str, **values: object) -> DataSection:
    return DataSection.model_validate({"domain": {"path": path}, "max_seq_len": 128, **values})


def test_the_stream_restarts_with_the_same_images(
    tokenizer: Tokenizer, processor: ImageProcessor, jsonl: Writer
) -> None:
    records = [image_record("read:", str(n), encoded(28 * (n % 3 + 1), 28, n)) for n in range(9)]
    data = section(jsonl("d.jsonl", records))
    stream = DataStream(data, tokenizer, 5, 320, processor)
    for _ in range(3):
        stream.next_pack()
    other = DataStream(data, tokenizer, 5, 320, processor)
    other.restore(json.loads(json.dumps(stream.state())))
    for _ in range(3):
        first, second = stream.next_pack(), other.next_pack()
        assert np.array_equal(first.input_ids, second.input_ids)
        assert np.array_equal(first.image_rows, second.image_rows) and len(first.images) > 0
        for a, b in zip(first.images, second.images, strict=True):
            assert np.array_equal(a.patches, b.patches)


@pytest.mark.parametrize("policy", ["resize", "skip", "error"])
def test_an_image_above_the_limit_follows_the_recipe(
    tokenizer: Tokenizer, jsonl: Writer, policy: str
) -> None:
    path = jsonl("d.jsonl", [image_record("q", "y", encoded(112, 56)),
                             image_record("q", "y", encoded(28, 28))])  # fmt: skip
    data = section(path, image={"max_tokens": 4, "on_too_long": policy})
    processor = ImageProcessor(VisionRule(), PAD, data.image)
    stream = DataStream(data, tokenizer, 0, 320, processor)
    if policy == "error":
        with pytest.raises(DataError, match=r"112x56.*takes 8 tokens; .* is 4"):
            stream.next_pack()
        return
    packs = [stream.next_pack() for _ in range(2)]
    sizes = {image.num_tokens for pack in packs for image in pack.images}
    widths = {image.width for pack in packs for image in pack.images}
    assert max(sizes) <= 4
    assert widths == ({112, 28} if policy == "resize" else {28})
    assert (stream.counts["domain"].skipped > 0) == (policy == "skip")


def test_an_unreadable_image_stops_or_is_skipped(
    tokenizer: Tokenizer, processor: ImageProcessor, jsonl: Writer
) -> None:
    broken = image_record("q", "y", "gone.png")
    path = jsonl("d.jsonl", [{"prompt": "a", "completion": "b"}, broken])
    with pytest.raises(DataError, match=r"d\.jsonl:2: messages\[0\].*no such file"):
        [DataStream(section(path), tokenizer, 0, 320, processor).next_pack() for _ in range(2)]
    stream = DataStream(section(path, on_error="skip"), tokenizer, 0, 320, processor)
    stream.next_pack()
    assert stream.counts["domain"].skipped > 0


def test_totals_count_images_by_tokens(
    tokenizer: Tokenizer, processor: ImageProcessor, jsonl: Writer
) -> None:
    records = [image_record("q", "y", encoded(28, 28), encoded(56, 28)), {"text": "t"},
               image_record("q", "y", encoded(56, 28)), image_record("q", "y", encoded(28, 4480))]  # fmt: skip
    path = jsonl("d.jsonl", records)
    totals = count_images(open_records(path), tokenizer, processor, section(path))
    assert (totals.looked_at, totals.records, totals.images, totals.tokens) == (4, 3, 4, 165)
    assert totals.sizes == {1: 1, 2: 2, 160: 1} and totals.too_long == 1
    assert "4 images in 3 of 4 records, 1 to 160 tokens each" in str(totals)
    assert "longer than max_seq_len" in str(totals)
    few = count_images(open_records(path), tokenizer, processor, section(path), limit=2)
    assert few.looked_at == 2
    with pytest.raises(DataError, match="takes text only"):
        count_images(open_records(path), tokenizer, None, section(path))


def test_totals_find_a_template_without_placeholders_before_training(
    tokenizer: Tokenizer, processor: ImageProcessor, jsonl: Writer
) -> None:
    path = jsonl("d.jsonl", [{"text": "t"}, image_record("q", "y", encoded())])
    other = with_template(tokenizer, "{{ messages[1].content }}")
    with pytest.raises(DataError, match="TT407") as caught:
        count_images(open_records(path), other, processor, section(path))
    assert caught.value.where == f"{path}:2"


def write_parquet(path: Path, rows: list[dict[str, object]], group: int = 2) -> str:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=group)
    return str(path)


def test_parquet_rows_are_the_records_of_jsonl_lines(
    tokenizer: Tokenizer, processor: ImageProcessor, tmp_path: Path, jsonl: Writer
) -> None:
    def row(n: int, images: list[object]) -> dict[str, object]:
        content = [{"type": "image", "text": None}, {"type": "text", "text": f"q{n}"}]
        messages = [{"role": "user", "content": content},
                    {"role": "assistant", "content": [{"type": "text", "text": str(n)}]}]  # fmt: skip
        return {"messages": messages, "images": images, "id": n, "tools": None}

    data = [file_bytes(picture(28 * (n + 1), 28, seed=n)) for n in range(3)]
    text = [base64.b64encode(d).decode() for d in data]
    path = write_parquet(
        tmp_path / "d.parquet",
        [row(n, [{"bytes": d, "path": "was/elsewhere.png"}]) for n, d in enumerate(data)],
    )
    lines = jsonl("d.jsonl", [row(n, [t]) for n, t in enumerate(text)])
    file = open_records(path)
    assert len(file) == 3 and file.num_bytes == Path(path).stat().st_size
    for index in (2, 0, 1, 2):
        got = encode_record(file.record(index), tokenizer, processor)
        want = encode_record(JsonlFile(lines).record(index), tokenizer, processor)
        assert np.array_equal(got.token_ids, want.token_ids)
        assert np.array_equal(got.images[0].patches, want.images[0].patches)
    assert [record.where for record in read_records(path)] == [f"{path}:{n}" for n in (1, 2, 3)]


def test_parquet_of_texts_and_a_broken_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", [{"text": f"t{n}"} for n in range(5)])
    assert [record.text for record in read_records(path)] == [f"t{n}" for n in range(5)]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="TT401"):
        open_records(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="TT107"):
        open_records(tmp_path / "gone.parquet")
    with pytest.raises(DataError, match="TT402"):
        open_records(write_parquet(tmp_path / "e.parquet", []))


def test_parquet_without_the_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"trimtab\[parquet\]"):
        open_records(tmp_path / "d.parquet")


def test_a_smaller_limit_only_changes_the_number_of_tokens(
    tokenizer: Tokenizer, processor: ImageProcessor
) -> None:
    record = parsed(image_record("q", "y", encoded(280, 140)))
    limited = replace(processor, limits=ImageSection(max_tokens=6, on_too_long="resize"))
    item = encode_record(record, tokenizer, limited)
    assert item.images[0].num_tokens <= 6 < 50
    assert b"image 280x140" in bytes(i for i in item.token_ids.tolist() if i < 256)

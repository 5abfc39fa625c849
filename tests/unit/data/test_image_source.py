"""Images of records: every way to name one, and every unusable one named with its record."""

from __future__ import annotations

import base64
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.pictures import encoded, file_bytes, picture
from trimtab.data.image_source import (
    MAX_PIXELS,
    decode_image,
    image_file,
    image_source,
    thumbnail,
)
from trimtab.errors import DataError

AT = "d.jsonl:7: messages[0].content[0]"


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_head(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "img").mkdir(parents=True)
    (tmp_path / "data" / "img" / "a.png").write_bytes(file_bytes(picture(28, 28)))
    (tmp_path / "secret.png").write_bytes(file_bytes(picture(28, 28)))
    return tmp_path / "data"


def test_every_way_to_name_an_image_gives_the_same_pixels(folder: Path) -> None:
    text, data = encoded(), file_bytes(picture(28, 28))
    url = f"data:image/png;base64,{text}"
    parts: list[object] = [
        {"path": "img/a.png"}, {"image": "img/a.png"}, "img/a.png", {"image": text}, text,
        {"base64": text}, {"image": url}, {"image_url": {"url": url}}, {"image_url": url},
        {"bytes": data, "path": None}, {"bytes": data, "path": "gone/elsewhere.png"},
        {"bytes": None, "path": "img/a.png"},
    ]  # fmt: skip
    want = np.asarray(picture(28, 28))
    for part in parts:
        source = image_source(part, AT, str(folder))
        assert source.size() == (28, 28)
        assert np.array_equal(np.asarray(source.read()), want), part


def test_jpeg_base64_is_no_absolute_path() -> None:
    text = base64.b64encode(file_bytes(picture(28, 28), "JPEG")).decode()
    assert text.startswith("/9j/")
    assert image_source(text, AT, ".").read().size == (28, 28)


@pytest.mark.parametrize(
    "path", ["../secret.png", "img/../../secret.png", "link.png", "linked/secret.png"]
)
def test_a_path_cannot_leave_the_directory_of_the_data(folder: Path, path: str) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "linked").symlink_to(folder.parent)
    with pytest.raises(DataError, match="leads out") as caught:
        image_source({"path": path}, AT, str(folder)).read()
    assert caught.value.where == AT and caught.value.code == "TT406"


def test_an_absolute_path_needs_a_root_that_holds_it(folder: Path) -> None:
    source = image_source({"path": str(folder / "img" / "a.png")}, AT, str(folder))
    with pytest.raises(DataError, match="relative to the data file"):
        source.read()
    assert source.read(root=str(folder)).size == (28, 28)
    with pytest.raises(DataError, match="leads out"):
        source.read(root=str(folder / "other"))


def test_relative_paths_start_at_the_root_where_there_is_one(folder: Path) -> None:
    source = image_source({"path": "a.png"}, AT, "/nowhere")
    assert source.read(root=str(folder / "img")).size == (28, 28)


def test_a_file_named_on_the_command_line_may_lie_anywhere(folder: Path) -> None:
    assert image_file(folder / "img" / "a.png").read().size == (28, 28)
    with pytest.raises(DataError, match="no such file"):
        image_file(folder / "img" / "gone.png").read()


@pytest.mark.parametrize("path", ["img/gone.png", "img", "a\0b", "x" * 5000])
def test_what_is_no_file_is_said_so(folder: Path, path: str) -> None:
    with pytest.raises(DataError, match=r"no such file|no usable path") as caught:
        image_source({"path": path}, AT, str(folder)).read()
    assert caught.value.where == AT


def test_addresses_are_not_fetched_unless_allowed() -> None:
    with pytest.raises(DataError, match="is an address"):
        image_source({"image_url": {"url": "http://example.com/a.png"}}, AT, ".").read()


@pytest.mark.parametrize(
    "part",
    [{}, {"path": ""}, {"path": 3}, {"path": "a", "base64": "b"}, {"image_url": {}}, 7, None,
     {"url": "a"}],
)  # fmt: skip
def test_a_part_without_one_image_is_refused(part: object) -> None:
    with pytest.raises(DataError) as caught:
        image_source(part, AT, ".")
    assert caught.value.code == "TT401" and caught.value.where == AT


@pytest.mark.parametrize(
    ("text", "said"),
    [("data:image/png", "comma"), ("data:image/png;base64,%%%", "not valid base64"),
     ("iVBORw0KGgo" + "!" * 80, "not valid base64")],
)  # fmt: skip
def test_broken_text_is_refused(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        image_source({"image": text}, AT, ".")


def animated() -> bytes:
    import io

    buffer = io.BytesIO()
    frames = [picture(8, 8, seed=n) for n in range(3)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def deep() -> bytes:
    return file_bytes(Image.fromarray(np.zeros((4, 4), np.uint16)))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no bytes"),
        (b"hello, this is no image", "not an image file"),
        (b"%PDF-1.4 not this either", "not an image file"),
        (file_bytes(picture(64, 64))[:-400], "cannot be decoded"),
        (file_bytes(picture(64, 64), "JPEG")[:300], "cannot be decoded"),
        (png_head(0, 28), "no pixels|not an image|cannot be decoded"),
        (png_head(28, 0), "no pixels|not an image|cannot be decoded"),
        (png_head(9000, 9000), "more pixels"),
        (png_head(12_000, 12_000), "more pixels"),
        (png_head(2**20, 2**20), "more pixels"),
        (png_head(28, 28), "cannot be decoded"),
        (deep(), "must have one of the modes"),
        (file_bytes(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "not an image file"),
        (animated(), "animated"),
    ],
    ids=["empty", "text", "pdf", "cut png", "cut jpeg", "no width", "no height", "large", "larger",
         "bomb", "no data", "16 bits", "tiff", "animated"],
)  # fmt: skip
def test_unusable_images_are_refused_by_name(data: bytes, said: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError, match=said) as caught:
            decode_image(data, AT)
    assert (caught.value.code, caught.value.where) == ("TT406", AT)


def test_the_limit_is_below_that_of_the_library() -> None:
    assert Image.MAX_IMAGE_PIXELS is not None
    assert MAX_PIXELS <= Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(
    ("mode", "want"),
    [("1", "RGB"), ("L", "RGB"), ("LA", "RGBA"), ("P", "RGB"), ("CMYK", "RGB"), ("RGBA", "RGBA")],
)
def test_every_usable_mode_becomes_rgb_or_rgba(mode: str, want: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    data = file_bytes(picture(28, 28, "RGBA").convert("RGB").convert(mode), kind)
    assert decode_image(data, AT).mode == want


def test_a_transparent_colour_counts_as_alpha() -> None:
    import io

    buffer = io.BytesIO()
    picture(8, 8).convert("P").save(buffer, "PNG", transparency=0)
    assert decode_image(buffer.getvalue(), AT).mode == "RGBA"


def test_thumbnails_are_small_and_whole() -> None:
    url = thumbnail(picture(600, 300))
    image = image_source(url, AT, ".").read()
    assert image.size == (256, 128)
    assert image_source(thumbnail(picture(28, 28)), AT, ".").read().size == (28, 28)


def test_a_file_url_is_a_path_that_must_stay_under_the_root(folder: Path) -> None:
    inner = folder / "in side"
    inner.mkdir()
    (inner / "a.png").write_bytes(file_bytes(picture(28, 28)))
    source = image_source({"image_url": {"url": f"file://{folder}/in%20side/a.png"}}, AT, str(folder))
    assert source.read(root=str(folder)).size == (28, 28)
    with pytest.raises(DataError, match=r"TT406.*relative to the data file"):
        source.read()
    with pytest.raises(DataError, match="TT406"):
        source.read(root=str(folder / "img"))
    with pytest.raises(DataError, match=r"TT406.*is an address"):
        image_source({"image_url": {"url": "file://elsewhere/a.png"}}, AT, str(folder))
    with pytest.raises(DataError, match=r"TT406.*no valid address"):
        image_source({"image_url": {"url": "file://[elsewhere/a.png"}}, AT, str(folder))

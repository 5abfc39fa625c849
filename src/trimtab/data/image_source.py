"""Where the image of a record lies, and decoding it within limits.

Knows: paths, base64, image files. Does not know: patches, tokens, models; HTTP (see `fetch`).

An image part of a message names its image in one of these ways:

    {"type": "image", "path": "pictures/7.png"}
    {"type": "image", "base64": "iVBORw0KGgo..."}
    {"type": "image", "image": ...}         a path, base64 text of an image file, or a URL
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
    {"type": "image"}                       the next entry of the record's `images` list

A path starts at the directory of the data file and may not lead out of it, symbolic links
included: a data set from elsewhere must not read private files. `data.image.root` names another
directory instead. An http(s) URL is an image only where `data.image.fetch` allows the network.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from PIL import Image, UnidentifiedImageError

from trimtab.data.fetch import FetchError, fetched
from trimtab.errors import DataError
from trimtab.network import redact

SOURCE = "source"  # key under which an image part of a message carries its ImageSource
MAX_FILE_BYTES = 128 * 2**20
MAX_PIXELS = 64 * 2**20
THUMBNAIL = 256
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
# How the base64 text of a PNG, JPEG, GIF, WEBP or BMP file begins.
_BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGODdh", "R0lGODlh", "UklGR", "Qk")
_SHORTEST_BASE64 = 64  # a file of a pixel has more; a path that begins like one has fewer
_SHOWN = 200  # characters of an address in a message
_KEYS = ("path", "base64", "bytes", "image", "image_url")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a record, not read yet; exactly one of `path`, `data` and `url` is set.

    Args:
        where: `file:line` and the place in the record, for messages.
        path: as the record has it.
        data: bytes of an image file.
        directory: where relative paths start.
        url: http or https.
    """

    where: str
    path: str | None
    data: bytes | None
    directory: str
    url: str | None = None

    def read(self, root: str | None = None, *, fetch: bool = False) -> Image.Image:
        """Decode the image to RGB, or RGBA where parts of it are transparent.

        Args:
            root: directory that paths start at and stay in, in place of the data file's.
            fetch: URLs are fetched, once (see `fetch.fetched`).

        Raises:
            DataError: TT406, naming the record, for anything that is not a whole, single,
                8-bit image within the limits, or a URL that cannot or must not be fetched.
            RunError: TT604 and TT314 as for `fetched`.
        """
        return decode_image(self._bytes(root, fetch), self.where)

    def size(self, root: str | None = None, *, fetch: bool = False) -> tuple[int, int]:
        """Width and height from the head of the file, without decoding the pixels.

        Raises:
            DataError: TT406 as for `read`, as far as the head tells.
        """
        with _open(self._bytes(root, fetch), self.where) as image:
            return image.size

    def _bytes(self, root: str | None, fetch: bool) -> bytes:
        if self.data is not None:
            return self.data
        if self.url is not None:
            return _fetch(self.url, self.where, allowed=fetch)
        assert self.path is not None, "a source has a path, data or a URL"
        path = _inside(self.path, self.directory, root, self.where)
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            rule = f"the file has {size:,} bytes; at most {MAX_FILE_BYTES:,} are read"
            raise _error(self.where, rule, self.path)
        return path.read_bytes()


def image_source(part: object, where: str, directory: str) -> ImageSource:
    """Read an image part of a message, or an entry of a record's `images` list.

    Args:
        part: a mapping as above, or a text as under `image`.
        where: place of the part.
        directory: of the data file.

    Raises:
        DataError: TT401 for a part that names no image, TT406 for base64 that is not valid.
    """
    if isinstance(part, Mapping):
        # Parquet columns carry every key, empty where it does not apply.
        found = [key for key in _KEYS if part.get(key) is not None]
        if "bytes" in found:
            found = ["bytes"]  # beside it, `path` only says where the bytes once came from
        if len(found) != 1:
            rule = f"must name one image by one of {', '.join(_KEYS[:-1])}"
            raise DataError("TT401", where, rule, value=", ".join(found) or "none")
        key, value = found[0], part[found[0]]
        if key == "image_url" and isinstance(value, Mapping):
            value = value.get("url")
    else:
        key, value = "image", part
    if key == "bytes" and isinstance(value, bytes):
        return ImageSource(where, None, value, directory)
    if not isinstance(value, str) or not value:
        raise DataError("TT401", where, f"{key} must be a text that is not empty",
                        value=type(value).__name__)  # fmt: skip
    if key == "base64":
        return ImageSource(where, None, _from_base64(value, where), directory)
    return _from_text(value, where, directory, is_path=key == "path")


def message_images(messages: Sequence[Mapping[str, object]]) -> list[ImageSource]:
    """The images of a conversation, in order."""
    return [source for message in messages for source in image_sources(message)]


def image_sources(message: Mapping[str, object]) -> list[ImageSource]:
    """The images of one message, in order."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    found = (part.get(SOURCE) for part in parts if isinstance(part, Mapping))
    return [source for source in found if isinstance(source, ImageSource)]


def _from_text(value: str, where: str, directory: str, *, is_path: bool) -> ImageSource:
    """A path, a URL, or base64 known by how image files begin."""
    if value.startswith("data:"):
        head, comma, body = value.partition(",")
        if not comma:
            raise _error(where, "is a data: URL without a comma", value[:40])
        encoded = head.endswith(";base64")
        data = _from_base64(body, where) if encoded else unquote_to_bytes(body)
        return ImageSource(where, None, data, directory)
    if value.lower().startswith(("http://", "https://")):
        return ImageSource(where, None, None, directory, value)
    try:
        address = urlsplit(value) if value.startswith("file://") else None
    except ValueError as error:
        raise _error(where, f"is no valid address: {error}", value[:40]) from None
    if address is not None and address.netloc in ("", "localhost"):
        return ImageSource(where, unquote(address.path), None, directory)
    if "://" in value[:16]:
        raise _error(where, "is an address of a kind that is not read; http and https are",
                     redact(value)[:_SHOWN], hint="download the images and name their paths")  # fmt: skip
    if not is_path and len(value) >= _SHORTEST_BASE64 and value.startswith(_BASE64_STARTS):
        return ImageSource(where, None, _from_base64(value, where), directory)
    return ImageSource(where, value, None, directory)


def _fetch(url: str, where: str, *, allowed: bool) -> bytes:
    shown = redact(url)[:_SHOWN]
    if not allowed:
        raise _error(where, f"{shown} is an address; finetune.data.image.fetch does not allow the "
                     "network", hint="set finetune.data.image.fetch to true, or download the images "
                     "and name their paths")  # fmt: skip
    try:
        return fetched(url, MAX_FILE_BYTES, lambda data: decode_image(data, where))
    except FetchError as error:
        raise _error(where, f"{shown} cannot be fetched: {error}") from None
    except DataError as error:
        rule = f"what {shown} gives {error.rule}"
        raise _error(where, rule, hint=error.hint) from None


def _from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _error(where, f"is not valid base64: {error}", text[:40]) from None


def _inside(path: str, directory: str, root: str | None, where: str) -> Path:
    """The file of a path that stays within its directory."""
    allowed = Path(directory if root is None else root).resolve()
    hint = f"images lie under {allowed}; finetune.data.image.root names another directory"
    if Path(path).is_absolute() and root is None:
        raise _error(where, "must be a path relative to the data file", path, hint=hint)
    try:
        found = (allowed / path).resolve()
        is_file = found.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise _error(where, f"is no usable path: {error}", path[:80]) from None
    if not found.is_relative_to(allowed):
        raise _error(where, "leads out of the directory of the images", path, hint=hint)
    if not is_file:
        raise _error(where, "no such file", path, hint=hint)
    return found


def decode_image(data: bytes, where: str) -> Image.Image:
    """Decode an image file to RGB, or RGBA where parts of it are transparent.

    Args:
        data: the file.
        where: for messages.

    Raises:
        DataError: TT406 for what is damaged, too large, empty, animated or not 8 bits deep.
    """
    with _open(data, where) as image:
        with _decoding(where):
            image.load()
        mode = "RGBA" if image.has_transparency_data else "RGB"
        return image.convert(mode)


def image_file(path: Path) -> ImageSource:
    """The image of a file that a person named, wherever it lies."""
    return ImageSource(str(path), path.name, None, str(path.parent))


def thumbnail(image: Image.Image, side: int = THUMBNAIL) -> str:
    """A data: URL of a PNG of at most `side` pixels each way, to be shown to people."""
    small = image.copy()
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _open(data: bytes, where: str) -> Image.Image:
    """Read the head of an image file and check everything it tells."""
    if not data:
        raise _error(where, "has no bytes")
    with _decoding(where):
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    width, height = image.size
    if width < 1 or height < 1:
        raise _error(where, "has no pixels", f"{width}x{height}")
    if width * height > MAX_PIXELS:
        rule = f"has more pixels than the {MAX_PIXELS:,} that are decoded"
        raise _error(where, rule, f"{width}x{height}", hint="make it smaller beforehand")
    if image.mode not in _MODES:
        raise _error(where, f"must have one of the modes {', '.join(_MODES)}", image.mode,
                     hint="save it with 8 bits per channel")  # fmt: skip
    # Cameras append a thumbnail to a JPEG; that is no animation.
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        raise _error(where, "is animated; one image is expected", f"{image.format}")
    return image


@contextmanager
def _decoding(where: str) -> Iterator[None]:
    """Turns what the decoders raise into an error that names the record."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The library warns where a small file claims very many pixels, then refuses.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        rule = f"has more pixels than the {MAX_PIXELS:,} that are decoded"
        raise _error(where, rule, hint="make it smaller beforehand") from None
    except UnidentifiedImageError:
        raise _error(where, f"is not an image file ({', '.join(_FORMATS)})") from None
    except Exception as error:  # noqa: BLE001  each decoder has errors of its own
        raise _error(where, f"cannot be decoded: {error}") from None


def _error(where: str, rule: str, value: object = None, *, hint: str | None = None) -> DataError:
    return DataError("TT406", where, rule, value=value, hint=hint)

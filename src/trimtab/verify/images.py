"""Images for a dump: from files that people name, or patches as another program made them.

Knows: the two forms of the file, how images meet the placeholders of a sequence. Does not know:
weights, how a dump is written.

    FILE.json         {"images": [["a.png", "<base64>", ...], ...]}   one list per sequence
    FILE.safetensors  patches.N [n, 3, P, P] and grids.N [images, 3] for each sequence N with images
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trimtab.arch.load import load_arch
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint.source import open_source
from trimtab.data.image_source import ImageSource, image_file, image_source
from trimtab.data.images import ImagePatches
from trimtab.data.prompt import ImageProcessor, load_image_processor
from trimtab.errors import DataError
from trimtab.models.context import ImageBatch

Grid = tuple[int, int, int]


def images_for(
    model: str | Path, path: str | Path, sequences: Sequence[Sequence[int]],
    dtype: torch.dtype = torch.float32,
) -> tuple[list[list[int]], list[ImageBatch | None]]:
    """The images of each sequence, and the sequences with as many placeholders as they need.

    A sequence holds one placeholder for each token of its images, or one for each image, which is
    then repeated.

    Args:
        model: the checkpoint.
        path: of the file, see the module's docstring.
        sequences: token ids.
        dtype: in which pixels are normalised; patches from safetensors stay as they are.

    Raises:
        DataError: TT401 for a file of another form, TT402 if it is missing, TT406 for an image,
            TT407 if images and placeholders do not fit, or the model takes text only.
    """
    source = open_source(model)
    arch = load_arch(source.config(), source.where)
    if arch.vision is None or arch.image_token_id is None:
        raise DataError("TT407", source.where, "takes text only", hint="leave out --images")
    if Path(path).suffix == ".safetensors":
        found = _read_patches(Path(path), len(sequences))
    else:
        found = _read_images(Path(path), len(sequences), model, dtype)
    pairs = [
        _place(list(ids), *found[n], arch, f"{path}: sequence {n}")
        for n, ids in enumerate(sequences)
    ]
    return [ids for ids, _ in pairs], [batch for _, batch in pairs]


def _place(
    ids: list[int], patches: Sequence[Tensor], grids: Sequence[Grid], arch: ArchSpec, where: str
) -> tuple[list[int], ImageBatch | None]:
    """A sequence with its placeholders repeated if need be, and its images at their rows."""
    assert arch.vision is not None, "checked by images_for"
    token = arch.image_token_id
    counts = [arch.vision.num_tokens(grid) for grid in grids]
    found = ids.count(token) if token is not None else 0
    if found not in (len(counts), sum(counts)):
        rule = (
            f"has {found} placeholders (token {token}); its {len(counts)} images need one each, or "
            f"{sum(counts)} for all their tokens"
        )
        raise DataError("TT407", where, rule)
    if found != sum(counts):
        waiting = iter(counts)
        ids = [i for i in ids for _ in range(next(waiting) if i == token else 1)]
    rows = [row for row, i in enumerate(ids) if i == token]
    return ids, ImageBatch.join(patches, grids, rows)


def _read_images(
    path: Path, count: int, model: str | Path, dtype: torch.dtype
) -> list[tuple[list[Tensor], list[Grid]]]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError("TT402", str(path), "no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError("TT401", str(path), f"not valid JSON: {error}") from error
    lists = value.get("images") if isinstance(value, dict) else None
    if not isinstance(lists, list) or not all(isinstance(entry, list) for entry in lists):
        raise DataError("TT401", str(path), 'must be {"images": [[path or base64, ...], ...]}')
    if len(lists) != count:
        raise DataError("TT401", f"{path}: images", f"must have one list for each of {count} "
                        "sequences", value=len(lists))
    processor = load_image_processor(model)
    assert processor is not None, "checked by images_for"
    return [
        _prepare(entry, f"{path}: images[{n}]", path.parent, processor, dtype)
        for n, entry in enumerate(lists)
    ]


def _prepare(
    entry: Sequence[object], where: str, folder: Path, processor: ImageProcessor, dtype: torch.dtype
) -> tuple[list[Tensor], list[Grid]]:
    images = [
        processor.read(_source(item, f"{where}[{k}]", folder)) for k, item in enumerate(entry)
    ]
    return [_normalised(image, dtype) for image in images], [image.grid for image in images]


def _source(item: object, where: str, folder: Path) -> ImageSource:
    """A path that a person wrote may lie anywhere; what is no file may be base64."""
    try:
        if isinstance(item, str) and (folder / item).is_file():
            return image_file(folder / item)
    except (OSError, ValueError):
        pass  # base64 is too long a name, or has characters that no path has
    return image_source(item, where, str(folder))


def _normalised(image: ImagePatches, dtype: torch.dtype) -> Tensor:
    """(level / 255 - mean) / std in the dtype given, as exactly as it holds them."""
    levels = torch.from_numpy(image.patches).to(dtype)
    mean, std = (torch.tensor(x, dtype=dtype).view(3, 1, 1) for x in (image.mean, image.std))
    return (levels / 255 - mean) / std


def _read_patches(path: Path, count: int) -> list[tuple[list[Tensor], list[Grid]]]:
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise DataError("TT402", str(path), "no such file") from None
    except (OSError, SafetensorError) as error:
        raise DataError("TT401", str(path), f"cannot be read: {error}") from error
    known = {f"{kind}.{n}" for kind in ("patches", "grids") for n in range(count)}
    left = sorted(set(tensors) - known)
    if left:
        raise DataError("TT401", str(path), f"must hold patches.N and grids.N for N below {count}",
                        value=left[0])
    return [_of_sequence(tensors, n, path) for n in range(count)]


def _of_sequence(
    tensors: Mapping[str, Tensor], n: int, path: Path
) -> tuple[list[Tensor], list[Grid]]:
    patches, grids = tensors.get(f"patches.{n}"), tensors.get(f"grids.{n}")
    if patches is None and grids is None:
        return [], []
    if patches is None or grids is None or grids.dim() != 2 or grids.shape[1] != 3:
        rule = "patches.N [n, 3, P, P] and grids.N [images, 3] belong together"
        raise DataError("TT401", f"{path}: {n}", rule)
    return [patches], [(int(t), int(h), int(w)) for t, h, w in grids.tolist()]

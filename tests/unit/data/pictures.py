"""Small images made from numbers, as files and as base64."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    shape = (height, width) if channels == 1 else (height, width, channels)
    levels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(levels)


def file_bytes(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def encoded(width: int = 28, height: int = 28, seed: int = 0) -> str:
    return base64.b64encode(file_bytes(picture(width, height, seed=seed))).decode()


def image_record(instruction: str, answer: str, *images: object) -> dict[str, object]:
    parts = [{"type": "image", "image": image} for image in images]
    content = [*parts, {"type": "text", "text": instruction}]
    return {"messages": [{"role": "user", "content": content},
                         {"role": "assistant", "content": answer}]}  # fmt: skip

"""Image questions for the toy checkpoint: read shades of grey."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from PIL import Image

LEVELS = {"a": 0, "b": 90, "c": 170, "d": 250}


def shade(level: int, width: int = 28) -> str:
    buffer = io.BytesIO()
    Image.new("L", (width, 28), level).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def shade_record(answer: str) -> dict[str, object]:
    parts = [{"type": "image", "image": shade(LEVELS[letter])} for letter in answer]
    return {
        "messages": [
            {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": answer},
        ]
    }


def write_shades(path: Path, answers: list[str]) -> Path:
    path.write_text("".join(json.dumps(shade_record(answer)) + "\n" for answer in answers))
    return path

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import trimtab
from trimtab.data.tokenizer import Tokenizer, load_tokenizer

BASE = Path(trimtab.__file__).parent / "demo" / "base"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(BASE)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[[str, Iterable[object]], str]:
    def write(name: str, records: Iterable[object]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write

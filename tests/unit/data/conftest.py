from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import trimtab
from tests.unit.data.rank_file import LEARNED, learn_ranks, rank_file, write_k3_tokenizer
from trimtab.data.tokenizer import Tokenizer, load_tokenizer

BASE = Path(trimtab.__file__).parent / "demo" / "base"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(BASE)


@pytest.fixture(scope="session")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokenizer of a checkpoint of the K3 family whose rank file was learned from a few words."""
    folder = tmp_path_factory.mktemp("k3")
    ranks = learn_ranks(LEARNED, 120)
    write_k3_tokenizer(folder, rank_file(ranks), len(ranks))
    return load_tokenizer(folder)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[[str, Iterable[object]], str]:
    def write(name: str, records: Iterable[object]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write

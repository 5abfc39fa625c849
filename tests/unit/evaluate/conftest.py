from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.train.tiny_run import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")

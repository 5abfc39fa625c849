"""An adapter is only put on the base it was trained on, or on one that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.checkpoint.test_adapter import random_tensors, targets_of
from tests.unit.checkpoint.test_convert import DEGREES, run
from tests.unit.checkpoint.tiny import make
from trimtab.checkpoint.adapter import AdapterMeta, save_adapter
from trimtab.checkpoint.merge import copy_checkpoint
from trimtab.checkpoint.source import open_source
from trimtab.errors import AdapterError
from trimtab.evaluate.run import load_with_adapter
from trimtab.models.lora import lora_modules
from trimtab.train.reporter import SilentReporter


def load(base: Path, adapter: Path, accept: str | None = None) -> int:
    model = load_with_adapter(
        str(base), adapter, base_dtype="bf16", compute_dtype="auto", reporter=SilentReporter(),
        accept_base=accept,
    )
    return len(lora_modules(model))


def test_another_base_is_refused_unless_named_whatever_the_layout(tmp_path: Path) -> None:
    arch = make(tmp_path / "m")
    make(tmp_path / "other", seed=4)
    copy_checkpoint(open_source(tmp_path / "m"), tmp_path / "plain", dtype="bf16")
    run(tmp_path / "m", tmp_path / "converted", DEGREES)
    targets, right = targets_of(arch), open_source(tmp_path / "m").fingerprint()
    meta = AdapterMeta(str(tmp_path / "m"), right)
    save_adapter(tmp_path / "a", arch, targets, random_tensors(targets), meta)
    for base in ("m", "converted"):
        assert load(tmp_path / base, tmp_path / "a") == len(targets)
    for base in ("other", "plain"):
        wrong = open_source(tmp_path / base).fingerprint()
        with pytest.raises(AdapterError, match=rf"TT505.*{right}.*{wrong}"):
            load(tmp_path / base, tmp_path / "a")
        assert load(tmp_path / base, tmp_path / "a", wrong) == len(targets)

"""Parameter counts of released configs equal those that transformers builds on the meta device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles import run_hf
from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.arch.summary import summarise

pytestmark = pytest.mark.parity

SCRIPT = Path(run_hf.__file__).with_name("hf_parameters.py")


@pytest.mark.parametrize(
    ("preset", "name"), [("glm-5.3-flash", "Glm5NextForConditionalGeneration")]
)
def test_released_configs_have_as_many_parameters(preset: str, name: str, tmp_path: Path) -> None:
    config = preset_config(preset)
    config.pop("quantization_config", None)  # the same matrices, stored plainly
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, str(SCRIPT), str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == summarise(load_arch(config)).total_parameters

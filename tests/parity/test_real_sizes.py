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
RELEASES = (
    "deepseek-v3", "deepseek-v3.2", "glm-5.3", "glm-5.3-flash", "kimi-k2", "kimi-linear-48b",
)


def test_released_configs_have_as_many_parameters(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.json" for name in RELEASES}
    for name, file in files.items():
        file.write_text(json.dumps(preset_config(name)))
    command = [sys.executable, str(SCRIPT), *map(str, files.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    ours = {name: summarise(load_arch(preset_config(name))).total_parameters for name in RELEASES}
    assert ours == {name: theirs[str(file)] for name, file in files.items()}

"""The budget rule of images equals the released processor, sizes and pixels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from tests.oracles import run_hf
from trimtab.arch.spec import ActivationSpec, AxialVisionSpec
from trimtab.data.image_budget import BudgetRule, read_budget_rule
from trimtab.data.images import preprocess
from trimtab.errors import DataError

pytestmark = pytest.mark.parity

SCRIPT = Path(run_hf.__file__).with_name("hf_glm5_next_images.py")
SIZES = [(28, 28), (1, 1), (3, 500), (113, 112), (640, 480), (97, 1203), (231, 77), (4000, 3000)]
SPEC = AxialVisionSpec(2, 8, 1, 8, 14, 2, 2, 8, 8, ActivationSpec(), 1e-5)


def test_sizes_and_pixels_are_those_of_transformers(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images = []
    for n, (width, height) in enumerate(SIZES):
        image = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
        image.save(tmp_path / f"{n}.png")
        images.append(image)
    job = {"sizes": draw.integers(1, 6000, (400, 2)).tolist(), "images": len(images)}
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    theirs, rule = load_file(tmp_path / "out.safetensors"), BudgetRule()
    tokens = [rule.num_tokens(width, height) for width, height in job["sizes"]]
    assert tokens == theirs["tokens"].tolist()
    for n, image in enumerate(images):
        found = preprocess(image, rule)
        assert list(found.grid) == theirs[f"grid.{n}"].tolist(), SIZES[n]
        rows, columns = found.grid[1:]
        blocks = found.normalised().reshape(rows // 2, 2, columns // 2, 2, 3, 1, 14, 14)
        flat = np.broadcast_to(
            blocks.transpose(0, 2, 1, 3, 4, 5, 6, 7),
            (rows // 2, columns // 2, 2, 2, 3, 2, 14, 14),
        ).reshape(rows * columns, -1)
        assert np.abs(flat - theirs[f"pixels.{n}"]).max() < 1e-5, SIZES[n]


def test_a_limit_of_the_recipe_is_kept() -> None:
    rule = BudgetRule()
    for limit in (1, 5, 16, 300):
        for size in ((28, 28), (3000, 2000), (40, 4000)):
            assert rule.num_tokens(*size, limit) <= limit


def test_the_processor_of_a_checkpoint_is_read() -> None:
    given = {"patch_size": 14, "min_image_tokens": 4, "max_image_tokens": 9, "do_resize": True,
             "image_processor_type": "x", "size": {"longest_edge": 1}, "temporal_patch_size": 2}
    rule = read_budget_rule(given, SPEC, "p")
    assert (rule.least_tokens, rule.most_tokens) == (4, 9)
    for bad in ({"patch_size": 16}, {"do_rescale": False}, {"crop_size": 3}, {"min_image_tokens": 0}):
        with pytest.raises(DataError, match=next(iter(bad))):
            read_budget_rule(bad, SPEC, "p")

"""Run transformers' image processor of glm5_next on the images of a folder.

    python hf_glm5_next_images.py FOLDER

FOLDER holds job.json {"sizes": [[width, height], ...], "images": n} and n files N.png. Writes
out.safetensors there: `tokens` per size, and per image `pixels.N` and `grid.N`.
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import save_file
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil


def main() -> None:
    """Read the job, run, write."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    processor = Glm5NextImageProcessorPil()
    out = {}
    counts = [processor.get_number_of_image_patches(h, w) // 4 for w, h in job["sizes"]]
    out["tokens"] = np.array(counts)
    for n in range(job["images"]):
        found = processor(images=[Image.open(folder / f"{n}.png")], return_tensors="np")
        out[f"pixels.{n}"] = np.ascontiguousarray(found["pixel_values"], np.float32)
        out[f"grid.{n}"] = np.asarray(found["image_grid_thw"])[0]
    save_file(out, folder / "out.safetensors")


if __name__ == "__main__":
    main()

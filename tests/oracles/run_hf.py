"""Start `hf_model.py` on a checkpoint and read back what transformers computed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

HF_SCRIPT = Path(__file__).with_name("hf_model.py")


def run_hf(
    folder: Path,
    sequences: Sequence[Sequence[int]],
    dtype: str = "float64",
    *,
    grads: bool = True,
    selections: Mapping[str, Tensor] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Run transformers on the checkpoint in `folder`, in its own process.

    Args:
        folder: config.json and *.safetensors.
        sequences: token ids; each sequence is run alone.
        dtype: `float64` (the fp32 islands too) or `float32`.
        grads: also the gradients of the sum of the losses, by released name.
        selections: what indexers are made to return, `selection.{sequence}.{layer}` [T, S].
        inputs: further arguments of the forward pass, `{argument}.{sequence}`.

    Returns:
        `logits.N`, `loss.N`, `hidden.N.{place}`, `selection.N.{layer}`, `grad.{released name}`.

    Raises:
        RuntimeError: the process failed; its stderr is the message.
    """
    work = folder / "hf"
    work.mkdir(exist_ok=True)
    ids, out = work / "ids.json", work / f"{dtype}.out"
    ids.write_text(json.dumps([list(sequence) for sequence in sequences]))
    command = [sys.executable, str(HF_SCRIPT), str(folder), str(ids), str(out), "--dtype", dtype]
    command += ["--grads"] if grads else []
    for flag, tensors in (("select", selections), ("inputs", inputs)):
        if tensors:
            file = work / f"{flag}.in"
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
            command += [f"--{flag}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return load_file(out)

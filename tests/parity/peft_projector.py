"""Load an adapter with peft onto bare modules of a projector and write what they compute.

Usage: peft_projector.py CHECKPOINT ADAPTER OUT. The modules carry the released names; the input is
a fixed range of numbers. Imports nothing from trimtab.
"""

import sys
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

PREFIX = "mm_projector."


class Norm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Projector(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        self.proj = nn.Sequential(linear(tensors["proj.0.weight"]), nn.GELU(),
                                  linear(tensors["proj.2.weight"]))
        self.post_norm = Norm(tensors["post_norm.weight"])

    def forward(self, x):
        return self.post_norm(self.proj(x))


class Shell(nn.Module):
    """The projector beside modules that its adapter must not touch."""

    def __init__(self, tensors):
        super().__init__()
        self.mm_projector = Projector(tensors)
        self.vision_tower = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
        self.q_proj = nn.Linear(4, 4)

    def forward(self, x):
        return self.mm_projector(x)


def linear(weight):
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight = nn.Parameter(weight)
    return module


def main(checkpoint, adapter, out):
    stored = load_file(Path(checkpoint) / "model.safetensors")
    tensors = {n.removeprefix(PREFIX): t.float() for n, t in stored.items() if n.startswith(PREFIX)}
    config = PeftConfig.from_pretrained(adapter)
    config.task_type = None
    # Only what stands here: the adapter's other targets belong to the decoder.
    config.target_modules = {t for t in config.target_modules if t.startswith("mm_")} or {"q_proj"}
    model = PeftModel.from_pretrained(Shell(tensors), adapter, config=config)
    x = torch.linspace(-1, 1, 5 * tensors["proj.0.weight"].shape[1]).view(5, -1)
    with torch.no_grad():
        save_file({"out": model(x)}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Count the elements of transformers models, without memory for them, in a process of its own.

    python hf_parameters.py CONFIG_JSON...

Prints one JSON object: file -> elements of all parameters and saved buffers. Quantised releases
are counted as their plain models.
"""

import importlib
import json
import sys

import hf_model  # first: it arranges the absence of `fla`
import torch
from transformers import AutoConfig

# The same model under the name of a release that transformers does not know.
ALIASES = {"kimi_k2": "deepseek_v3"}


def count(file: str) -> int:
    """Elements of the model that a config describes."""
    with open(file) as handle:
        config = json.load(handle)
    for key in ("quantization_config", "auto_map"):
        config.pop(key, None)
    kind = ALIASES.get(config["model_type"], config["model_type"])
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    with torch.device("meta"):
        model_class = getattr(modeling, hf_model.CLASSES[kind])
        model = model_class(AutoConfig.for_model(**(config | {"model_type": kind})))
    return sum(tensor.numel() for tensor in model.state_dict().values())


if __name__ == "__main__":
    print(json.dumps({file: count(file) for file in sys.argv[1:]}))

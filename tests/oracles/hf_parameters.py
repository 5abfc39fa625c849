"""Count the parameters that transformers gives a config, without memory for them.

    python hf_parameters.py CONFIG_DIR CLASS

CLASS is a model class such as Glm5NextForConditionalGeneration. Prints elements of all parameters
and of the router biases, which transformers keeps as buffers.
"""

import importlib
import json
import sys
from pathlib import Path

for _absent in ("fla", "causal_conv1d", "kernels"):
    sys.modules[_absent] = None  # type: ignore[assignment]

import torch  # noqa: E402
from transformers import AutoConfig  # noqa: E402


def main() -> None:
    """Read the arguments, build on the meta device, print."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    with torch.device("meta"):
        model = getattr(modeling, name)(AutoConfig.from_pretrained(folder))
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    print(sum(t.numel() for t in (*model.parameters(), *biases)))


if __name__ == "__main__":
    main()

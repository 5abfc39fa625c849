"""Logits of base + adapter through transformers and peft, in a process of its own.

    python peft_logits.py CHECKPOINT_DIR ADAPTER_DIR IDS_JSON OUT.safetensors

Its own process, because the absence of `fla` is arranged before transformers is imported.
"""

import json
import sys
import warnings
from pathlib import Path

for _absent in ("fla", "causal_conv1d", "kernels"):
    sys.modules[_absent] = None  # type: ignore[assignment]

import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


def main() -> None:
    base, adapter, ids, out = sys.argv[1:5]
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    with warnings.catch_warnings():
        # peft only warns about missing keys, which would leave the adapter at zero
        warnings.filterwarnings("error", message=".*(missing|unexpected).*keys")
        model = PeftModel.from_pretrained(model, adapter).eval()
    result = {}
    with torch.no_grad():
        for n, sequence in enumerate(json.loads(Path(ids).read_text())):
            result[f"logits.{n}"] = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
    result["adapted"] = torch.tensor(
        sum(name.endswith("lora_B.default.weight") for name, _ in model.named_parameters())
    )
    save_file(result, out)


if __name__ == "__main__":
    main()

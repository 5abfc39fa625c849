"""Logits of base + adapter through transformers and peft in float64, in a process of its own.

    python -m tests.parity.peft_logits JOBS_JSON

JOBS_JSON is a list of `{"base", "adapter", "ids", "out", "saved"}`: two directories, a list of token
ids, a safetensors file that gets `logits` [T, W] and `adapted`, the number of pairs that peft made,
and a directory for the adapter as peft saves it.
"""

import json
import sys
import warnings
from pathlib import Path

from tests.oracles.hf_model import (  # first: arranges that fla is absent
    load,
    mean_float64_by_float32,
)

import torch  # isort: skip
from peft import PeftModel  # isort: skip
from safetensors.torch import save_file  # isort: skip


def adapted(base: str, adapter: str) -> PeftModel:
    """Base + adapter in float32; a key that peft misses or does not expect is an error."""
    with warnings.catch_warnings():
        # peft only warns about missing keys, which would leave the adapter at zero
        warnings.filterwarnings("error", message=".*(missing|unexpected|was matched|matched no).*")
        return PeftModel.from_pretrained(load(Path(base), torch.float32), adapter).eval()


@torch.no_grad()
def main() -> None:
    """Run every job."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    models = [adapted(job["base"], job["adapter"]) for job in jobs]
    for job, model in zip(jobs, models, strict=True):
        model.save_pretrained(job["saved"])
    # After the last model is built: float64 must not reach the constants that are made then.
    for model in models:
        model.double()
        mean_float64_by_float32(model)
    for job, model in zip(jobs, models, strict=True):
        logits = model(input_ids=torch.tensor([job["ids"]]), use_cache=False).logits[0]
        names = [name for name, _ in model.named_parameters()]
        pairs = sum(name.endswith("lora_B.default.weight") for name in names)
        found = {"logits": logits.contiguous(), "adapted": torch.tensor(pairs)}
        save_file(found, job["out"])


if __name__ == "__main__":
    main()

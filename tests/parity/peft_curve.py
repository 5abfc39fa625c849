"""Losses of AdamW steps through transformers and peft, in a process of its own.

    python -m tests.parity.peft_curve CHECKPOINT ADAPTER BATCHES_JSON OUT_DIR LR

OUT_DIR/DTYPE gets losses.json and the trained adapter as peft writes it, for float32 and then
float64 (the modelling module stays patched for float64 afterwards).
"""

import json
import sys
import warnings
from pathlib import Path

from tests.oracles.hf_model import load  # first: arranges that fla is absent

import torch  # isort: skip
from peft import PeftModel  # isort: skip


def train(base: Path, adapter: str, batches: Path, out: Path, lr: float, dtype: torch.dtype) -> None:
    model = load(base, dtype)
    with warnings.catch_warnings():
        # peft only warns about missing keys, which would leave the adapter at zero
        warnings.filterwarnings("error", message=".*(missing|unexpected).*keys")
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()
    model.to(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    losses = []
    for batch in json.loads(batches.read_text())["batches"]:
        optimizer.zero_grad()
        total, count = torch.zeros((), dtype=dtype), 0
        for ids in batch:
            tokens = torch.tensor([ids])
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
            count += len(ids) - 1
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    model.save_pretrained(out)
    (out / "losses.json").write_text(json.dumps({"loss": losses}))


def main() -> None:
    base, adapter, batches, out, lr = sys.argv[1:6]
    for dtype in (torch.float32, torch.float64):
        place = Path(out) / str(dtype).removeprefix("torch.")
        train(Path(base), adapter, Path(batches), place, float(lr), dtype)


if __name__ == "__main__":
    main()

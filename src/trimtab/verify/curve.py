"""Loss curves: plain AdamW steps on given batches, the way to compare two trainers step by step.

Knows: the file of batches, what a step is. Does not know: recipes, schedules, other tools.

Nothing is left to taste: torch's defaults for AdamW without weight decay, no schedule, clipping
or dropout. The loss of a step is the mean over all predicted tokens of its batch, in nats, taken
before the update.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trimtab.arch.load import load_arch
from trimtab.checkpoint.adapter import (
    AdapterMeta,
    attach_adapter,
    load_adapter,
    save_adapter,
    writable_form,
)
from trimtab.checkpoint.base import require_base
from trimtab.checkpoint.codec import Progress
from trimtab.checkpoint.load import BaseDtype, load_model
from trimtab.checkpoint.manifest import check_output, write_atomic
from trimtab.checkpoint.source import open_source
from trimtab.errors import DataError, RunError
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.lora import trainable_parameters
from trimtab.models.tape import ChoiceTape
from trimtab.verify.dump import COMPUTE, DumpDtype, check_token_ids

LOSSES_FILE = "losses.json"
# Wide enough for any released weight: a curve differs through arithmetic, not through rounding.
_STORAGE: dict[DumpDtype, BaseDtype] = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}
Batch = list[list[int]]


def read_batches(path: str | Path) -> list[Batch]:
    """Batches of token sequences from a file `{"batches": [[[ids...], [ids...]], ...]}`.

    Raises:
        DataError: TT107 if the file is missing, TT401 if it has another form, TT402 if it has no
            batch, or a batch no token to predict.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise DataError("TT107", str(path), "no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError("TT401", str(path), f"not valid JSON: {error}") from error
    batches = value.get("batches") if isinstance(value, dict) else None
    if not isinstance(batches, list) or not all(_is_batch(batch) for batch in batches):
        rule = 'must be {"batches": [[[ids...], [ids...]], ...]} with integers for ids'
        raise DataError("TT401", str(path), rule)
    if not batches:
        raise DataError("TT402", str(path), "needs at least one batch")
    for number, batch in enumerate(batches):
        if any(len(ids) < 2 for ids in batch) or not batch:
            rule = "needs sequences of at least 2 tokens each, so that there is one to predict"
            raise DataError("TT402", f"{path}: batches[{number}]", rule)
    return batches


def _is_batch(batch: object) -> bool:
    return isinstance(batch, list) and all(
        isinstance(ids, list) and all(type(token) is int for token in ids) for ids in batch
    )


def loss_curve(
    model_path: str | Path,
    adapter: str | Path,
    batches: Sequence[Batch],
    dst: str | Path,
    *,
    lr: float = 1e-3,
    dtype: DumpDtype = "float32",
    where: str = "batches",
    accept_base: str | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """Train an adapter for one AdamW step per batch and write losses and adapter.

    Args:
        model_path: the base checkpoint.
        adapter: directory in PEFT's format to start from; its dropout is not applied.
        batches: one for each step, sequences of token ids.
        dst: new directory; gets losses.json, `{"loss": [...]}`, and adapter/.
        lr: learning rate of every step.
        dtype: of computation and of the base weights; float64 also of adapters and moments.
        where: name of the batches in messages.
        accept_base: fingerprint of a base that may differ from the one the adapter names.
        progress: called while weights are loaded, with bytes done and in all.

    Returns:
        The loss before each update.

    Raises:
        AdapterError: the adapter does not fit, or TT505 if it was trained on another base.
        DataError: TT403 if a token id is out of range.
        CheckpointError: the checkpoint does not fit, or TT309 if `dst` holds something else.
        RunError: TT602 if a loss is not finite; nothing is written then.
    """
    check_output(dst)
    source = open_source(model_path)
    arch = load_arch(source.config(), source.where)
    for number, batch in enumerate(batches):
        check_token_ids(batch, arch.vocab_size, f"{where}: batches[{number}]")
    read = load_adapter(adapter, arch)
    require_base(read, source, str(adapter), accept=accept_base)
    model, _ = load_model(
        model_path, base_dtype=_STORAGE[dtype], compute_dtype=COMPUTE[dtype], progress=progress,
    )
    attach_adapter(model, read)
    parameters = trainable_parameters(model)
    if dtype == "float64":
        for parameter in parameters.values():
            parameter.data = parameter.data.to(torch.float64)
    losses = list(adamw_steps(model, list(parameters.values()), batches, lr))
    meta = AdapterMeta(str(model_path), source.fingerprint(), {"steps": len(losses), "lr": lr},
                       writable_form(read.targets))
    save_adapter(Path(dst) / "adapter", arch, read.targets, parameters, meta)
    text = json.dumps({"loss": losses}) + "\n"
    write_atomic(Path(dst) / LOSSES_FILE, text.encode())
    return losses


def adamw_steps(
    model: CausalLM, parameters: Sequence[torch.nn.Parameter], batches: Sequence[Batch], lr: float
) -> Iterator[float]:
    """The loss before the update of each step.

    Raises:
        RunError: TT602 if it is not finite.
    """
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, foreach=False)
    for number, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        loss = batch_loss(model, batch)
        if not math.isfinite(loss.item()):
            raise RunError("TT602", f"batches[{number}]", "has a loss that is not a finite number",
                           value=loss.item(), hint="lower --lr, or try --dtype float64")
        loss.backward()
        optimizer.step()
        yield loss.item()


def batch_loss(model: CausalLM, batch: Batch) -> Tensor:
    """Mean over all predicted tokens of the sequences, which run as one pack of documents."""
    tokens = torch.tensor([token for ids in batch for token in ids], dtype=torch.int64)
    labels = torch.tensor([token for ids in batch for token in ids[1:]], dtype=torch.int64)
    rows: list[int] = []
    start = 0
    for ids in batch:
        rows.extend(range(start, start + len(ids) - 1))
        start += len(ids)
    context = ForwardContext.packed([len(ids) for ids in batch], tape=ChoiceTape(), recompute="layer")
    hidden = model(tokens, context)[torch.tensor(rows)]
    return model.token_losses(hidden, labels).mean()

"""Loss on held-out records during a run, and what follows from it.

Knows: held-out packs, losses, when a run has stopped improving. Does not know: recipes' files, how
adapters are saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trimtab.config.data import DataSection, Role
from trimtab.data.encode import Encoded, encode_record
from trimtab.data.holdout import RecordSubset
from trimtab.data.packing import Pack, RowFiller, build_pack
from trimtab.data.prompt import ImageProcessor
from trimtab.data.tokenizer import Tokenizer
from trimtab.errors import DataError
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.train.batch import micro_batches, on_device
from trimtab.train.plan import BatchPlan

LOSS_KEY: dict[Role, str] = {"domain": "validation_domain_loss",
                             "general": "validation_general_loss"}


def held_out_packs(
    files: Mapping[str, RecordSubset], data: DataSection, tokenizer: Tokenizer,
    processor: ImageProcessor | None, max_tokens: int,
) -> list[Pack]:
    """Packs of held-out records, those of each role up to a number of tokens.

    Records that cannot be read or predict nothing are left out, long ones cut.

    Args:
        files: held-out records by the name of their file in the recipe.
        data: the `data` section.
        tokenizer: of the model.
        processor: of its images.
        max_tokens: most tokens of each role.
    """
    packs: list[Pack] = []
    for role in ("domain", "general"):
        names = [name for name in files if name.startswith(role)]
        filler: RowFiller[str] = RowFiller(data.max_seq_len, True)
        waiting = _encoded([(name, files[name]) for name in names], data, tokenizer, processor)
        packs += _packed(waiting, filler, max_tokens, tokenizer.pad_id)
    return packs


def _encoded(
    files: Sequence[tuple[str, RecordSubset]], data: DataSection, tokenizer: Tokenizer,
    processor: ImageProcessor | None,
) -> Iterable[tuple[str, Encoded]]:
    for name, file in files:
        for index in range(len(file)):
            try:
                record = encode_record(file.record(index), tokenizer, processor)
            except DataError:
                continue
            record = record.truncated(data.max_seq_len)
            if record.num_supervised:
                yield name, record


def _packed(
    records: Iterable[tuple[str, Encoded]], filler: RowFiller[str], max_tokens: int, pad_id: int
) -> list[Pack]:
    packs: list[Pack] = []
    waiting, tokens, more = iter(records), 0, True
    while more or filler.waiting:
        row, free = filler.open_row()
        while more and filler.wants_more(row, free):
            item = next(waiting, None) if tokens < max_tokens else None
            more = item is not None
            if item is not None:
                tokens += len(item[1])
                free = filler.add(row, free, item)
        if row:
            encoded, names = [record for _, record in row], [name for name, _ in row]
            packs.append(build_pack(len(packs), encoded, names, filler.length, pad_id))
    return packs


@torch.no_grad()
def validation_losses(model: CausalLM, packs: Sequence[Pack], plan: BatchPlan) -> dict[str, float]:
    """Mean loss per supervised token of each role, in nats, without dropout.

    Returns:
        `validation_domain_loss` and, where there are general records, `validation_general_loss`.
    """
    sums: dict[Role, float] = {}
    counts: dict[Role, int] = {}
    device = model.embed.weight.device
    for batch in micro_batches(packs, plan):
        context = ForwardContext.packed(
            batch.lengths, device, valid=batch.valid.to(device),
            images=on_device(batch.images, device),
        )
        hidden, labels = model(batch.input_ids.to(device), context), batch.labels.to(device)
        for role, rows in batch.rows().items():
            rows = rows.to(device)
            total = model.token_losses(hidden[rows], labels[rows]).sum()
            sums[role] = sums.get(role, 0.0) + total.item()
            counts[role] = counts.get(role, 0) + len(rows)
    return {LOSS_KEY[role]: total / counts[role] for role, total in sums.items()}


@dataclass(slots=True)
class Progress:
    """How validation went so far.

    Args:
        best: lowest domain loss.
        best_step: steps done when it was measured.
        worse: validations since.
    """

    best: float = math.inf
    best_step: int = 0
    worse: int = 0

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, object]]) -> Progress:
        """From the rows of metrics.jsonl, so that a resumed run goes on as it was."""
        progress = cls()
        for row in rows:
            loss = row.get(LOSS_KEY["domain"])
            if isinstance(loss, float):
                progress.add(int(str(row["step"])), loss)
        return progress

    def add(self, step: int, loss: float) -> bool:
        """Count a validation; True where it is the best so far."""
        if loss < self.best:
            self.best, self.best_step, self.worse = loss, step, 0
            return True
        self.worse += 1
        return False

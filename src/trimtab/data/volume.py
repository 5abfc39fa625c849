"""How many tokens the data of a recipe holds, for a plan of the whole job.

Knows: records, tokenizers, streams. Does not know: torch, clusters.
"""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.config.evaluation import TaskSection
from trimtab.config.recipe import Recipe
from trimtab.data.encode import encode_record
from trimtab.data.preview import summarise_packs, summarise_source
from trimtab.data.prompt import ImageProcessor, load_image_processor
from trimtab.data.records import open_records
from trimtab.data.tokenizer import Tokenizer, load_tokenizer
from trimtab.plan.workload import Volume

_PACKS = 8


def measure_volume(recipe: Recipe, limit: int = 2000) -> Volume:
    """Count tokens with the model's own tokenizer.

    Args:
        recipe: whose files are read.
        limit: records read of each file; their mean stands for the rest.

    Raises:
        DataError, ConfigError: a file or the tokenizer is missing or cannot be read.
    """
    section = recipe.finetune.data
    tokenizer = load_tokenizer(recipe.model.path)
    processor = load_image_processor(recipe.model.path, section.image)
    records, domain, exact = 0, 0.0, True
    for file in section.files:
        total = summarise_source(file, section, tokenizer, limit, processor=processor)
        records += total.records
        exact = exact and total.looked_at == total.records
        if file.role == "domain":
            domain += total.tokens * total.records / max(1, total.looked_at)
    packs = summarise_packs(section, tokenizer, recipe.seed, _PACKS, processor)
    scored, answers, written = 0.0, 0, 0
    for task in (*recipe.evaluate.domain, *recipe.evaluate.general):
        sizes = list(_sizes(task, tokenizer, processor, limit))
        count = len(open_records(task.path))
        count = min(count, task.limit) if task.limit else count
        scored += sum(sizes) * count / max(1, len(sizes))
        exact = exact and len(sizes) == count
        if task.kind == "generate":
            answers += count
            written += count * task.max_new_tokens
    return Volume(records, domain, packs.filled, scored, answers, written, exact)


def _sizes(
    task: TaskSection, tokenizer: Tokenizer, processor: ImageProcessor | None, limit: int
) -> Iterator[int]:
    file = open_records(task.path)
    for index in range(min(len(file), limit, task.limit or limit)):
        yield len(encode_record(file.record(index), tokenizer, processor))

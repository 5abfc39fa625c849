"""Counting the tokens of a recipe's data without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.config.load import load_recipe
from trimtab.config.recipe import Recipe
from trimtab.data.encode import encode_record
from trimtab.data.records import open_records
from trimtab.data.tokenizer import load_tokenizer
from trimtab.data.volume import measure_volume
from trimtab.errors import TrimtabError

DEMO = Path(__file__).parents[3] / "src/trimtab/demo"


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(f"""\
model: {{path: {DEMO}/base}}
finetune:
  data:
    domain: {{path: {DEMO}/data/domain_train.jsonl}}
    general: {{path: {DEMO}/data/general_train.jsonl}}
evaluate:
  domain: [{{path: {DEMO}/data/domain_heldout.jsonl, max_new_tokens: 8, limit: 20}}]
  general: [{{path: {DEMO}/data/general_heldout.jsonl, limit: 5}}]
output: o
""")
    return load_recipe(path, overrides)


def test_all_records_are_counted_where_they_are_few(tmp_path: Path) -> None:
    volume = measure_volume(recipe(tmp_path), limit=10**6)
    tokenizer = load_tokenizer(str(DEMO / "base"))
    file = open_records(str(DEMO / "data/domain_train.jsonl"))
    tokens = sum(len(encode_record(file.record(i), tokenizer)) for i in range(len(file)))
    assert volume.is_exact and volume.domain_tokens == tokens
    assert 0.5 < volume.filled <= 1
    assert volume.answers == 20 and volume.answer_tokens == 160
    held = [open_records(str(DEMO / f"data/{name}_heldout.jsonl")) for name in ("domain", "general")]
    read = sum(
        len(encode_record(f.record(i), tokenizer)) for f, n in zip(held, (20, 5), strict=True) for i in range(n)
    )
    assert volume.scored_tokens == read


def test_the_first_records_stand_for_the_rest(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    whole, sample = measure_volume(asked, limit=10**6), measure_volume(asked, limit=300)
    assert not sample.is_exact and sample.records == whole.records
    assert sample.domain_tokens == pytest.approx(whole.domain_tokens, rel=0.1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    data = asked.finetune.data.model_copy(update={"domain": asked.finetune.data.domain.model_copy(
        update={"path": ("nowhere.jsonl",)})})
    tune = asked.finetune.model_copy(update={"data": data})
    with pytest.raises(TrimtabError, match=r"nowhere\.jsonl"):
        measure_volume(asked.model_copy(update={"finetune": tune}))

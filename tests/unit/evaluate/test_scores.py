"""Scores of a tiny model against a slow, plain computation of the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.unit.train.tiny_run import WORDS, recipe_for, write_recipe
from trimtab.checkpoint.load import load_model
from trimtab.config.load import load_recipe
from trimtab.data.tokenizer import load_tokenizer
from trimtab.errors import ConfigError
from trimtab.evaluate.answer import Speaker, text_pieces
from trimtab.evaluate.nll import text_loss
from trimtab.evaluate.run import evaluate
from trimtab.evaluate.tasks import Question, answer_all
from trimtab.models.context import ForwardContext
from trimtab.train.loop import finetune
from trimtab.train.reporter import SilentReporter

TEXTS = ["A short text.", "Zwei längere Sätze, nicht nur ASCII. " * 3, "x"]


def test_text_loss_equals_one_text_at_a_time(checkpoint: Path) -> None:
    model, _ = load_model(checkpoint, base_dtype="fp64")
    tokenizer = load_tokenizer(checkpoint)
    got = text_loss(model, tokenizer, TEXTS, max_seq_len=512, batch_tokens=150)
    for text, nats, num_bytes in zip(TEXTS, got.nats, got.num_bytes, strict=True):
        ids = torch.tensor(tokenizer.encode(text))
        with torch.no_grad():
            logits = model.logits(model(ids, ForwardContext.packed([len(ids)])))
        want = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        assert nats == pytest.approx(float(want), rel=1e-9) and num_bytes == len(text.encode())
    total = sum(got.nats) / math.log(2) / sum(len(t.encode()) for t in TEXTS)
    assert got.bits_per_byte == pytest.approx(total)


def test_windows_predict_each_token_once(checkpoint: Path) -> None:
    model, _ = load_model(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    whole = text_loss(model, tokenizer, TEXTS, max_seq_len=512, batch_tokens=64)
    cut = text_loss(model, tokenizer, TEXTS, max_seq_len=16, batch_tokens=64)
    assert cut.num_tokens == whole.num_tokens
    assert cut.nats[0] == pytest.approx(whole.nats[0], rel=1e-5)


def test_exact_match_counts_what_the_model_really_says(tmp_path: Path, checkpoint: Path) -> None:
    model, _ = load_model(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    questions = [Question(({"role": "user", "content": w},), "") for w in WORDS]
    answers = answer_all(model, tokenizer, questions, max_new_tokens=6, batch_tokens=100)
    alone = answer_all(model, tokenizer, questions, max_new_tokens=6, batch_tokens=1)
    assert [a.text for a in answers] == [a.text for a in alone]
    rows = [
        {"prompt": a.question.shown, "completion": a.text if i % 2 else f"not {a.text}"}
        for i, a in enumerate(answers)
    ]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    extra = f"evaluate: {{domain: [{{path: {held_out}, max_new_tokens: 6}}]}}"
    path = write_recipe(tmp_path, checkpoint, output=tmp_path / "run", extra=extra)
    report = evaluate(load_recipe(path), None, SilentReporter())
    assert report.sets[0].before.value == 0.5 and report.sets[0].after is None
    assert report.passed and json.loads(json.dumps(report.as_dict()))["sets"][0]["num_records"] == 8


def test_base_and_adapter_are_scored_side_by_side(tmp_path: Path, checkpoint: Path) -> None:
    extra = f"""\
evaluate:
  domain: [{{path: {tmp_path}/domain.jsonl, limit: 8, max_new_tokens: 4, min_gain: -1.0}}]
  general: [{{path: {tmp_path}/general.jsonl, limit: 8}}]
  gate: {{min_domain_gain: 100.0, max_general_loss: -100.0}}"""
    path = write_recipe(tmp_path, checkpoint, output=tmp_path / "run", extra=extra)
    recipe = load_recipe(path, ["finetune.steps=2"])
    finetune(recipe, SilentReporter())
    report = evaluate(recipe, tmp_path / "run" / "adapter", SilentReporter())
    domain, general = report.sets
    assert domain.examples[0].after is not None
    assert general.after is not None and general.after.value != general.before.value
    base = evaluate(recipe, None, SilentReporter())
    assert [s.before for s in base.sets] == [s.before for s in report.sets]
    assert [v.passed for v in report.verdicts] == [True, False] and not report.passed


def test_a_recipe_without_held_out_sets_is_an_error(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"TT103.*evaluate"):
        evaluate(recipe_for(tmp_path, checkpoint), None, SilentReporter())


def test_streamed_pieces_join_to_the_whole_text(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode("naïve 漢字")
    pieces = list(text_pieces(tokenizer.decode, ids))
    assert "".join(pieces) == "naïve 漢字" and len(pieces) == len("naïve 漢字")


def test_a_speaker_answers_in_the_chat_format_or_continues_text(checkpoint: Path) -> None:
    speaker = Speaker.load(str(checkpoint), None, base_dtype="bf16", max_new_tokens=4, raw=False)
    message = [{"role": "user", "content": "lemma: boxes"}]
    chat = "".join(speaker.stream(message))
    assert chat == "".join(speaker.stream(message, use_adapter=False))
    raw = Speaker(speaker.model, speaker.tokenizer, 4, raw=True)
    assert "".join(raw.stream(message)) != chat

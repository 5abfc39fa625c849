"""The model card of an adapter: base, licence, targets, data, results, versions, and nothing made up."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.checkpoint.test_adapter import random_tensors, targets_of
from tests.unit.checkpoint.tiny import make
from trimtab.checkpoint.adapter import AdapterMeta, load_adapter, save_adapter
from trimtab.checkpoint.adapter_card import CARD_NAME, CardFacts, licence_of
from trimtab.checkpoint.manifest import MANIFEST_NAME, verify_files
from trimtab.checkpoint.merge import export_adapter
from trimtab.checkpoint.source import open_source


def write(folder: Path, **facts: object) -> str:
    arch = make(folder / "m")
    (folder / "m" / CARD_NAME).write_text("---\nlicense: other\nlicense_name: kimi-k3\n---\n# Kimi\n")
    (folder / "m" / "LICENSE").write_text("\n  Modified MIT `License`\nCopyright\n")
    targets = targets_of(arch)
    meta = AdapterMeta(str(folder / "m"), "f00d", facts=CardFacts(
        licence=licence_of(open_source(folder / "m")), **facts,  # type: ignore[arg-type]
    ))
    save_adapter(folder / "a", arch, targets, random_tensors(targets), meta)
    return (folder / "a" / CARD_NAME).read_text()


def test_a_card_says_what_the_adapter_comes_from(tmp_path: Path) -> None:
    text = write(
        tmp_path, revision="abc123", data=[("train.jsonl", "5ha")],
        results=[("loss", "1.2 nats per token")], versions={"torch": "2.13"},
    )
    _, front, body = text.split("---\n", 2)
    values = {key: json.loads(value) for key, value in (line.split(": ", 1) for line in front.splitlines())}
    assert values == {
        "base_model": str(tmp_path / "m"), "library_name": "peft", "tags": ["lora", "trimtab"],
        "license": "other", "license_name": "kimi-k3",
    }
    for words in ("revision `abc123`", "`f00d`", "- LICENSE: `Modified MIT 'License'`",
                  "| train.jsonl | 5ha |", "| loss | 1.2 nats per token |", "torch 2.13"):
        assert words in body
    assert "| q_proj | kda | 3 of 3 | 4 | 2 |" in body
    assert all(verdict.passed for verdict in verify_files(tmp_path / "a"))


def test_what_is_not_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    make(tmp_path / "m")
    assert licence_of(open_source(tmp_path / "m")) == {}
    arch = make(tmp_path / "n")
    targets = targets_of(arch)
    save_adapter(tmp_path / "a", arch, targets, random_tensors(targets), AdapterMeta("org/model"))
    text = (tmp_path / "a" / CARD_NAME).read_text()
    assert "states no licence" in text and text.count("Not recorded.") == 2
    assert "license" not in text.split("---\n")[1] and "fingerprint" not in text


def test_an_export_keeps_the_facts_and_a_foreign_adapter_gets_what_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, data=[("train.jsonl", "5ha")], versions={"torch": "2.13"})
    export_adapter(tmp_path / "a", tmp_path / "e", engine="vllm")
    assert "| train.jsonl | 5ha |" in (tmp_path / "e" / CARD_NAME).read_text()
    (tmp_path / "a" / MANIFEST_NAME).unlink()
    export_adapter(tmp_path / "a", tmp_path / "f")
    text = (tmp_path / "f" / CARD_NAME).read_text()
    assert "kimi-k3" in text and "trimtab" in text.split("## Versions")[1]
    found = load_adapter(tmp_path / "f", make(tmp_path / "n")).manifest
    assert found is not None and CardFacts.read(found.extra["card"]).licence is not None

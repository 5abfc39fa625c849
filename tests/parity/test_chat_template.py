"""Templates render as in transformers, and the loss mask agrees with its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import trimtab
from trimtab.data.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

BASE = Path(trimtab.__file__).parent / "demo" / "base"
MARKED = """\
{# trim_blocks and lstrip_blocks matter here #}
{% if tools %}
<|system|>{{ tools | tojson(indent=2) }}<|end_of_msg|>
{% endif %}
{% for m in messages %}
    {% if loop.index0 > 90 %}{% break %}{% endif %}
    {% if m.role == 'assistant' %}
<|assistant|>{% generation %}{{ m.content }}<|end_of_msg|>{% endgeneration %}

    {% else %}
<|{{ m.role }}|>{{ m.content }}<|end_of_msg|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{%- endif %}"""
MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Caf\u00e9?\n\nyes"},
    {"role": "assistant", "content": "  Oui.\n"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
    {"role": "assistant", "content": "49"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d\u00e9 'x' <y>"}}]


@pytest.mark.parity
@pytest.mark.parametrize("template", [None, MARKED], ids=["demo", "marked"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_rendering_and_mask_are_those_of_transformers(
    tmp_path: Path, template: str | None, tools: list[dict[str, object]] | None, count: int
) -> None:
    shutil.copytree(BASE, tmp_path, dirs_exist_ok=True)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = MESSAGES[:count]
    prompt = count == 2
    expected = theirs.apply_chat_template(
        messages, tools=tools, tokenize=True, add_generation_prompt=prompt, return_dict=True,
        return_assistant_tokens_mask=template is not None,
    )  # fmt: skip
    rendered = ours.render(messages, tools, add_generation_prompt=prompt)
    assert rendered.token_ids == expected["input_ids"]
    if template is not None:
        mask = expected["assistant_masks"]
        assert [int(m) for m in rendered.loss_mask] == list(mask)
        assert sum(mask) > 0 or prompt

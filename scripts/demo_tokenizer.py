"""The tokenizer of the demo: a vocabulary of bytes, special tokens and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = (  # ids 256, 257, ...; ids 0..255 are the bytes
    "<|bos|>", "<|eos|>", "<|end_of_msg|>", "<|pad|>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>",
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>",
)  # fmt: skip
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('unknown role: ' ~ message['role']) -}}
    {%- endif -%}
    {{- '<|' ~ message['role'] ~ '|>' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'image' -%}
                {{- '<|media_begin|>image ' ~ part['width'] ~ 'x' ~ part['height'] -}}
                {{- '<|media_content|><|media_pad|><|media_end|>' -}}
            {%- else -%}
                {{- part['text'] -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|end_of_msg|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def byte_alphabet() -> list[str]:
    """Return for each byte the character by which byte-level tokenizers write it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, shifted = [], 256
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(shifted))
            shifted += 1
    return alphabet


def write_tokenizer(out: Path) -> None:
    """Write a tokenizer whose ids below 256 are bytes, its config and the chat template."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)

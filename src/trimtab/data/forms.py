"""Record forms of other tools, turned into Trimtab's own.

Knows: key names of ShareGPT and Alpaca records. Does not know: files, tokens.

    messages   {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}   OpenAI's
    sharegpt   {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}],
                "system": ..., "images": [...]}       <image> in a value is the next image
    alpaca     {"instruction": ..., "input": ..., "output": ..., "history": [[q, a], ...]}
    prompt     {"prompt": ..., "completion": ...}
    text       {"text": ...}

Which form a file has is decided by its first record, or said by the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import get_args

from trimtab.config.data import Form
from trimtab.errors import DataError

FORMS: tuple[Form, ...] = get_args(Form)
KEYS = ("messages", "prompt", "completion", "text", "images", "tools", "conversations", "system",
        "instruction", "input", "output", "history")  # fmt: skip
"""Every key that some form reads, as columns of a Parquet or Arrow file."""

_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "observation": "tool", "tool": "tool", "function_response": "tool",
}
_IMAGE = "<image>"
_OWN: dict[Form, str] = {"messages": "messages", "prompt": "prompt", "text": "text"}


def detect_form(value: object) -> Form:
    """The form of a record, by its keys; `messages` where it is none that is known."""
    if not isinstance(value, Mapping):
        return "messages"
    if isinstance(value.get("conversations"), list):
        return "sharegpt"
    if "instruction" in value and "output" in value:
        return "alpaca"
    return next((form for form, key in _OWN.items() if key in value), "messages")


def canonical(value: Mapping[str, object], form: Form, where: str) -> Mapping[str, object]:
    """A record with the keys of Trimtab's own forms.

    Args:
        value: as the file has it.
        form: of the file. In `messages`, `prompt` and `text` files a record may have any of these
            three forms.
        where: `file:line`.

    Raises:
        DataError: TT401, it has not the keys of that form.
    """
    if form == "sharegpt":
        return _sharegpt(value, where)
    if form == "alpaca":
        return _alpaca(value, where)
    return value


def only(value: Mapping[str, object], form: Form, where: str) -> Mapping[str, object]:
    """A record of a form that the recipe names: keys of other forms are left out.

    Raises:
        DataError: TT401, it has not the keys of that form.
    """
    if form not in _OWN:
        return canonical(value, form, where)
    if _OWN[form] not in value:
        raise DataError("TT401", where, f"has no `{_OWN[form]}`, which the form {form} needs",
                        value=", ".join(list(value)[:8]))
    others = set(_OWN.values()) - {_OWN[form]}
    return {key: item for key, item in value.items() if key not in others}


def _sharegpt(value: Mapping[str, object], where: str) -> Mapping[str, object]:
    turns = value.get("conversations")
    if not isinstance(turns, list):
        raise DataError("TT401", where, "has no list `conversations`, which the form sharegpt needs",
                        value=", ".join(list(value)[:8]))
    messages: list[dict[str, object]] = []
    if value.get("system"):
        messages.append({"role": "system", "content": value["system"]})
    for index, turn in enumerate(turns):
        at = f"{where}: conversations[{index}]"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise DataError("TT401", at, "must be an object with from and value")
        who, text = turn.get("from"), str(turn["value"])
        if who == "function_call":
            messages.append({"role": "assistant", "content": None, "tool_calls": _call(text, at)})
        elif who in _SHAREGPT_ROLES:
            content = _with_images(text) if value.get("images") else text
            messages.append({"role": _SHAREGPT_ROLES[str(who)], "content": content})
        else:
            raise DataError("TT401", f"{at}.from", "must be one of "
                            f"{', '.join([*_SHAREGPT_ROLES, 'function_call'])}", value=repr(who))
    tools = value.get("tools")
    if isinstance(tools, str) and tools:
        tools = _json(tools, f"{where}: tools")
    rest = {"images": value["images"]} if value.get("images") else {}
    return {"messages": messages, **rest, **({"tools": tools} if tools else {})}


def _alpaca(value: Mapping[str, object], where: str) -> Mapping[str, object]:
    for key in ("instruction", "output"):
        if not isinstance(value.get(key), str):
            raise DataError("TT401", f"{where}: {key}", "must be a text, which the form alpaca needs",
                            value=repr(value.get(key)))
    messages: list[dict[str, object]] = []
    if value.get("system"):
        messages.append({"role": "system", "content": value["system"]})
    history = value.get("history") or []
    if not isinstance(history, list):
        raise DataError("TT401", f"{where}: history", "must be a list of [question, answer]")
    for index, pair in enumerate(history):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError("TT401", f"{where}: history[{index}]", "must be [question, answer]")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = "\n".join(str(value[key]) for key in ("instruction", "input") if value.get(key))
    images = value.get("images")
    content = _with_images(asked) if images else asked
    messages += [{"role": "user", "content": content},
                 {"role": "assistant", "content": value["output"]}]
    return {"messages": messages, **({"images": images} if images else {})}


def _with_images(text: str) -> str | list[dict[str, object]]:
    """Parts, with one that takes the next listed image in place of each `<image>`."""
    if _IMAGE not in text:
        return text
    parts: list[dict[str, object]] = []
    for number, piece in enumerate(text.split(_IMAGE)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _call(text: str, where: str) -> list[dict[str, object]]:
    call = _json(text, where)
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise DataError("TT401", where, "a function_call must be {name, arguments}")
    function = {"name": call["name"], "arguments": call.get("arguments", {})}
    return [{"type": "function", "function": function}]


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError("TT401", where, f"not valid JSON: {error.msg}") from None

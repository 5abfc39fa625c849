"""K3's chat format read back: answers with reasoning and tool calls, whole conversations.

Knows: the elements that `k3_format` writes. Does not know: token ids; it is given segments of
text that say whether they are a real control token or ordinary text that may look like one.

A model may write anything, so nothing is refused: what does not fit is kept as text and the
result says that it is not complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trimtab.data.chat import Answer, ToolCall
from trimtab.data.k3_arguments import join_value
from trimtab.data.k3_format import (
    CLOSE,
    END,
    MEDIA_BEGIN,
    MEDIA_END,
    OPEN,
    SEP,
)

Segment = tuple[str, bool]
_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')
_SIZE = re.compile(r"image (\d+)x(\d+)")


@dataclass(slots=True)
class Element:
    """An element and what is in it.

    Args:
        name: its name.
        attributes: by key, without escapes.
        children: elements inside.
        parts: texts and images inside, in order.
        closed: its end was there.
    """

    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element] = field(default_factory=list)
    parts: list[str | dict[str, object]] = field(default_factory=list)
    closed: bool = False

    @property
    def text(self) -> str:
        """Texts inside, joined."""
        return "".join(part for part in self.parts if isinstance(part, str))

    def named(self, name: str) -> list[Element]:
        """Children of that name."""
        return [child for child in self.children if child.name == name]


def parse_answer(
    segments: Iterable[Segment], thinking: bool, partial: bool = False
) -> Answer:
    """Read what the model wrote after a generation prompt.

    Args:
        segments: (text, is a control token).
        thinking: the prompt opened a think element, else a response.
        partial: more will follow; what may yet become something else is left out, so that a
            longer answer only ever adds to a shorter one.
    """
    reader = _Reader(["message", "think" if thinking else "response"])
    reader.read(segments, partial)
    message = reader.root.children[0]
    if partial:
        for tools in message.named("tools"):
            tools.children = [call for call in tools.children if call.closed]
    return _answer(message, reader.malformed)


def parse_messages(segments: Iterable[Segment]) -> list[dict[str, object]]:
    """Read a rendered conversation back into messages.

    Messages with a type, such as the declaration of tools, have it under `type`. Ids of tool calls
    are not part of the format and therefore lost.
    """
    reader = _Reader([])
    reader.read(segments)
    return [_message(element, reader.malformed) for element in reader.root.named("message")]


class _Reader:
    """Builds elements from segments."""

    def __init__(self, opened: Sequence[str]) -> None:
        self.root = Element("")
        self.malformed = False
        self._stack = [self.root]
        self._head: list[str] | None = None  # texts after a control token that needs its end
        self._kind = ""
        for name in opened:
            self._push(Element(name))

    def read(self, segments: Iterable[Segment], partial: bool = False) -> None:
        """Read all; what is open at the end stays marked as not closed."""
        for text, is_control in segments:
            if not is_control:
                (self._stack[-1].parts if self._head is None else self._head).append(text)
            elif text == SEP and self._head is not None and self._kind in (OPEN, CLOSE):
                self._finish("".join(str(part) for part in self._head))
            elif text == MEDIA_END and self._kind == MEDIA_BEGIN and self._head is not None:
                self._finish_image("".join(self._head))
            elif text in (OPEN, CLOSE, MEDIA_BEGIN):
                self._abandon()
                self._head, self._kind = [], text
            elif text == END:
                self._abandon()
                del self._stack[1:]
            elif self._kind != MEDIA_BEGIN:
                self.malformed = True
        if not partial:
            self._abandon()

    def _finish(self, head: str) -> None:
        kind, self._head, self._kind = self._kind, None, ""
        if kind == CLOSE:
            names = [element.name for element in self._stack]
            if head not in names[1:]:
                self.malformed = True
                return
            depth = len(names) - 1 - names[::-1].index(head)
            self.malformed |= depth != len(names) - 1
            self._stack[depth].closed = True
            del self._stack[depth:]
            return
        name, _, rest = head.partition(" ")
        found = _ATTRIBUTE.findall(f" {rest}") if rest else []
        self.malformed |= "".join(f' {key}="{value}"' for key, value in found) != head[len(name) :]
        self._push(Element(name, {key: _unescape(value) for key, value in found}))

    def _finish_image(self, head: str) -> None:
        self._head, self._kind = None, ""
        size = _SIZE.fullmatch(head)
        if size is None:
            self.malformed = True
            return
        width, height = int(size[1]), int(size[2])
        self._stack[-1].parts.append({"type": "image", "width": width, "height": height})

    def _push(self, element: Element) -> None:
        self._stack[-1].children.append(element)
        self._stack.append(element)

    def _abandon(self) -> None:
        """A head without end is text after all."""
        if self._head is not None:
            self.malformed = True
            self._stack[-1].parts.extend(self._head)
        self._head, self._kind = None, ""


def _answer(message: Element, malformed: bool) -> Answer:
    thoughts = message.named("think")
    # Text outside of the elements is for the user too: a model that forgets one still answers.
    content = "".join(e.text for e in message.named("response")) + message.text
    calls = [_call(call) for tools in message.named("tools") for call in tools.named("call")]
    return Answer(
        content,
        "".join(e.text for e in thoughts) or None,
        tuple(calls),
        message.closed and not malformed,
    )


def _call(call: Element) -> ToolCall:
    name = call.attributes.get("tool", "")
    whole = call.named("json")
    if whole:
        value = join_value("object", whole[0].text)
        return ToolCall(name, value if isinstance(value, dict) else whole[0].text)
    arguments = {
        argument.attributes.get("key", ""): join_value(
            argument.attributes.get("type", "string"), argument.text
        )
        for argument in call.named("argument")
    }
    return ToolCall(name, arguments)


def _message(element: Element, malformed: bool) -> dict[str, object]:
    role = element.attributes.get("role", "")
    if role == "assistant":
        message = _answer(element, malformed).message()
    else:
        only_text = all(isinstance(part, str) for part in element.parts)
        message = {"role": role, "content": element.text if only_text else _parts(element)}
    for key in ("name", "type"):
        if key in element.attributes:
            message[key] = element.attributes[key]
    if role == "tool":
        message["name"] = element.attributes.get("tool", "")
    return message


def _parts(element: Element) -> list[dict[str, object]]:
    return [
        {"type": "text", "text": part} if isinstance(part, str) else part for part in element.parts
    ]


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")

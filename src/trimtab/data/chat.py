"""Conversations as values: pieces with their origin, options of a request, answers.

Knows: what every chat format has in common. Does not know: any of the formats, token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Message = Mapping[str, object]
Tool = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of rendered text of one origin.

    Args:
        text: as the model sees it.
        own: it is the format's text, in which markers are real.
        message: index of the message that contributed it, if one did.
        supervised: the model is trained to produce it.
    """

    text: str
    own: bool
    message: int | None
    supervised: bool


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a request asks of the format beside its messages.

    Args:
        thinking: the answer begins with reasoning.
        thinking_effort: how much; None says nothing of it. Which words are allowed is the
            format's matter.
        tool_choice: `required`, `none` or `auto`; None is `auto`.
        response_format: `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema":
            {"schema": ...}}`; None is free text.
    """

    thinking: bool = True
    thinking_effort: str | None = None
    tool_choice: str | None = None
    response_format: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an answer asks for.

    Args:
        name: of the tool.
        arguments: values by name, or the text as it came where it is no JSON object.
    """

    name: str
    arguments: Mapping[str, object] | str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote.

    Args:
        content: the text for the user.
        reasoning: what the model thought before, or None.
        tool_calls: calls in order.
        complete: the answer has its end and nothing in it is malformed.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    complete: bool = True

    def message(self) -> dict[str, object]:
        """The answer as an assistant message, to go on with the conversation."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


class ChatFormat(Protocol):
    """How a checkpoint writes conversations: its template, or K3's own format."""

    def pieces(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[Piece]:
        """The conversation as the model sees it, cut by origin."""

    def with_options(self, options: ChatOptions) -> ChatFormat:
        """The same format, rendering for a request with these options."""

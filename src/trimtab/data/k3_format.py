"""Kimi K3's chat format, for checkpoints of the family that carry no template.

Knows: elements, roles, options and the order of it all. Does not know: token ids; the four
control tokens and the image tokens are named by their text. `k3_parse` reads the format back.

An element is `<|open|>name key="value"<|sep|>body<|close|>name<|sep|>`. Only the control tokens
are special; names, attributes and bodies are ordinary text, whoever wrote them. Every name, every
part of an attribute and every body is tokenized for itself, as in training.

    [tool declaration] [thinking effort] messages... [tool choice] [response format] [prompt]

The four messages around the conversation say their value and nothing else: the released encoder puts
fixed sentences around it, which belong to the model's own template (see docs/k3-format.md).

Each is a `message` element followed by `<|end_of_msg|>`. An assistant's message has a `think` element
(in thinking mode, even if empty), a `response` element and, where it calls tools, a `tools` element.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set

from trimtab.data.chat import ChatOptions, Message, Piece, Tool
from trimtab.data.k3_arguments import Argument, split_arguments
from trimtab.errors import DataError

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
CONTROL = (OPEN, CLOSE, SEP, END)
MEDIA_BEGIN, MEDIA_CONTENT = "<|media_begin|>", "<|media_content|>"
MEDIA_PAD, MEDIA_END = "<|media_pad|>", "<|media_end|>"
_MEDIA = frozenset({MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END})
EFFORTS = ("low", "high", "max")
TOOL_CHOICES = ("auto", "none", "required")


class K3Format:
    """Renders conversations.

    Args:
        where: the checkpoint, for errors.
        specials: texts of its special tokens.
        options: of the request; training uses the defaults.

    Raises:
        DataError: TT404 where an option has a value that the format does not know.
    """

    def __init__(
        self, where: str, specials: Set[str], options: ChatOptions | None = None
    ) -> None:
        self._where = where
        self._specials = specials
        self._options = options or ChatOptions()
        effort, choice = self._options.thinking_effort, self._options.tool_choice
        if effort is not None and effort not in EFFORTS:
            raise self._error("thinking_effort", f"must be one of {', '.join(EFFORTS)}", effort)
        if choice is not None and choice not in TOOL_CHOICES:
            raise self._error("tool_choice", f"must be one of {', '.join(TOOL_CHOICES)}", choice)

    def with_options(self, options: ChatOptions) -> K3Format:
        """The same format for another request."""
        return K3Format(self._where, self._specials, options)

    def pieces(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[Piece]:
        """Render to pieces; supervised is what follows the generation prompt of each answer.

        Raises:
            DataError: TT404 where a message does not fit the format.
        """
        out = _Writer()
        if tools:
            out.system("tool-declare", _compact(tools))
        if self._options.thinking and self._options.thinking_effort is not None:
            out.system("thinking-effort", self._options.thinking_effort)
        for index, message, name, position in self._in_order(messages):
            out.message = index
            self._message(out, message, name, position)
        out.message = None
        self._last_options(out)
        if add_generation_prompt:
            out.open("message", role="assistant")
            out.open("think" if self._options.thinking else "response")
        return out.pieces

    def _message(
        self, out: _Writer, message: Message, tool: str | None, position: int
    ) -> None:
        role = message.get("role")
        named = {"name": str(message["name"])} if message.get("name") else {}
        if role == "tool":
            if tool is None:
                raise self._error(
                    out.where, "needs the name of the tool whose result it is",
                    hint="give `name`, or the `tool_call_id` of a call before it",
                )  # fmt: skip
            out.open("message", role="tool", tool=tool, index=str(position))
        elif role == "assistant":
            out.open("message", role="assistant", **named)
            self._answer(out, message)
            return
        elif role in ("user", "system", "developer"):
            if role != "user" and message.get("tools"):
                out.system("tool-declare", _compact(message["tools"]))
                if not message.get("content"):
                    return
            out.open("message", role="user" if role == "user" else "system", **named)
        else:
            raise self._error(f"{out.where}.role", "is not a role of this format", role)
        self._content(out, message.get("content"))
        out.end_message()

    def _answer(self, out: _Writer, message: Message) -> None:
        """Body of an assistant's message; all but its first opening is for the model to write."""
        channel = "think" if self._options.thinking else "response"
        out.open(channel)
        out.supervised = True
        if self._options.thinking:
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            if not isinstance(reasoning, str):
                raise self._error(f"{out.where}.reasoning_content", "must be a text", reasoning)
            out.body(reasoning)
            out.close("think")
            out.open("response")
        self._content(out, message.get("content"))
        out.close("response")
        calls = message.get("tool_calls")
        if calls:
            out.open("tools")
            for number, call in enumerate(_sequence(calls), start=1):
                self._call(out, call, number)
            out.close("tools")
        out.end_message()
        out.supervised = False

    def _call(self, out: _Writer, call: object, number: int) -> None:
        function = _function(call)
        where = f"{out.where}.tool_calls[{number - 1}]"
        if not isinstance(function.get("name"), str):
            raise self._error(where, "needs a function with a name")
        out.open("call", tool=str(function["name"]), index=str(number))
        arguments = split_arguments(function.get("arguments"))
        if arguments is None:
            raise self._error(f"{where}.arguments", "must be an object or its JSON text")
        if isinstance(arguments, str):
            # The model never writes this element, it only meets it in histories.
            supervised, out.supervised = out.supervised, False
            out.open("json", type="object")
            out.body(arguments)
            out.close("json")
            out.supervised = supervised
        else:
            self._arguments(out, arguments)
        out.close("call")

    def _arguments(self, out: _Writer, arguments: Sequence[Argument]) -> None:
        for argument in arguments:
            out.open("argument", key=argument.key, type=argument.type)
            out.body(argument.text)
            out.close("argument")

    def _content(self, out: _Writer, content: object) -> None:
        if content is None:
            return
        if isinstance(content, str):
            out.body(content)
            return
        for index, part in enumerate(_sequence(content)):
            where = f"{out.where}.content[{index}]"
            kind = part.get("type") if isinstance(part, Mapping) else None
            if not isinstance(part, Mapping):
                raise self._error(where, "must be an object with a type")
            if kind in ("image", "image_url"):
                width, height = part.get("width"), part.get("height")
                if not isinstance(width, int) or not isinstance(height, int):
                    raise self._error(where, "needs width and height of the image in pixels")
                if not self._specials >= _MEDIA:
                    raise self._error(where, "the tokenizer has no tokens for images")
                out.image(width, height)
            elif isinstance(part.get("text"), str):
                out.body(str(part["text"]))
            else:
                raise self._error(where, "must be an image or have a text", kind)

    def _last_options(self, out: _Writer) -> None:
        choice = self._options.tool_choice
        if choice not in (None, "auto"):
            out.system("tool-choice", str(choice))
        wanted = self._options.response_format
        kind = None if wanted is None else wanted.get("type")
        if wanted is None or kind == "text":
            return
        if kind not in ("json_object", "json_schema"):
            raise self._error("response_format", "must be text, json_object or json_schema", kind)
        is_schema = kind == "json_schema"
        schema = _compact(_schema(wanted.get("json_schema"))) if is_schema else str(kind)
        out.system("response-format", schema)

    def _in_order(
        self, messages: Sequence[Message]
    ) -> Iterator[tuple[int, Message, str | None, int]]:
        """Messages with their index; tool results also with the tool's name and place.

        Results follow the order of the calls that they answer, where all say which one that is.
        """
        calls: list[object] = []
        index = place = 0
        while index < len(messages):
            end = index
            while end < len(messages) and messages[end].get("role") == "tool":
                end += 1
            if end == index:
                if messages[index].get("role") == "assistant":
                    calls = list(_sequence(messages[index].get("tool_calls") or ()))
                    place = 0
                yield index, messages[index], None, 0
                index += 1
                continue
            results = [(i, messages[i]) for i in range(index, end)]
            ordered = _results_in_order(results, calls, place)
            if [i for i, _ in ordered] != list(range(index, end)) and any(map(_has_image, messages[index:end])):
                # Images are matched to their places in the order of the messages.
                raise self._error(
                    f"messages[{index}]", "results with images must be in the order of their calls"
                )
            for i, name in ordered:
                place += 1
                yield i, messages[i], name, place
            index = end

    def _error(
        self, place: str, rule: str, value: object = None, hint: str | None = None
    ) -> DataError:
        return DataError("TT404", f"{self._where} (K3 format): {place}", rule, value=value, hint=hint)


class _Writer:
    """Collects pieces.

    Attributes:
        message: index of the message whose text is written.
        supervised: what is written now is for the model to learn.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.message: int | None = None
        self.supervised = False

    @property
    def where(self) -> str:
        return f"messages[{self.message}]"

    def open(self, name: str, /, **attributes: str) -> None:
        self._control(OPEN)
        self._text(name)
        for key, value in attributes.items():
            self._text(f" {key}")
            self._text('="')
            self._text(escape(value))
            self._text('"')
        self._control(SEP)

    def close(self, name: str) -> None:
        self._control(CLOSE)
        self._text(name)
        self._control(SEP)

    def end_message(self) -> None:
        self.close("message")
        self._control(END)

    def body(self, text: str) -> None:
        """Text that somebody wrote."""
        self._text(text, self.message)

    def system(self, kind: str, text: str) -> None:
        self.open("message", role="system", type=kind)
        self.body(text)
        self.end_message()

    def image(self, width: int, height: int) -> None:
        """Framing of one image with a single placeholder; nothing of it is ever learned."""
        supervised, self.supervised = self.supervised, False
        self._control(MEDIA_BEGIN)
        self._text(f"image {width}x{height}", self.message)
        for token in (MEDIA_CONTENT, MEDIA_PAD, MEDIA_END):
            self._control(token, self.message)
        self.supervised = supervised

    def _control(self, token: str, message: int | None = None) -> None:
        self.pieces.append(Piece(token, True, message, self.supervised))

    def _text(self, text: str, message: int | None = None) -> None:
        if text:
            self.pieces.append(Piece(text, False, message, self.supervised))


def escape(value: str) -> str:
    """An attribute's value as it is written."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _schema(value: object) -> object:
    """The schema inside the wrappers that clients put around it."""
    if isinstance(value, Mapping):
        return value.get("schema", value.get("json_schema", value))
    return value


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _function(call: object) -> Mapping[str, object]:
    """The part of a tool call with name and arguments; the wrapping is optional."""
    if not isinstance(call, Mapping):
        return {}
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _results_in_order(
    results: Sequence[tuple[int, Message]], calls: Sequence[object], before: int
) -> list[tuple[int, str | None]]:
    """Index and tool name of each result, `before` of which came earlier."""
    by_id: dict[str, int] = {}
    for number, call in enumerate(calls):
        if isinstance(call, Mapping) and call.get("id") is not None:
            by_id.setdefault(str(call["id"]), number)
    ids = [str(m.get("tool_call_id", m.get("id"))) for _, m in results]
    if all(i in by_id for i in ids):
        order = sorted(range(len(results)), key=lambda n: by_id[ids[n]])
        return [(results[n][0], _name(calls[by_id[ids[n]]])) for n in order]
    found = []
    for number, (index, message) in enumerate(results, start=before):
        name = message.get("tool", message.get("name"))
        if name is None and number < len(calls):
            name = _name(calls[number])
        found.append((index, None if name is None else str(name)))
    return found


def _has_image(message: Message) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    return any(isinstance(p, Mapping) and p.get("type") in ("image", "image_url") for p in parts)


def _name(call: object) -> str | None:
    name = _function(call).get("name")
    return name if isinstance(name, str) else None

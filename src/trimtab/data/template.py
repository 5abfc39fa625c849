"""The checkpoint's chat template, run in a sandbox, with the origin of every character known.

Knows: jinja as `transformers` sets it up, so that released templates render unchanged. Does not
know: tokens.

A template returns one string in which markers and what people wrote look the same. To tell them
apart it is rendered twice: once as it is, once with every text of the conversation replaced by a
placeholder of private-use characters. Aligning both gives the pieces that came from people; only
what is left may hold special tokens.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimtab.data.chat import ChatOptions, Message, Piece
from trimtab.errors import DataError

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_PLACEHOLDER = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
# Values under these keys steer a template and are words of the format, not of people.
_FORMAT_KEYS = frozenset({"role", "type"})


class _Generation(Extension):
    """`{% generation %}` marks answers for other trainers; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012  the base class declares a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled template and the special tokens it may name.

    Args:
        source: jinja text.
        variables: values such as `bos_token` that templates refer to.
        markers: texts of the special tokens, to find where an answer ends.
        where: the file, for errors.

    Raises:
        DataError: TT404 where the text is not a valid template.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], markers: Sequence[str], where: str
    ) -> None:
        self.where = where
        self._variables: dict[str, object] = dict(variables)
        ordered = sorted(markers, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        today = datetime.datetime.now()  # once, so that one run sees one date
        environment.globals["strftime_now"] = today.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError("TT404", f"{where}:{error.lineno}", f"{error.message}") from None

    def with_options(self, options: ChatOptions) -> ChatTemplate:
        """The same template with the options as variables, for those that read them."""
        other = copy.copy(self)
        values = asdict(options) | {"enable_thinking": options.thinking}
        given = {name: value for name, value in values.items() if value is not None}
        other._variables = self._variables | given
        return other

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render to one string.

        Raises:
            DataError: TT404 where the template refuses the conversation or fails.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None,
                add_generation_prompt=add_generation_prompt, **self._variables,
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError("TT404", self.where, f"the template fails: {error}") from None

    def pieces(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[Piece]:
        """Render to pieces whose texts, joined, are what `text` returns.

        Supervised is what the model has to write: from the end of the generation prompt to the
        end marker of each assistant message, that marker included.

        Raises:
            DataError: TT404 as for `text`, or where the template changes texts in a way that
                cannot be followed, so that markers typed by people could pass for real ones.
        """
        replaced = _Replacer()
        masked = [replaced.message(index, message) for index, message in enumerate(messages)]
        masked_tools = None if tools is None else [replaced.tool(tool) for tool in tools]
        skeleton = self.text(masked, masked_tools, add_generation_prompt)
        spans = self._answers(skeleton, masked, masked_tools, replaced)
        rendered = self.text(messages, tools, add_generation_prompt)
        return self._align(skeleton, rendered, replaced, spans)

    def _answers(
        self,
        skeleton: str,
        masked: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        replaced: _Replacer,
    ) -> list[tuple[int, int]]:
        """Find the supervised stretches of the skeleton, [begin, end), in order."""
        spans = []
        for index, message in enumerate(masked):
            if message.get("role") != "assistant":
                continue
            prompt = self._prompt(masked[:index], tools)
            through = skeleton
            if index + 1 < len(masked):
                through = self.text(masked[: index + 1], tools)
            if prompt and through.startswith(prompt) and skeleton.startswith(through):
                begin, end = len(prompt), len(through)
                markers = list(self._marker.finditer(through, begin))
                last = markers[-1].end() if markers else begin
                # Text after the end marker, such as a newline, belongs to the format.
                if not _PLACEHOLDER.search(through, last):
                    end = last if markers else end
            else:
                begin, end = self._around_placeholders(skeleton, replaced, index)
            spans.append((begin, end))
        return spans

    def _prompt(
        self, before: Sequence[Message], tools: Sequence[Mapping[str, object]] | None
    ) -> str:
        """Text up to where an answer begins, or "" where the template does not tell."""
        try:
            prompt = self.text(before, tools, add_generation_prompt=True)
            bare = self.text(before, tools)
        except DataError:
            return ""  # templates may refuse a conversation without a question
        return "" if prompt == bare else prompt

    def _around_placeholders(
        self, skeleton: str, replaced: _Replacer, index: int
    ) -> tuple[int, int]:
        """From the first to the last text of a message, and on to the next marker."""
        found = [
            match
            for match in _PLACEHOLDER.finditer(skeleton)
            if replaced.originals[int(match.group(1))][0] == index
        ]
        if not found:
            return 0, 0
        marker = self._marker.search(skeleton, found[-1].end())
        return found[0].start(), marker.end() if marker else found[-1].end()

    def _align(
        self, skeleton: str, rendered: str, replaced: _Replacer, spans: list[tuple[int, int]]
    ) -> list[Piece]:
        """Walk skeleton and rendering together and cut the rendering into pieces."""
        cuts = sorted({0, len(skeleton), *(edge for span in spans for edge in span)})
        pieces: list[Piece] = []
        position = 0  # in `rendered`
        for begin, end in itertools.pairwise(cuts):
            supervised = any(b <= begin and end <= e for b, e in spans)
            at = begin
            while at < end:
                match = _PLACEHOLDER.search(skeleton, at, end)
                literal = skeleton[at : match.start() if match else end]
                if not rendered.startswith(literal, position):
                    raise self._unclear()
                if literal:
                    pieces.append(Piece(literal, True, None, supervised))
                position += len(literal)
                at = match.end() if match else end
                if match:
                    following = _PLACEHOLDER.split(skeleton[at:], maxsplit=1)[0]
                    message, original = replaced.originals[int(match.group(1))]
                    text = _as_written(rendered, position, original, following)
                    if text is None:
                        raise self._unclear()
                    if text:
                        pieces.append(Piece(text, False, message, supervised))
                    position += len(text)
        if position != len(rendered):
            raise self._unclear()
        return pieces

    def _unclear(self) -> DataError:
        return DataError(
            "TT404", self.where, "the template changes the texts of this conversation, so that "
            "markers in them cannot be told from its own",
            hint="move special handling, such as reasoning, into fields of its own "
            "(reasoning_content, tool_calls)",
        )  # fmt: skip


def _as_written(rendered: str, position: int, original: str, following: str) -> str | None:
    """Which form of a text stands at a position: as it is, stripped, or inside a JSON string."""
    quoted = json.dumps(original, ensure_ascii=False)[1:-1]
    forms = (original, original.strip(), original.rstrip(), original.lstrip(), quoted)
    fits = (f for f in forms if rendered.startswith(f + following, position))
    return next(fits, None)


class _Replacer:
    """Replaces texts by placeholders and remembers what each stood for."""

    def __init__(self) -> None:
        self.originals: list[tuple[int | None, str]] = []
        self._owner: int | None = None

    def message(self, index: int, message: Message) -> dict[str, object]:
        self._owner = index
        return {key: self._value(key, value) for key, value in message.items()}

    def tool(self, tool: Mapping[str, object]) -> dict[str, object]:
        self._owner = None
        return {key: self._value(key, value) for key, value in tool.items()}

    def _value(self, key: str, value: object) -> object:
        if isinstance(value, str):
            # An empty text stays: templates ask whether there is one.
            if key in _FORMAT_KEYS or not value:
                return value
            self.originals.append((self._owner, value))
            return f"{_OPEN}{len(self.originals) - 1}{_CLOSE}"
        if isinstance(value, Mapping):
            return {name: self._value(name, item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(key, item) for item in value]
        return value

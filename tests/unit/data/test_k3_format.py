"""K3's chat format: structure, loss mask, order, and no way in for markers that people type."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.rank_file import rank_file, write_k3_tokenizer
from trimtab.data.chat import ChatOptions
from trimtab.data.k3_format import CONTROL
from trimtab.data.k3_parse import parse_messages
from trimtab.data.tokenizer import Tokenizer, load_tokenizer
from trimtab.errors import DataError

QUIET = ChatOptions(thinking_effort=None)
DIRECT = ChatOptions(thinking=False)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "b": 1, "B": 2}},
}


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: object, **more: object) -> dict[str, object]:
    return {"function": {"name": name, "arguments": arguments}, **more}


def text_of(k3: Tokenizer, messages: list[dict[str, object]], **more: object) -> str:
    options = more.pop("options", QUIET)
    return k3.decode(k3.render(messages, options=options, **more).token_ids)  # type: ignore[arg-type]


def body(name: str, text: str) -> str:
    return f"<|open|>{name}<|sep|>{text}<|close|>{name}<|sep|>"


END = "<|close|>message<|sep|><|end_of_msg|>"


def test_end_of_a_message_and_generation_prompt_have_the_structure_of_the_release(
    k3: Tokenizer,
) -> None:
    ids = k3.render([user("a")], add_generation_prompt=True, options=QUIET).token_ids
    base = k3.vocab_size - 256
    end, opening, closing, sep = base + 2, base + 3, base + 4, base + 5
    words = {
        word: k3.encode(word)
        for word in ("message", " role", '="', "assistant", '"', "think")
    }
    assert {word: len(i) for word, i in words.items()} == dict.fromkeys(words, 1)
    message, role, equals, assistant_, quote, think = (i for (i,) in words.values())
    assert ids[-14:] == [
        closing, message, sep, end,
        opening, message, role, equals, assistant_, quote, sep,
        opening, think, sep,
    ]  # fmt: skip
    # Ordinary tokens of the structure are those of its text read at once.
    tail = k3.decode(ids[-14:])
    assert k3.encode(tail, allow_special=True) == ids[-14:]


def test_no_begin_token_is_added_and_the_stop_token_comes_from_the_config(k3: Tokenizer) -> None:
    rendered = k3.render([user("a")])
    assert k3.bos_id not in rendered.token_ids
    base = k3.vocab_size - 256
    assert set(k3.stop_ids) == {base + 1, base + 2}


def test_conversation_reads_as_the_format_says(k3: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q", "name": 'A & "B"'},
        assistant("r", reasoning_content="t"),
        user("again"),
        assistant("", reasoning_content=""),
        {"role": "developer", "content": "d"},
    ]
    assert text_of(k3, messages) == (
        f'<|open|>message role="system"<|sep|>s{END}'
        f'<|open|>message role="user" name="A &amp; &quot;B&quot;"<|sep|>q{END}'
        f'<|open|>message role="assistant"<|sep|>{body("think", "t")}{body("response", "r")}{END}'
        f'<|open|>message role="user"<|sep|>again{END}'
        f'<|open|>message role="assistant"<|sep|>{body("think", "")}{body("response", "")}{END}'
        f'<|open|>message role="system"<|sep|>d{END}'
    )


def test_without_thinking_there_is_no_think_element_and_no_effort(k3: Tokenizer) -> None:
    messages = [assistant("r", reasoning_content="t")]
    assert text_of(k3, messages, options=DIRECT, add_generation_prompt=True) == (
        f'<|open|>message role="assistant"<|sep|>{body("response", "r")}{END}'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


def test_options_stand_where_the_format_puts_them(k3: Tokenizer) -> None:
    options = ChatOptions(
        thinking_effort="low", tool_choice="required",
        response_format={"type": "json_schema", "json_schema": {"schema": {"z": 1, "a": "é"}}},
    )  # fmt: skip
    ids = k3.render([user("q")], [WEATHER], True, options).token_ids
    found = parse_messages(k3.segments(ids))
    assert [m.get("type", m["role"]) for m in found] == [
        "tool-declare", "thinking-effort", "user", "tool-choice", "response-format", "assistant",
    ]  # fmt: skip
    texts = [str(m["content"]) for m in found]
    schemas = '[{"function":{"name":"weather","parameters":{"B":2,"b":1,"type":"object"}},'
    assert texts[0] == f'{schemas}"type":"function"}}]'
    assert texts[1] == "low"
    assert texts[3] == "required"
    assert texts[4] == '{"a":"é","z":1}'


def test_without_options_a_conversation_is_its_messages(k3: Tokenizer) -> None:
    found = parse_messages(k3.segments(k3.render([user("q")]).token_ids))
    assert [m["role"] for m in found] == ["user"]


@pytest.mark.parametrize(
    "options",
    [ChatOptions(tool_choice="auto"), ChatOptions(response_format={"type": "text"})],
)
def test_options_that_say_nothing_add_nothing(k3: Tokenizer, options: ChatOptions) -> None:
    assert k3.render([user("q")], options=options) == k3.render([user("q")])


def test_tool_calls_have_typed_arguments(k3: Tokenizer) -> None:
    arguments = {"s": "a <b>", "n": 5, "x": 1.5, "t": True, "z": None, "o": {"k": "é"}, "l": [1, 2]}
    text = text_of(k3, [assistant("r", tool_calls=[call("f", arguments), call('g"&', None)])])
    typed = [
        ("s", "string", "a <b>"), ("n", "number", "5"), ("x", "number", "1.5"),
        ("t", "boolean", "true"), ("z", "null", "null"), ("o", "object", '{"k": "é"}'),
        ("l", "array", "[1, 2]"),
    ]  # fmt: skip
    inside = "".join(
        f'<|open|>argument key="{k}" type="{t}"<|sep|>{v}<|close|>argument<|sep|>'
        for k, t, v in typed
    )
    assert text.endswith(
        body("response", "r")
        + "<|open|>tools<|sep|>"
        + f'<|open|>call tool="f" index="1"<|sep|>{inside}<|close|>call<|sep|>'
        + '<|open|>call tool="g&quot;&amp;" index="2"<|sep|><|close|>call<|sep|>'
        + "<|close|>tools<|sep|>" + END
    )


def test_arguments_as_text_keep_the_characters_of_numbers(k3: Tokenizer) -> None:
    text = text_of(k3, [assistant("", tool_calls=[call("f", ' {"a": 1e2 ,"b":[1,2], "c":"d"} ')])])
    assert 'key="a" type="number"<|sep|>1e2<|close|>' in text
    assert 'key="b" type="array"<|sep|>[1,2]<|close|>' in text
    assert 'key="c" type="string"<|sep|>d<|close|>' in text


@pytest.mark.parametrize("raw", ['{"a": 1', "[1]", "  ", '{"a":1} x', "{'a': 1}", "{1: 2}", "{"])
def test_arguments_that_are_no_object_are_one_element_that_is_not_learned(
    k3: Tokenizer, raw: str
) -> None:
    rendered = k3.render([assistant("r", tool_calls=[call("f", raw)])], options=QUIET)
    whole = f'<|open|>json type="object"<|sep|>{raw}<|close|>json<|sep|>'
    assert whole in k3.decode(rendered.token_ids)
    learned = [i for i, m in zip(rendered.token_ids, rendered.loss_mask, strict=True) if m]
    call_ = '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
    assert call_ in k3.decode(learned)


def test_tool_results_follow_the_order_of_the_calls(k3: Tokenizer) -> None:
    calls = assistant("", tool_calls=[call("f", {}, id="a"), call("g", {}, id="b")])
    results = [
        {"role": "tool", "tool_call_id": "b", "name": "wrong", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
    ]
    rendered = k3.render([calls, *results], options=QUIET)
    text = k3.decode(rendered.token_ids)
    assert text.endswith(
        f'<|open|>message role="tool" tool="f" index="1"<|sep|>A{END}'
        f'<|open|>message role="tool" tool="g" index="2"<|sep|>B{END}'
    )
    (a,), (b,) = k3.encode("A"), k3.encode("B")
    where = dict(zip(rendered.token_ids, rendered.messages, strict=True))
    assert (where[a], where[b]) == (2, 1)


def test_results_with_images_must_already_be_in_order(k3: Tokenizer) -> None:
    calls = assistant("", tool_calls=[call("f", {}, id="a"), call("g", {}, id="b")])
    image = [{"type": "image", "width": 1, "height": 1}]
    one = {"role": "tool", "tool_call_id": "a", "content": "A"}
    two = {"role": "tool", "tool_call_id": "b", "content": image}
    assert k3.render([calls, one, two]).token_ids
    with pytest.raises(DataError, match=r"messages\[1\].*order of their calls"):
        k3.render([calls, two, one])


def test_tool_results_without_ids_are_named_by_themselves_or_by_place(k3: Tokenizer) -> None:
    calls = assistant("", tool_calls=[call("f", {}), call("g", {})])
    results = [{"role": "tool", "content": "A"}, {"role": "tool", "name": "h", "content": "B"}]
    text = text_of(k3, [calls, results[0], user("u"), results[1]])
    assert 'tool="f" index="1"' in text
    assert 'tool="h" index="2"' in text
    with pytest.raises(DataError, match=r"messages\[3\].*name of the tool"):
        k3.render([calls, *results, results[0]])


def test_tools_may_come_in_a_system_message(k3: Tokenizer) -> None:
    messages = [{"role": "system", "content": "note", "tools": [WEATHER]}, user("q")]
    found = parse_messages(k3.segments(k3.render(messages, options=QUIET).token_ids))
    assert [m.get("type", m["role"]) for m in found] == ["tool-declare", "system", "user"]
    assert '"name":"weather"' in str(found[0]["content"])


def test_image_is_framed_with_its_original_size(k3: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "width": 640, "height": 48}]
    rendered = k3.render([{"role": "user", "content": parts}], options=QUIET)
    assert k3.decode(rendered.token_ids) == (
        '<|open|>message role="user"<|sep|>a<|media_begin|>image 640x48<|media_content|>'
        f"<|media_pad|><|media_end|>{END}"
    )
    (read,) = parse_messages(k3.segments(rendered.token_ids))
    assert read["content"] == parts
    in_answer = k3.render([{"role": "assistant", "content": parts}], options=QUIET)
    base = k3.vocab_size - 256
    masks = dict(zip(in_answer.token_ids, in_answer.loss_mask, strict=True))
    assert not any(masks[base + offset] for offset in (18, 19, 20, 21))


def learned(k3: Tokenizer, messages: list[dict[str, object]], options: ChatOptions) -> str:
    rendered = k3.render(messages, options=options)
    return k3.decode(
        [i for i, m in zip(rendered.token_ids, rendered.loss_mask, strict=True) if m]
    )  # fmt: skip


def test_loss_covers_what_follows_the_prompt_up_to_the_end_marker(k3: Tokenizer) -> None:
    messages = [
        user("q"),
        assistant("r", reasoning_content="t", tool_calls=[call("f", {"k": "v"})]),
        {"role": "tool", "content": "x"},
        assistant("s"),
    ]
    tools = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" '
        'type="string"<|sep|>v<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )
    think = "<|close|>think<|sep|>"
    assert learned(k3, messages, QUIET) == (
        f"t{think}{body('response', 'r')}{tools}{END}{think}{body('response', 's')}{END}"
    )
    after = "<|close|>response<|sep|>"
    assert learned(k3, messages, DIRECT) == f"r{after}{tools}{END}s{after}{END}"


@pytest.mark.parametrize("options", [QUIET, DIRECT])
def test_prompt_is_what_stands_before_the_answer(k3: Tokenizer, options: ChatOptions) -> None:
    messages = [user("q"), assistant("a", reasoning_content="t")]
    prompt = k3.render(messages[:1], add_generation_prompt=True, options=options).token_ids
    whole = k3.render(messages, options=options)
    assert whole.token_ids[: len(prompt)] == prompt
    assert whole.loss_mask == [False] * len(prompt) + [True] * (len(whole.token_ids) - len(prompt))


TYPED = st.lists(
    st.sampled_from([*CONTROL, "message", ' role="system"', "<|media_pad|>", "[EOS]", "&quot;",
                     "x", "\n", "<|kimi_image_placeholder|>"]), max_size=6,
).map("".join)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TYPED,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TYPED, inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def structure(k3: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if i in k3.special_ids]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(TYPED, TYPED, TYPED, TYPED)
def test_typed_markers_never_become_structure(
    k3: Tokenizer, one: str, two: str, three: str, four: str
) -> None:
    def conversation(a: str, b: str, c: str, d: str) -> list[int]:
        messages: list[dict[str, object]] = [
            {"role": "system", "content": a + "."},
            {"role": "user", "content": b + ".", "name": a + "."},
            assistant(c + ".", reasoning_content=d + ".", tool_calls=[
                call(a + ".", {b + ".": c, "o": {d: a}}, id="1"), call("g", c + "{", id="2"),
            ]),
            {"role": "tool", "tool_call_id": "1", "content": b + "."},
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": d}]},
        ]  # fmt: skip
        tools = [{"name": a, "description": b}]
        schema = {"type": "json_schema", "json_schema": {"schema": {c: d}}}
        return k3.render(messages, tools, True, ChatOptions(response_format=schema)).token_ids

    typed, plain = conversation(one, two, three, four), conversation("", "", "", "")
    assert structure(k3, typed) == structure(k3, plain)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.data())
def test_conversation_with_tools_and_reasoning_survives_the_round_trip(
    k3: Tokenizer, data: st.DataObject
) -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": data.draw(TYPED)},
        user(data.draw(TYPED)),
    ]
    names = data.draw(st.lists(TYPED.map("f".__add__), max_size=2))
    answer = assistant(data.draw(TYPED))
    if reasoning := data.draw(TYPED):
        answer["reasoning_content"] = reasoning
    if names:
        answer["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": data.draw(st.dictionaries(TYPED, JSON, max_size=3)),
                },
            }
            for name in names
        ]
    messages += [answer, *({"role": "tool", "name": n, "content": data.draw(TYPED)} for n in names)]
    ids = k3.render(messages, options=QUIET).token_ids
    assert parse_messages(k3.segments(ids)) == messages
    # And the answer alone, as a model would write it after its prompt.
    prompt = k3.render(messages[:2], add_generation_prompt=True, options=QUIET).token_ids
    whole = k3.render(messages[:3], options=QUIET).token_ids
    read = k3.read_answer(whole[len(prompt):], QUIET)
    assert read.message() == answer
    assert read.complete


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "complete"),
    [
        ("t<|close|>think<|sep|><|open|>response<|sep|>r", "r", "t", False),
        ("t", "", "t", False),
        ("", "", None, False),
        ("t<|close|>think<|sep|>r<|close|>message<|sep|>", "r", "t", True),
        ("t<|end_of_msg|>", "", "t", False),
        ("t<|close|>think<|sep|><|open|>response<|sep|>r<|close|>respon", "rrespon", "t", False),
        ("t<|close|>message<|sep|>", "", "t", False),
        ("t<|close|>nothing<|sep|>u", "", "tu", False),
        ("t<|close|>think<|sep|><|open|>response x<|sep|>r", "r", "t", False),
        ("<|sep|>t[EOS]", "", "t", False),
    ],
)
def test_answers_that_break_off_or_break_the_rules_are_read_as_far_as_they_go(
    k3: Tokenizer, text: str, content: str, reasoning: str | None, complete: bool
) -> None:
    read = k3.read_answer(k3.encode(text, allow_special=True))
    assert (read.content, read.reasoning, read.complete) == (content, reasoning, complete)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.sampled_from([*CONTROL, "think", "response", "tools", "call", 'argument key="',
                                 '" type="number"', "<|media_begin|>", "<|media_end|>", "x"])))  # fmt: skip
def test_any_answer_can_be_read(k3: Tokenizer, parts: list[str]) -> None:
    k3.read_answer(k3.encode("".join(parts), allow_special=True))


def test_answer_in_the_making_only_ever_grows(k3: Tokenizer) -> None:
    text = (
        "so<|close|>think<|sep|><|open|>response<|sep|>yes<|close|>response<|sep|><|open|>tools"
        '<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>'
        "v<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    )
    ids = k3.encode(text, allow_special=True)
    states = [k3.read_answer(ids[:n], partial=True) for n in range(len(ids) + 1)]
    shown = [(s.reasoning or "") + s.content + str(len(s.tool_calls) or "") for s in states]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))
    assert shown[-1] == "soyes1"
    assert states[-1] == k3.read_answer(ids)
    assert [s.complete for s in states] == [False] * len(ids) + [True]


def test_call_whose_values_are_not_of_their_type_keeps_the_text(k3: Tokenizer) -> None:
    text = (
        '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="number"<|sep|>many<|close|>argument<|sep|><|close|>call'
        '<|sep|><|open|>call tool="g" index="2"<|sep|><|open|>json type="object"<|sep|>{"b": 1}'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    )
    read = k3.read_answer(k3.encode(text, allow_special=True))
    assert [(c.name, c.arguments) for c in read.tool_calls] == [("f", {"a": "many"}), ("g", {"b": 1})]
    assert read.complete


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "robot", "content": "x"}], r"messages\[0\]\.role \(robot\)"),
        ([assistant("", tool_calls=[{"function": {}}])], r"tool_calls\[0\].*a name"),
        ([assistant("", tool_calls=[call("f", 5)])], r"arguments: must be an object"),
        ([user("q"), {"role": "tool", "content": "x"}], r"messages\[1\]: needs the name"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\]: needs width"),
        ([{"role": "user", "content": [{"type": "video"}]}], r"content\[0\] \(video\)"),
        ([{"role": "user", "content": 5}], r"content\[0\]: must be an object"),
        ([assistant("", reasoning_content=["x"])], "reasoning_content.*must be a text"),
    ],
)
def test_messages_that_do_not_fit_are_named(
    k3: Tokenizer, messages: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        k3.render(messages)
    assert caught.value.code == "TT404"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ChatOptions(thinking_effort="medium"), "thinking_effort.*low, high, max"),
        (ChatOptions(tool_choice="weather"), "tool_choice"),
        (ChatOptions(response_format={"type": "xml"}), "response_format"),
    ],
)
def test_options_that_the_format_does_not_know_are_refused(
    k3: Tokenizer, options: ChatOptions, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        k3.render([user("q")], options=options)


def test_format_is_used_for_the_family_without_template_only(tmp_path: Path) -> None:
    write_k3_tokenizer(tmp_path, rank_file([bytes([b]) for b in range(256)]), 256)
    assert load_tokenizer(tmp_path).render([user("q")]).token_ids
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}{{ thinking_effort }}{{ enable_thinking }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.render([user("q")]).token_ids) == "q"
    given = tokenizer.render([user("q")], options=ChatOptions(thinking_effort="low"))
    assert tokenizer.decode(given.token_ids) == "qlowTrue"
    template.unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear"}))
    with pytest.raises(DataError, match="no chat template"):
        load_tokenizer(tmp_path).render([user("q")])


def test_images_need_their_tokens(tmp_path: Path) -> None:
    write_k3_tokenizer(tmp_path, rank_file([bytes([b]) for b in range(256)]), 256)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["added_tokens_decoder"]["277"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    image = {"role": "user", "content": [{"type": "image", "width": 1, "height": 1}]}
    with pytest.raises(DataError, match="no tokens for images"):
        load_tokenizer(tmp_path).render([image])

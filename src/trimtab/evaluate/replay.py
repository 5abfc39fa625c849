"""Records of the untouched base's own answers, which keep its general ability in training.

Knows: prompts, generation, the file of answers and how it continues. Does not know: recipes.

Each line of the file is a record of the form `messages` with a key `replay`: the number of its
prompt and a hash of prompt, model and settings. The hash says where a broken-off file goes on, and
that it answers these prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab.checkpoint.source import open_source
from trimtab.data.forms import canonical, detect_form
from trimtab.data.image_source import message_images
from trimtab.data.prompt import ImageProcessor, Prompt, build_prompt, load_image_processor
from trimtab.data.records import Record, json_object, record_from
from trimtab.data.tokenizer import Tokenizer, load_tokenizer
from trimtab.errors import DataError
from trimtab.evaluate.run import load_with_adapter
from trimtab.models.decoder import CausalLM
from trimtab.models.generate import generate
from trimtab.train.batch import image_batch
from trimtab.train.reporter import Reporter

_KEY = "replay"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How answers are made.

    Args:
        max_new_tokens: longest answer; one that has not ended there is left out.
        limit: answer only the first so many prompts, None for all.
        base_dtype: how weights are kept.
        batch_tokens: prompts are answered together as long as they and their answers fit in this.
    """

    max_new_tokens: int = 512
    limit: int | None = None
    base_dtype: str = "bf16"
    batch_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Replayed:
    """What lies in the file now.

    Args:
        path: the file.
        prompts: prompts asked for.
        records: answers in the file.
        before: of those, answers that were there already.
        cut: prompts without a record, whose answer did not end, was empty or malformed.
    """

    path: str
    prompts: int
    records: int
    before: int
    cut: int

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt: as the file will have it, and as a record of the messages before the answer."""

    values: Mapping[str, object]
    record: Record
    digest: str


def replay(
    model: str, prompts: Path, out: Path, options: ReplayOptions, reporter: Reporter
) -> Replayed:
    """Answer every prompt with the base and append the answers to a file, in order.

    Called again it goes on behind the last whole line.

    Args:
        model: checkpoint.
        prompts: JSONL of records; a last answer in one is not looked at.
        out: JSONL, new or of an earlier call.
        options: how answers are made.
        reporter: where progress goes.

    Raises:
        DataError: TT401 for a line that is no prompt, TT402 without prompts, TT408 where `out`
            holds answers to other prompts or cannot name their images.
    """
    if out.exists() and out.resolve() == prompts.resolve():
        raise DataError("TT408", str(out), "is the file of the prompts",
                        hint="name another file with --out")
    fingerprint = open_source(model).fingerprint()
    asked = _read_prompts(prompts, [fingerprint, options.max_new_tokens], options.limit)
    _check_images(asked, prompts, out)
    numbers = _continue_file(out, asked)
    before, begin = len(numbers), numbers[-1] + 1 if numbers else 0
    written = before
    if begin < len(asked):
        written += _answer_rest(model, asked, begin, out, options, reporter)
    return Replayed(str(out), len(asked), written, before, len(asked) - written)


def _read_prompts(path: Path, settings: Sequence[object], limit: int | None) -> list[_Asked]:
    found: list[_Asked] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError("TT107", str(path), f"cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip() and (limit is None or len(found) < limit):
            found.append(_asked(line, f"{path}:{number}", str(path.parent), settings))
    if not found:
        raise DataError("TT402", str(path), "has no record", hint="each line is one JSON object")
    return found


def _asked(line: bytes, where: str, directory: str, settings: Sequence[object]) -> _Asked:
    value = json_object(line, where)
    if "instruction" in value:
        value = {"output": "", **value}
    own = canonical(value, detect_form(value), where)
    messages = own.get("messages")
    if "prompt" in own:
        messages = [{"role": "user", "content": own["prompt"]}]
    if isinstance(messages, list):
        while messages and isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
    if not messages or not isinstance(messages, list):
        raise DataError("TT401", where, "asks nothing: needs `prompt`, or `messages` with one that "
                        "is not the assistant's", value=", ".join(list(value)[:8]))
    values = {"messages": messages, **{k: own[k] for k in ("tools", "images") if own.get(k)}}
    # The rules for records want an answer; this one stands for that to come.
    answered = {**values, "messages": [*messages, {"role": "assistant", "content": "-"}]}
    record = record_from(answered, where, directory)
    digest = hashlib.sha256(json.dumps([values, *settings], sort_keys=True).encode()).hexdigest()
    return _Asked(values, record, digest[:16])


def _check_images(asked: Sequence[_Asked], prompts: Path, out: Path) -> None:
    """Paths of images start at the directory of the file that names them."""
    if out.parent.resolve() == prompts.parent.resolve():
        return
    for item in asked:
        named = [s.path for s in message_images(item.record.messages) if s.path is not None]
        if named:
            raise DataError("TT408", str(out), f"must lie beside {prompts}, whose records name images "
                            "by path", value=named[0])


def _continue_file(out: Path, asked: Sequence[_Asked]) -> list[int]:
    """Numbers of the prompts answered in the file, after a torn last line is cut off."""
    if not out.exists():
        return []
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    numbers: list[int] = []
    for line, text in enumerate(whole.splitlines(), start=1):
        numbers.append(_number(json_object(text, f"{out}:{line}"), asked, f"{out}:{line}"))
    if len(whole) < len(content):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    return numbers


def _number(value: Mapping[str, object], asked: Sequence[_Asked], where: str) -> int:
    mark = value.get(_KEY)
    number = mark.get("prompt") if isinstance(mark, Mapping) else None
    fits = isinstance(number, int) and 0 <= number < len(asked)
    if not isinstance(mark, Mapping) or not isinstance(number, int) or not fits or (
        mark.get("hash") != asked[number].digest
    ):
        raise DataError("TT408", where, "is no answer to these prompts by this model and with this "
                        "length", hint="name another file with --out, or remove this one")
    return number


def _answer_rest(
    model: str, asked: Sequence[_Asked], begin: int, out: Path, options: ReplayOptions,
    reporter: Reporter,
) -> int:
    """Answer prompts from `begin` on; returns how many records were written."""
    tokenizer, processor = load_tokenizer(model), load_image_processor(model)
    base = load_with_adapter(model, None, base_dtype=options.base_dtype, compute_dtype="auto",
                             reporter=reporter)
    out.parent.mkdir(parents=True, exist_ok=True)
    written, done = 0, begin
    with reporter.progress("answers") as update, out.open("ab") as file:
        for group in _groups(asked, begin, tokenizer, processor, options):
            answers = _answers(base, tokenizer, [p for _, p in group], options.max_new_tokens)
            for (number, _), answer in zip(group, answers, strict=True):
                if answer is None:
                    continue
                file.write(_line(asked[number], number, answer))
                written += 1
            file.flush()
            os.fsync(file.fileno())
            done += len(group)
            update(done, len(asked))
    return written


def _line(asked: _Asked, number: int, answer: Mapping[str, object]) -> bytes:
    messages = asked.values["messages"]
    assert isinstance(messages, list), "made by _asked"
    record = {**asked.values, "messages": [*messages, answer],
              _KEY: {"prompt": number, "hash": asked.digest}}
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


def _groups(
    asked: Sequence[_Asked], begin: int, tokenizer: Tokenizer, processor: ImageProcessor | None,
    options: ReplayOptions,
) -> Iterator[list[tuple[int, Prompt]]]:
    """Neighbouring prompts by number, as many as fit in the tokens of a batch."""
    group: list[tuple[int, Prompt]] = []
    total = 0
    for number in range(begin, len(asked)):
        record = asked[number].record
        prompt = build_prompt(record.messages[:-1], tokenizer, processor, where=record.where,
                              tools=record.tools, add_generation_prompt=True)
        size = len(prompt.token_ids) + options.max_new_tokens
        if group and total + size > options.batch_tokens:
            yield group
            group, total = [], 0
        group.append((number, prompt))
        total += size
    if group:
        yield group


def _answers(
    model: CausalLM, tokenizer: Tokenizer, prompts: Sequence[Prompt], longest: int
) -> list[Mapping[str, object] | None]:
    """Assistant messages; None where an answer did not end, is empty or malformed."""
    images = [image for prompt in prompts for image in prompt.images]
    rows, begin = [], 0
    for prompt in prompts:
        rows += [begin + row for row in prompt.image_rows]
        begin += len(prompt.token_ids)
    device = model.embed.weight.device
    found = generate(model, [p.token_ids for p in prompts], longest, tokenizer.stop_ids,
                     images=image_batch(images, rows, device))
    answers: list[Mapping[str, object] | None] = []
    for ids in found:
        answer = tokenizer.read_answer(ids)
        usable = len(ids) < longest and answer.complete and (answer.content or answer.tool_calls)
        answers.append(answer.message() if usable else None)
    return answers

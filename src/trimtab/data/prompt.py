"""Conversations with images to token ids: the template's one placeholder per image becomes many.

Knows: messages, tokenizers, images. Does not know: files of records, packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.arch.load import load_arch
from trimtab.arch.spec import VisionSpec
from trimtab.config.data import DataSection, ImageSection
from trimtab.data.chat import Message
from trimtab.data.image_budget import read_budget_rule
from trimtab.data.image_source import SOURCE, ImageSource, image_sources, message_images
from trimtab.data.images import PREPROCESSOR, ImagePatches, ImageRule, preprocess, read_rule
from trimtab.data.model_files import read_json
from trimtab.data.tokenizer import Rendered, Tokenizer
from trimtab.errors import DataError


class ImageTooLongError(DataError):
    """An image takes more tokens than `data.image.max_tokens`; the recipe says what follows."""


def may_leave_out(error: DataError, data: DataSection) -> bool:
    """Tell whether the recipe leaves out a record with such an error, instead of stopping."""
    too_long = isinstance(error, ImageTooLongError) and data.image.on_too_long == "skip"
    return too_long or data.on_error == "skip"


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """What a model makes of images, and what the recipe allows.

    Args:
        rule: preprocessing of the model.
        token_id: placeholder whose embeddings image features replace.
        limits: `data.image` of the recipe.
    """

    rule: ImageRule
    token_id: int
    limits: ImageSection

    def read(self, source: ImageSource) -> ImagePatches:
        """Decode and preprocess an image.

        Raises:
            DataError: TT406 for an unusable image.
            ImageTooLongError: TT406 where it takes too many tokens and must not be made smaller.
        """
        image = source.read(self.limits.root, fetch=self.limits.fetch)
        self.check_length(image.size, source.where)
        return preprocess(image, self.rule, self.limits.max_tokens)

    def count(self, source: ImageSource) -> int:
        """Tokens of an image, from the head of its file.

        Raises:
            DataError: as for `read`, as far as the head tells.
        """
        size = source.size(self.limits.root, fetch=self.limits.fetch)
        self.check_length(size, source.where)
        return self.rule.num_tokens(*size, self.limits.max_tokens)

    def check_length(self, size: tuple[int, int], where: str) -> None:
        """Refuse an image that takes too many tokens, unless it may be made smaller."""
        limit, tokens = self.limits.max_tokens, self.rule.num_tokens(*size)
        if limit is None or tokens <= limit or self.limits.on_too_long == "resize":
            return
        raise ImageTooLongError(
            "TT406", where, f"takes {tokens} tokens; data.image.max_tokens is {limit}",
            value=f"{size[0]}x{size[1]}", hint="set finetune.data.image.on_too_long to resize or skip",
        )  # fmt: skip


def load_image_processor(
    model_dir: str | Path, limits: ImageSection | None = None
) -> ImageProcessor | None:
    """Read what a checkpoint says of images; None for a model of text only.

    Args:
        model_dir: directory, URL or hub id with config.json and perhaps preprocessor_config.json.
        limits: of the recipe.

    Raises:
        DataError: TT405 where preprocessor_config.json does not fit the model.
        ArchError: the config.json cannot be read.
    """
    config = read_json(model_dir, "config.json")
    if config is None:
        return None
    arch = load_arch(config, f"{model_dir}/config.json")
    if arch.vision is None:
        return None
    if arch.image_token_id is None:
        raise DataError("TT405", f"{model_dir}/config.json", "has a vision_config but no id "
                        "of a placeholder for images")  # fmt: skip
    where = f"{str(model_dir).rstrip('/')}/{PREPROCESSOR}"
    given = read_json(model_dir, PREPROCESSOR)
    rule: ImageRule
    if isinstance(arch.vision, VisionSpec):
        rule = read_rule(given, arch.vision, where)
    else:
        rule = read_budget_rule(given, arch.vision, where)
    return ImageProcessor(rule, arch.image_token_id, limits or ImageSection())


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the model sees it; the first three have one item per token.

    Args:
        token_ids: input ids, placeholders expanded.
        loss_mask: True where the token is to be predicted; never for a placeholder.
        messages: index of the message whose text a token came from; None for the template's own.
        images: in the order of their tokens.
        image_rows: positions of all placeholders, ascending.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    messages: list[int | None]
    images: tuple[ImagePatches, ...] = ()
    image_rows: tuple[int, ...] = ()


def build_prompt(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    processor: ImageProcessor | None,
    *,
    where: str,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = False,
    last_only: bool = False,
) -> Prompt:
    """Encode a conversation through the template and put in its images.

    The template is given `width` and `height` of each image and writes one placeholder for it.

    Args:
        messages: conversation; an image part holds its `ImageSource` under `SOURCE`.
        tokenizer: of the model.
        processor: of the model; None for a model of text only.
        where: the record, for messages.
        tools: tool descriptions.
        add_generation_prompt: end with the opening of an answer.
        last_only: of the answers only the last enters the loss.

    Raises:
        DataError: TT404 as for `Tokenizer.render`, TT406 for an image, TT407 where the model takes
            none or the template writes another number of placeholders.
    """
    sources = message_images(messages)
    if processor is None:
        if sources:
            raise DataError("TT407", sources[0].where, "is an image, and the model takes text only")
        plain = _rendered(messages, tokenizer, where, tools, add_generation_prompt)
        mask = _last_answer(plain, messages) if last_only else plain.loss_mask
        return Prompt(plain.token_ids, mask, plain.messages)
    images = [processor.read(source) for source in sources]
    waiting = iter(images)
    shown = [_with_sizes(message, waiting) for message in messages] if images else messages
    rendered = _rendered(shown, tokenizer, where, tools, add_generation_prompt)
    written = rendered.token_ids.count(processor.token_id)
    if written != len(images):
        raise DataError(
            "TT407", where, f"{len(images)} images, but the chat template writes {written} "
            f"placeholders (token {processor.token_id})",
            hint="the template must write one placeholder for each part of type image",
        )  # fmt: skip
    mask = _last_answer(rendered, messages) if last_only else rendered.loss_mask
    return _expanded(Prompt(rendered.token_ids, mask, rendered.messages),
                     images, processor.token_id)  # fmt: skip


def _last_answer(rendered: Rendered, messages: Sequence[Message]) -> list[bool]:
    """The loss mask from the last answer on: nothing before it is to be predicted."""
    last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
    begin = next(
        (n for n, (origin, trained) in enumerate(zip(rendered.messages, rendered.loss_mask, strict=True))
         if origin == last and trained), len(rendered.loss_mask),
    )  # fmt: skip
    return [trained and n >= begin for n, trained in enumerate(rendered.loss_mask)]


def _rendered(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    where: str,
    tools: Sequence[Mapping[str, object]] | None,
    add_generation_prompt: bool,
) -> Rendered:
    """Render; an error names the record and not only the template."""
    try:
        return tokenizer.render(messages, tools, add_generation_prompt)
    except DataError as error:
        raise DataError(
            error.code, f"{where}, {error.where}", error.rule, value=error.value, hint=error.hint
        ) from None


def _with_sizes(message: Message, images: Iterator[ImagePatches]) -> Message:
    """A message whose image parts say what a template may write: their sizes, not their bytes."""
    if not image_sources(message):
        return message
    content = message["content"]
    assert isinstance(content, list | tuple), "images are parts of a list"
    parts: list[object] = []
    for part in content:
        if isinstance(part, Mapping) and SOURCE in part:
            image = next(images)
            parts.append({"type": "image", "width": image.width, "height": image.height})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _expanded(prompt: Prompt, images: Sequence[ImagePatches], token_id: int) -> Prompt:
    """Each placeholder repeated to the number of tokens of its image."""
    ids: list[int] = []
    mask: list[bool] = []
    origins: list[int | None] = []
    rows: list[int] = []
    waiting = iter(images)
    for token, supervised, origin in zip(
        prompt.token_ids, prompt.loss_mask, prompt.messages, strict=True
    ):
        if token != token_id:
            count = 1
        else:
            count, supervised = next(waiting).num_tokens, False
            rows.extend(range(len(ids), len(ids) + count))
        ids.extend([token] * count)
        mask.extend([supervised] * count)
        origins.extend([origin] * count)
    return Prompt(ids, mask, origins, tuple(images), tuple(rows))

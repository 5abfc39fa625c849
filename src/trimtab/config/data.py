"""The `data` section: files of records, how they are mixed, what happens to unusable ones.

Knows: keys, defaults, ranges. Does not know: files, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_serializer, model_validator

from trimtab.config.fields import Positive, PositiveInt, Section, Share, Word, fault

Overlong = Literal["truncate", "skip", "error"]
Role = Literal["domain", "general"]
Form = Literal["messages", "sharegpt", "alpaca", "prompt", "text"]
TrainOn = Literal["all_assistant", "last_assistant"]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of training records.

    Args:
        name: what reports call it: its role, with a number where the role has several files.
        role: `domain` or `general`.
        path: as the recipe has it.
        share: of all tokens, before packing.
        form: of its records, None to find out from the first.
        last_only: only the last answer of a record is trained on.
    """

    name: str
    role: Role
    path: str
    share: float
    form: Form | None = None
    last_only: bool = False


class SourceSection(Section):
    """JSONL or Parquet files, or data sets that Hugging Face's `datasets` saved to disk.

    Attributes:
        path: the file or directory, or a list of them that are mixed.
        form: of the records; `auto` finds it out from the first record of each file.
        weights: share of the tokens of each file, in the order of `path`, of any sum; equal
            where left out.
    """

    path: Annotated[
        tuple[Word, ...],
        BeforeValidator(_as_list, json_schema_input_type=Word | tuple[Word, ...]),
        Field(min_length=1),
    ]
    form: Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "text"] = "auto"
    weights: tuple[Positive, ...] | None = None

    @model_validator(mode="after")
    def _one_weight_each(self) -> SourceSection:
        if self.weights is not None and len(self.weights) != len(self.path):
            raise fault("TT105", "weights", f"has {len(self.weights)} numbers for "
                        f"{len(self.path)} {'file' if len(self.path) == 1 else 'files'} in `path`")
        return self

    @field_serializer("path")
    def _one_as_text(self, path: tuple[str, ...]) -> str | list[str]:
        return path[0] if len(path) == 1 else list(path)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the source's tokens of each file; they add to 1."""
        weights = self.weights or (1.0,) * len(self.path)
        return tuple(weight / sum(weights) for weight in weights)


class ImageSection(Section):
    """Images in records.

    Attributes:
        max_tokens: most tokens of one image; none beside the model's own limit if left out.
        on_too_long: an image with more is made smaller, its record left out, or an error.
        root: directory that paths of images start at and must stay in; by default that of the
            data file.
        fetch: images that records name by http or https are fetched, once, and kept by their URL in
            the user's cache (`TRIMTAB_CACHE`); otherwise such a record cannot be used.
    """

    max_tokens: PositiveInt | None = None
    on_too_long: Literal["resize", "skip", "error"] = "error"
    root: Word | None = None
    fetch: bool = False


class DataSection(Section):
    """What is trained on.

    Attributes:
        domain: records of the new task.
        general: records that keep general ability; may be left out with domain_ratio 1.
        domain_ratio: share of the tokens, before packing, that come from `domain`; 1 without
            `general`.
        general_ratio: the rest; a ratio left out is filled in.
        max_seq_len: length of every pack and longest record, in tokens.
        packing: several records share a pack; otherwise each is padded alone.
        overlong: what happens to a record longer than max_seq_len.
        train_on: answers of a conversation that enter the loss, with their reasoning where the
            record has it: all of them, or the last.
        on_error: `skip` drops (and counts) unreadable records instead of stopping.
        image: images in records.
    """

    domain: SourceSection
    general: SourceSection | None = None
    domain_ratio: Share = 0.8
    general_ratio: Share = 0.2
    max_seq_len: Annotated[int, Field(strict=True, ge=2)] = 1024
    packing: bool = True
    overlong: Overlong = "truncate"
    train_on: TrainOn = "all_assistant"
    on_error: Literal["error", "skip"] = "error"
    image: ImageSection = ImageSection()

    @model_validator(mode="before")
    @classmethod
    def _complement(cls, data: object) -> object:
        """A ratio left out is what the given one leaves; without `general`, all is domain."""
        if not isinstance(data, dict):
            return data
        given = {k for k in ("domain_ratio", "general_ratio") if k in data}
        if not given and data.get("general") is None:
            return {**data, "domain_ratio": 1.0, "general_ratio": 0.0}
        if len(given) == 1:
            key = given.pop()
            other = "general_ratio" if key == "domain_ratio" else "domain_ratio"
            try:
                rest = round(1.0 - float(data[key]), 12)
            except (TypeError, ValueError):
                rest = -1.0
            # A value out of range is left to the field's own check.
            return {**data, other: rest if 0 <= rest <= 1 else 0.0}
        return data

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files, those of `domain` first."""
        sources: list[tuple[Role, SourceSection, float]]
        sources = [("domain", self.domain, self.domain_ratio)]
        if self.general is not None:
            sources.append(("general", self.general, self.general_ratio))
        return tuple(
            SourceFile(role if len(source.path) == 1 else f"{role}[{index}]", role, path,
                       ratio * share, None if source.form == "auto" else source.form,
                       self.train_on == "last_assistant")
            for role, source, ratio in sources
            for index, (path, share) in enumerate(zip(source.path, source.shares, strict=True))
        )

    @model_validator(mode="after")
    def _ratios(self) -> DataSection:
        total = self.domain_ratio + self.general_ratio
        if abs(total - 1.0) > 1e-6:
            raise fault(
                "TT105", "general_ratio",
                f"domain_ratio {self.domain_ratio:g} and general_ratio {self.general_ratio:g} "
                f"add to {total:g}; they must add to 1",
                "leave one of the two out and it is filled in",
            )  # fmt: skip
        if self.general is None and self.general_ratio > 0:
            raise fault(
                "TT105", "general_ratio", "is above 0 but `general` names no file",
                "add `general: {path: ...}` or set domain_ratio to 1",
            )  # fmt: skip
        return self

"""The recipe: every value a run depends on, checked when it is read and frozen afterwards.

Knows: keys, defaults, ranges and which values contradict. Does not know: YAML, files, models.

Pydantic reports all faults of a document in one pass; `config.load` turns them into errors with
file and line. A rule that a type cannot express is raised through `fields.fault` with its error code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator

from trimtab.config.evaluation import EvaluateSection
from trimtab.config.fields import (
    Positive,
    PositiveInt,
    Section,
    Share,
    Word,
    fault,
    no_bool,
    not_yet,
)

Branch = Literal[
    "attention", "linear_attention", "sparse_attention", "dense_ffn", "shared_experts", "latent",
    "projector",
]  # fmt: skip
BaseDtype = Literal["native", "bf16", "fp32"]
ComputeDtype = Literal["auto", "bf16", "fp32", "fp64"]
Scheduler = Literal["cosine", "linear", "constant"]
Overlong = Literal["truncate", "skip", "error"]
Role = Literal["domain", "general"]


class ModelSection(Section):
    """Which weights to adapt.

    Attributes:
        path: local directory, `s3://` or another fsspec URL, or hub id.
        revision: revision of a hub id.
    """

    path: Word
    revision: Word | None = None


class LoRASection(Section):
    """The adapter: update = scaling * B A x with A [rank, in] and B [out, rank].

    Attributes:
        rank: r.
        alpha: scaling numerator; the factor is alpha / rank, or alpha / sqrt(rank) for rslora.
        dropout: probability of dropping an input feature of A.
        target_modules: module names, shell patterns, `re:` expressions or group words.
        experts: adapters on routed experts; only `none` so far.
        scaling: `standard` or `rslora`.
    """

    rank: Annotated[int, Field(strict=True, ge=1, le=4096)] = 32
    alpha: Positive = 64.0
    dropout: Annotated[float, BeforeValidator(no_bool), Field(ge=0, lt=1)] = 0.05
    target_modules: Annotated[tuple[Word, ...], Field(min_length=1)] = (
        "q_proj", "k_proj", "v_proj", "o_proj",
    )  # fmt: skip
    experts: Literal["none", "per_expert", "shared_outer"] = "none"
    scaling: Literal["standard", "rslora"] = "standard"

    @field_validator("experts")
    @classmethod
    def _experts(cls, value: str) -> str:
        not_yet("", value, "none")
        return value


class OptimizerSection(Section):
    """AdamW and its schedule.

    Attributes:
        lr: peak learning rate.
        lr_by_branch: group word to learning rate, in place of `lr`.
        scheduler: curve after the warm-up, down to zero (constant: not at all).
        warmup_ratio: share of the steps with a linear rise.
        weight_decay: decoupled weight decay.
        max_grad_norm: global gradient norm above which gradients are scaled down.
        lora_b_lr_ratio: learning rate of B over that of A.
    """

    lr: Positive = 1e-4
    lr_by_branch: dict[Branch, Positive] = Field(default_factory=dict)
    scheduler: Scheduler = "cosine"
    warmup_ratio: Share = 0.03
    weight_decay: Annotated[float, BeforeValidator(no_bool), Field(ge=0, allow_inf_nan=False)] = 0.0
    max_grad_norm: Positive = 1.0
    lora_b_lr_ratio: Positive = 1.0


class VisionSection(Section):
    """Training of the vision parts.

    A run on text has no images, so that nothing of the projector is trained there; the run says so.

    Attributes:
        tower: the vision tower; only `frozen` so far.
        projector: `frozen`, `lora` for an adapter on it, or `full` to train it itself.
    """

    tower: Literal["frozen", "lora", "full"] = "frozen"
    projector: Literal["frozen", "lora", "full"] = "lora"

    @field_validator("tower")
    @classmethod
    def _tower(cls, value: str) -> str:
        not_yet("", value, "frozen")
        return value


class BatchSection(Section):
    """Sizes in tokens of the whole job, independent of the number of ranks.

    Attributes:
        tokens_per_step: tokens between two optimizer steps, pads included.
        micro_batch_tokens: tokens of one forward and backward pass; the quotient is accumulated.
    """

    tokens_per_step: PositiveInt = 8192
    micro_batch_tokens: PositiveInt = 4096

    @model_validator(mode="after")
    def _divides(self) -> BatchSection:
        if self.tokens_per_step % self.micro_batch_tokens:
            raise fault(
                "TT105", "tokens_per_step",
                f"must be a multiple of micro_batch_tokens ({self.micro_batch_tokens})",
            )  # fmt: skip
        return self

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step."""
        return self.tokens_per_step // self.micro_batch_tokens


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
    """

    name: str
    role: Role
    path: str
    share: float


class SourceSection(Section):
    """JSONL or Parquet files of records with `messages`, `prompt` and `completion`, or `text`.

    Attributes:
        path: the file, or a list of files that are mixed.
        weights: share of the tokens of each file, in the order of `path`, of any sum; equal
            where left out.
    """

    path: Annotated[
        tuple[Word, ...],
        BeforeValidator(_as_list, json_schema_input_type=Word | tuple[Word, ...]),
        Field(min_length=1),
    ]
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
    """

    max_tokens: PositiveInt | None = None
    on_too_long: Literal["resize", "skip", "error"] = "error"
    root: Word | None = None


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
                       ratio * share)
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


class FinetuneSection(Section):
    """How the adapter is trained.

    Attributes:
        method: only `lora`.
        base_dtype: how the frozen weights are kept; `native` keeps 4-bit experts packed.
        compute_dtype: of activations; `auto` is fp32 on a CPU and bf16 elsewhere.
        lora: the adapter.
        optimizer: AdamW and schedule.
        vision: vision parts.
        on_nan: `error` stops where loss or gradient is not finite, `skip` leaves that step out.
        recompute: `layer` recomputes activations in the backward pass, layer by layer.
        steps: optimizer steps; 200 where neither this nor `epochs` is given.
        epochs: passes over the domain records.
        batch: sizes in tokens.
        data: records.
    """

    method: Literal["lora"] = "lora"
    base_dtype: BaseDtype = "bf16"
    compute_dtype: ComputeDtype = "auto"
    lora: LoRASection = LoRASection()
    optimizer: OptimizerSection = OptimizerSection()
    vision: VisionSection = VisionSection()
    on_nan: Literal["error", "skip"] = "error"
    recompute: Literal["none", "layer", "selective"] = "layer"
    steps: PositiveInt | None = None
    epochs: Positive | None = None
    batch: BatchSection = BatchSection()
    data: DataSection

    @field_validator("recompute")
    @classmethod
    def _recompute(cls, value: str) -> str:
        if value == "selective":
            raise fault("TT102", "", "selective is not supported yet", "use layer or none")
        return value

    @model_validator(mode="before")
    @classmethod
    def _default_length(cls, data: object) -> object:
        """Train 200 steps where the recipe states no length."""
        if isinstance(data, dict) and data.get("steps") is None and data.get("epochs") is None:
            return {**data, "steps": 200}
        return data

    @model_validator(mode="after")
    def _lengths(self) -> FinetuneSection:
        if self.steps is not None and self.epochs is not None:
            raise fault(
                "TT105", "epochs", "is given beside `steps`; a run has one length",
                "remove one, or set it to null",
            )  # fmt: skip
        if self.batch.micro_batch_tokens % self.data.max_seq_len:
            raise fault(
                "TT105", "batch.micro_batch_tokens",
                f"{self.batch.micro_batch_tokens} is not a multiple of data.max_seq_len "
                f"({self.data.max_seq_len}); a micro-batch is a whole number of packs",
                f"set it to {self.data.max_seq_len} or a multiple, and tokens_per_step likewise",
            )  # fmt: skip
        return self


class ParallelSection(Section):
    """Degrees of parallelism; one device so far, hence all 1.

    Attributes:
        ep: experts are divided among so many ranks.
        dp_shard: parameters are sharded over so many ranks.
        tp: matrices are divided among so many ranks.
        pp: layers are divided into so many stages.
        cp: sequences are divided among so many ranks.
        dispatcher: how tokens reach their experts.
        capacity_factor: most tokens per expert over the mean; null drops none.
    """

    ep: PositiveInt = 1
    dp_shard: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    dispatcher: Literal["auto"] = "auto"
    capacity_factor: Positive | None = None

    @field_validator("ep", "dp_shard", "tp", "pp", "cp")
    @classmethod
    def _one(cls, value: int) -> int:
        not_yet("", value, 1)
        return value

    @field_validator("capacity_factor")
    @classmethod
    def _dropless(cls, value: float | None) -> float | None:
        not_yet("", value, None)
        return value


class CheckpointSection(Section):
    """Saved training states.

    Attributes:
        every_steps: steps between two saved states.
        keep: how many states stay on disk.
    """

    every_steps: PositiveInt = 50
    keep: PositiveInt = 2


def _auto_is_default(value: object) -> object:
    return {} if value == "auto" else value


class Recipe(Section):
    """A whole run.

    Attributes:
        model: weights to adapt.
        finetune: training.
        parallel: degrees, or the word `auto`.
        evaluate: held-out sets and gate.
        checkpoint: saved states.
        ops: implementation by operator, to find which one is at fault; `trimtab doctor ops` lists them.
        track: where metrics go; `jsonl` is a file in the output directory.
        output: run directory.
        seed: of data order, adapter initialisation and dropout.
    """

    model: ModelSection
    finetune: FinetuneSection
    parallel: Annotated[ParallelSection, BeforeValidator(_auto_is_default)] = ParallelSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    ops: dict[Word, Word] = Field(default_factory=dict)
    track: tuple[Literal["jsonl"], ...] = ("jsonl",)
    output: Word
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 17

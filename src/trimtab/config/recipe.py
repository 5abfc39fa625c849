"""The recipe: every value a run depends on, checked when it is read and frozen afterwards.

Knows: keys, defaults, ranges and which values contradict. Does not know: YAML, files, models.

Pydantic reports all faults of a document in one pass; `config.load` turns them into errors with
file and line. A rule that a type cannot express is raised through `fields.fault` with its error code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from trimtab.config.data import DataSection
from trimtab.config.evaluation import EvaluateSection
from trimtab.config.fields import Positive, PositiveInt, Section, Word, fault, not_yet
from trimtab.config.lora import LoRASection, OptimizerSection
from trimtab.config.router import RouterSection
from trimtab.config.watch import CheckpointSection, DriftSection, Tracker, ValidateSection

BaseDtype = Literal["native", "bf16", "fp32"]
ComputeDtype = Literal["auto", "bf16", "fp32", "fp64"]


class ModelSection(Section):
    """Which weights to adapt.

    Attributes:
        path: local directory, `s3://` or another fsspec URL, or hub id.
        revision: revision of a hub id.
    """

    path: Word
    revision: Word | None = None


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


class FinetuneSection(Section):
    """How the adapter is trained.

    Attributes:
        method: only `lora`.
        base_dtype: how the frozen weights are kept; `native` keeps routed experts packed as released.
        compute_dtype: of activations; `auto` is fp32 on a CPU and bf16 elsewhere.
        lora: the adapter.
        optimizer: AdamW and schedule.
        vision: vision parts.
        router: routers and the load of experts.
        on_nan: `error` stops where loss or gradient is not finite, `skip` leaves that step out.
        recompute: `layer` recomputes activations in the backward pass, layer by layer; `selective`
            does so but keeps what routed experts and attention gave, the same numbers faster.
        steps: optimizer steps; 200 where neither this nor `epochs` is given.
        epochs: passes over the domain records.
        batch: sizes in tokens.
        data: records.
        drift: measurement of the routing.
    """

    method: Literal["lora"] = "lora"
    base_dtype: BaseDtype = "bf16"
    compute_dtype: ComputeDtype = "auto"
    lora: LoRASection = LoRASection()
    optimizer: OptimizerSection = OptimizerSection()
    vision: VisionSection = VisionSection()
    router: RouterSection = RouterSection()
    on_nan: Literal["error", "skip"] = "error"
    recompute: Literal["none", "layer", "selective"] = "layer"
    steps: PositiveInt | None = None
    epochs: Positive | None = None
    batch: BatchSection = BatchSection()
    data: DataSection
    drift: DriftSection = DriftSection()

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
    """Degrees of parallelism, as `trimtab plan` writes them; training runs on one device so far.

    Attributes:
        ep: experts are divided among so many ranks.
        dp_shard: parameters are sharded over so many ranks.
        dp_replicate: so many groups of them see different data.
        tp: matrices are divided among so many ranks.
        pp: layers are divided into so many stages.
        cp: sequences are divided among so many ranks.
        dispatcher: how tokens reach their experts; `flat` sends each routed copy, `dedup` one per
            host and rank, `all_gather` every token to every rank.
        capacity_factor: most tokens of an expert over the mean load of a micro-batch, in training; the
            choices beyond are dropped and counted. null drops none, and only then the result does not
            depend on how a batch is cut.
        stages: layers of each pipeline stage; balanced where left out.
    """

    ep: PositiveInt = 1
    dp_shard: PositiveInt = 1
    dp_replicate: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    cp: PositiveInt = 1
    dispatcher: Literal["auto", "flat", "all_gather", "dedup"] = "auto"
    capacity_factor: Positive | None = None
    stages: tuple[PositiveInt, ...] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ParallelSection:
        inner = self.dp_shard * self.cp * self.tp
        if inner % self.ep:
            raise fault("TT105", "ep", f"must divide dp_shard * cp * tp ({inner})",
                        "experts are divided among the ranks that hold the same layers")
        if self.stages is not None and len(self.stages) != self.pp:
            raise fault("TT105", "stages", f"has {len(self.stages)} numbers for pp: {self.pp}")
        return self

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp


def _auto_is_default(value: object) -> object:
    return {} if value == "auto" else value


class Recipe(Section):
    """A whole run.

    Attributes:
        model: weights to adapt.
        finetune: training.
        cluster: the machine that `trimtab plan` plans for: a preset or a cluster document.
        devices: ranks of it.
        parallel: degrees, or the word `auto`.
        evaluate: held-out sets and gate.
        validate: held-out records and validation during the run.
        checkpoint: saved states.
        ops: implementation by operator, to find which one is at fault; `trimtab doctor ops` lists them.
        track: where metrics go; `jsonl`, a file in the output directory, is always written.
        output: run directory.
        seed: of data order, adapter initialisation and dropout.
    """

    model: ModelSection
    finetune: FinetuneSection
    cluster: Word | None = None
    devices: PositiveInt | None = None
    parallel: Annotated[ParallelSection, BeforeValidator(_auto_is_default)] = ParallelSection()
    evaluate: EvaluateSection = EvaluateSection()
    # pydantic keeps the name `validate` for itself
    validation: Annotated[ValidateSection, Field(alias="validate")] = ValidateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    ops: dict[Word, Word] = Field(default_factory=dict)
    track: tuple[Tracker, ...] = ("jsonl",)
    output: Word
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 17

"""The `lora` and `optimizer` sections: which modules get adapters, and how these are updated.

Knows: keys, defaults, ranges. Does not know: architectures, torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from trimtab.config.fields import (
    Positive,
    PositiveInt,
    Section,
    Share,
    Word,
    fault,
    no_bool,
)

Branch = Literal[
    "attention", "linear_attention", "sparse_attention", "dense_ffn", "shared_experts", "latent",
    "projector", "routed_experts", "router",
]  # fmt: skip
Engine = Literal["trimtab", "vllm", "sglang", "vllm-ascend"]
Scheduler = Literal["cosine", "linear", "constant"]
Rank = Annotated[int, Field(strict=True, ge=1, le=4096)]


class OverrideSection(Section):
    """Rank and alpha of one group of targets, in place of those of `lora`.

    Attributes:
        rank: r; that of `lora` where left out.
        alpha: scaling numerator; where left out it moves with the rank, so that alpha / rank stays.
    """

    rank: Rank | None = None
    alpha: Positive | None = None

    @model_validator(mode="after")
    def _says_something(self) -> OverrideSection:
        if self.rank is None and self.alpha is None:
            raise fault("TT103", "rank", "neither rank nor alpha is given", "give one of the two")
        return self


class LoRASection(Section):
    """The adapter: update = scaling * B A x with A [rank, in] and B [out, rank].

    Attributes:
        rank: r.
        alpha: scaling numerator; the factor is alpha / rank, or alpha / sqrt(rank) for rslora.
        dropout: probability of dropping an input feature of A.
        target_modules: module names, shell patterns, `re:` expressions or group words.
        experts: adapters on all routed experts: `per_expert` gives each its own A and B,
            `shared_outer` shares A of gate and up and B of down within a layer; `none` leaves
            experts alone.
        scaling: `standard` or `rslora`.
        overrides: group word to rank and alpha of its targets; the narrowest word counts.
        moe_rank_scaling: routed experts get rank / active experts per token, at the same
            alpha / rank, so that a token sees as much adapter as with a dense layer.
        init_from: adapter directory whose values the adapter starts from, with a fresh optimizer;
            targets that it lacks start at zero effect.
        check_steps: steps after which a target that no token has reached is a warning.
        serve_with: engine that will serve the adapter; targets that it would ignore are refused.
    """

    rank: Rank = 32
    alpha: Positive = 64.0
    dropout: Annotated[float, BeforeValidator(no_bool), Field(ge=0, lt=1)] = 0.05
    target_modules: Annotated[tuple[Word, ...], Field(min_length=1)] = (
        "q_proj", "k_proj", "v_proj", "o_proj",
    )  # fmt: skip
    experts: Literal["none", "per_expert", "shared_outer"] = "none"
    scaling: Literal["standard", "rslora"] = "standard"
    overrides: dict[Branch, OverrideSection] = Field(default_factory=dict)
    moe_rank_scaling: bool = False
    init_from: Word | None = None
    check_steps: PositiveInt = 20
    serve_with: Engine | None = None

    @model_validator(mode="after")
    def _scaled_experts(self) -> LoRASection:
        if self.moe_rank_scaling and self.experts == "none":
            raise fault("TT105", "moe_rank_scaling", "scales the rank of routed experts, and "
                        "`experts` is none", "set experts, or leave moe_rank_scaling out")
        return self


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

"""The demo's constants, all in one place.

Knows: numbers. Does not know: what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """What the recipe says and what the demo promises.

    Args:
        steps: optimizer steps.
        tokens_per_step, micro_batch_tokens, max_seq_len: tokens of a step, of one forward pass,
            of a pack.
        rank, alpha, dropout, target_modules: the adapter.
        lr, warmup_ratio: peak learning rate and share of the steps that rise to it.
        domain_ratio: share of the tokens that are words; the rest is general text.
        recompute: `none` trades memory, of which a tiny model needs little, for time.
        every_steps: steps between saved states; a killed demo repeats at most that many.
        max_new_tokens: longest answer, in bytes.
        domain_limit, general_limit: held-out records used, None for all.
        max_before, min_after: exact match of the base and of the adapter.
        max_general_rise: bits per byte of held-out general text.
        num_prompts: words answered side by side at the end.
    """

    steps: int = 90
    tokens_per_step: int = 4096
    micro_batch_tokens: int = 4096
    max_seq_len: int = 512
    rank: int = 32
    alpha: int = 64
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "dense_ffn", "shared_experts",
    )  # fmt: skip
    lr: float = 2.0e-3
    warmup_ratio: float = 0.05
    domain_ratio: float = 0.8
    recompute: str = "none"
    every_steps: int = 20
    max_new_tokens: int = 32
    domain_limit: int | None = None
    general_limit: int | None = None
    max_before: float = 0.10
    min_after: float = 0.40
    max_general_rise: float = 0.01
    num_prompts: int = 3
    seed: int = 17


DEMO = Settings()

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
        rank, alpha, dropout, target_modules: the adapter; the image projector gets one as well.
        lr, projector_lr, warmup_ratio: peak learning rates, of the image projector apart, and share of
            the steps that rise to them.
        domain_ratio: share of the tokens that teach something new; the rest keeps what is known.
        domain_digits: share of the domain's tokens that are images to name; the rest are words.
        general_digits: share of the general tokens that are images to read; the rest is text.
        recompute: `none` trades memory, of which a tiny model needs little, for time.
        every_steps: steps between saved states; a killed demo repeats at most that many.
        max_new_tokens: longest answer, in bytes.
        domain_limit, general_limit: held-out records used of each set, None for all.
        max_before: most that the base may know of a new task, in exact match.
        min_words, min_named: exact match with the adapter on words and on images to name.
        max_read_loss: what reading digits may lose, in exact match.
        max_read_bound: the same for the gate, which judges the bound of the 95% interval.
        max_general_rise: bits per byte of held-out general text.
        num_prompts, num_images: words and images answered side by side at the end.
    """

    steps: int = 140
    tokens_per_step: int = 2048
    micro_batch_tokens: int = 2048
    max_seq_len: int = 512
    rank: int = 32
    alpha: int = 64
    dropout: float = 0.0
    target_modules: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "dense_ffn", "shared_experts",
    )  # fmt: skip
    lr: float = 1.0e-3
    projector_lr: float = 2.0e-4
    warmup_ratio: float = 0.05
    domain_ratio: float = 0.8
    domain_digits: float = 0.5
    general_digits: float = 0.35
    recompute: str = "none"
    every_steps: int = 35
    max_new_tokens: int = 32
    domain_limit: int | None = None
    general_limit: int | None = None
    max_before: float = 0.10
    min_words: float = 0.40
    min_named: float = 0.80
    max_read_loss: float = 0.02
    max_read_bound: float = 0.05
    max_general_rise: float = 0.01
    num_prompts: int = 3
    num_images: int = 1
    seed: int = 17


DEMO = Settings()

"""What a plan is asked for.

Knows: what a question consists of. Does not know: answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab.arch.outline import Outline
from trimtab.config.cluster import Cluster
from trimtab.plan.job import Job
from trimtab.plan.search import Found, Goal, Limits, capacity, search
from trimtab.plan.states import base_bytes


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is asked for.

    Args:
        outline: the model.
        job: what is run.
        cluster: the machine.
        ranks: of the job.
        goal: what the best layout is.
        limits: what is fixed.
        tokens_per_step: tokens of the global batch, from which its sequences follow.
    """

    outline: Outline
    job: Job
    cluster: Cluster
    ranks: int
    goal: Goal
    limits: Limits
    tokens_per_step: int

    def with_length(self, seq_len: int) -> Question:
        """The same with another sequence length and as many tokens per step."""
        batch = max(1, self.tokens_per_step // seq_len)
        return replace(self, job=replace(self.job, seq_len=seq_len, global_batch=batch))

    def with_ranks(self, ranks: int) -> Question | None:
        """The same on more ranks, with tokens for each; None where the cluster has fewer."""
        most = self.cluster.max_ranks
        if most is not None and ranks > most:
            return None
        tokens = max(self.tokens_per_step, self.job.seq_len * self.job.micro_batch * ranks)
        job = replace(self.job, global_batch=max(1, tokens // self.job.seq_len))
        return replace(self, ranks=ranks, job=job, tokens_per_step=tokens)

    def could_fit(self) -> bool:
        """False where even the base, divided by all ranks, is larger than their memory."""
        base = sum(base_bytes(self.outline, self.job, param) for param in self.outline.params)
        return base / self.ranks <= capacity(self.cluster)

    def search(self) -> Found:
        """The layouts that a search finds."""
        return search(self.outline, self.job, self.cluster, self.ranks, self.goal, self.limits)

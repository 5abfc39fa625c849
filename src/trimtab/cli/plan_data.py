"""`trimtab plan RECIPE`: the whole job, with the recipe's data counted."""

from __future__ import annotations

import sys

from trimtab.config.recipe import Recipe
from trimtab.data.volume import measure_volume
from trimtab.errors import TrimtabError
from trimtab.plan.planner import Plan
from trimtab.plan.whole_job import WholeJob, whole_job
from trimtab.plan.workload import workload_of


def plan_job(recipe: Recipe, answer: Plan) -> WholeJob:
    """Plan the whole job; where data or tokenizer are not here, a note says so."""
    try:
        volume = measure_volume(recipe)
    except TrimtabError as error:
        volume = None
        sys.stderr.write(f"note: data not counted: {error.message.splitlines()[0]}\n")
    question = answer.question
    tokens = question.job.seq_len * question.job.global_batch
    return whole_job(answer, workload_of(recipe, volume, tokens))

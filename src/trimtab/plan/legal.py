"""Why a layout that was fixed is impossible, said before any search.

Knows: what each degree must divide. Does not know: memory, time.
"""

from __future__ import annotations

from trimtab.arch.outline import Outline
from trimtab.errors import ConfigError
from trimtab.plan.job import Job
from trimtab.plan.search import Limits, common_heads, expert_count


def require_possible(outline: Outline, job: Job, ranks: int, limits: Limits) -> None:
    """Raise if what is fixed can be part of no layout.

    Args:
        outline: the model.
        job: with its sequence length and batch.
        ranks: of the job.
        limits: what is fixed.

    Raises:
        ConfigError: TT105, a degree does not divide what it must.
    """
    fixed = {name: getattr(limits, name) or 1 for name in ("pp", "tp", "cp", "dp_shard")}
    product = fixed["pp"] * fixed["tp"] * fixed["cp"] * fixed["dp_shard"]
    if ranks % product:
        shown = " * ".join(f"{name} {value}" for name, value in fixed.items() if value > 1)
        raise _impossible("--devices", f"must be a multiple of {shown}", ranks)
    if limits.pp is not None and limits.pp > outline.num_layers:
        raise _impossible("--pp", f"must be at most {outline.num_layers}, the layers", limits.pp)
    heads = common_heads(outline)
    if heads % (fixed["tp"] * fixed["cp"]):
        name = "--tp" if heads % fixed["tp"] else "--cp"
        rule = f"tp * cp must divide the {heads} heads of attention"
        raise _impossible(name, rule, fixed[name.removeprefix("--")])
    if job.seq_len % fixed["cp"]:
        raise _impossible("--cp", f"must divide the {job.seq_len} tokens of a sequence", fixed["cp"])
    _require_experts(outline, ranks, limits)
    groups = ranks // (fixed["pp"] * fixed["tp"] * fixed["cp"])
    all_fixed = None not in (limits.pp, limits.tp, limits.cp)
    batch = job.global_batch // job.micro_batch
    if all_fixed and (groups > batch or batch % groups):
        raise _impossible(
            "--devices", f"leaves {groups} data-parallel ranks, which must divide the {batch} "
            "micro-batches of a step", ranks)


def _require_experts(outline: Outline, ranks: int, limits: Limits) -> None:
    ep, experts = limits.ep, expert_count(outline)
    if ep is None:
        return
    if experts == 1 and ep > 1:
        raise _impossible("--ep", "must be 1: the model has no experts", ep)
    if experts % ep:
        raise _impossible("--ep", f"must divide the {experts} experts", ep)
    stage = ranks // (limits.pp or 1)
    if stage % ep:
        raise _impossible("--ep", f"must divide the {stage} ranks of a pipeline stage", ep)
    if limits.dp_shard is not None and limits.tp is not None and limits.cp is not None:
        inner = limits.dp_shard * limits.tp * limits.cp
        if inner % ep:
            raise _impossible("--ep", f"must divide dp_shard * cp * tp ({inner})", ep)


def _impossible(flag: str, rule: str, value: int) -> ConfigError:
    return ConfigError("TT105", flag, rule, value=value, hint="leave it out to have it chosen")

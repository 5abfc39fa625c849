"""Copying a checkpoint, with an adapter added and the dtype changed on the way.

Knows: which tensors change, how the files of the copy are laid out, and that all other tensors keep
their bytes. Does not know: models; whether the result computes the same is checked by
`verify.merged`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trimtab.arch.load import load_arch
from trimtab.arch.spec import ArchSpec
from trimtab.checkpoint import engine_adapter
from trimtab.checkpoint.adapter import (
    AdapterFile,
    AdapterMeta,
    adapter_base,
    load_adapter,
    save_adapter,
    writable_form,
)
from trimtab.checkpoint.adapter_card import CardFacts, licence_of
from trimtab.checkpoint.codec import Progress
from trimtab.checkpoint.companions import companion_files, config_with_dtype
from trimtab.checkpoint.copy_plan import CopyPlan, plan_copy
from trimtab.checkpoint.deltas import Deltas
from trimtab.checkpoint.manifest import (
    ArtefactWriter,
    check_output,
    inventory_hash,
    require_free_space,
    versions,
    write_artefact,
)
from trimtab.checkpoint.recompute import KindError, Recompute
from trimtab.checkpoint.released import released_index
from trimtab.checkpoint.rewrite import Rewritten, needed_bytes, write_files
from trimtab.checkpoint.source import INDEX_NAME, Source, open_source
from trimtab.checkpoint.structure import require_equal
from trimtab.errors import ArchError

OutputDtype = Literal["native", "bf16", "fp32"]
_CONFIG_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy as it was written.

    Args:
        tensors: what changed and what did not.
        errors: per kind of matrix that the adapter changes, the error of storing the sum.
    """

    tensors: Rewritten
    errors: tuple[KindError, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """An adapter as it was written.

    Args:
        num_tensors: in the file.
        ignored: targets that the engine is known not to apply, and why.
    """

    num_tensors: int
    ignored: tuple[str, ...]


def copy_checkpoint(
    source: Source,
    dst: str | Path,
    *,
    adapter: AdapterFile | None = None,
    dtype: OutputDtype = "native",
    extra: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Write a checkpoint again in the released format, merged with an adapter if one is given.

    W becomes W + scaling * B A, added in float32 and rounded once to its stored form; a matrix
    trained in full replaces W. Everything else is copied byte for byte, what no verb reads included.

    Args:
        source: the base checkpoint.
        dst: new directory.
        adapter: read for the base's architecture.
        dtype: `native` keeps every tensor's stored form, so that packed matrices that change are
            quantised again; `bf16` and `fp32` decode packed ones and write all tensors of the
            model's own dtype so.
        extra: facts for the manifest.
        progress: called with bytes done and in all.

    Raises:
        ArchError: TT202 if the family's config cannot say `dtype`.
        CheckpointError: see `require_equal`, `write_artefact` and `write_files`.
    """
    check_output(dst)
    arch = load_arch(source.config(), source.where)
    require_equal(arch, source.entries(), source.where)
    deltas = Deltas(adapter)
    written, raw_config = _written(source, arch, dtype)
    plan = plan_copy(source, arch, written, deltas.names)
    recompute = Recompute(source, deltas, plan.outputs, written.quantization)
    writing = write_artefact(
        dst, "checkpoint", source_fingerprint=source.fingerprint(),
        inventory_hash=inventory_hash(written), extra=extra,
    )
    with writing as out:
        require_free_space(dst, needed_bytes(source, plan.files, out.directory))
        tensors = write_files(
            source, plan.files, out, lambda put: recompute.run(plan.parts, put), progress
        )
        errors = tuple(recompute.errors.values())
        out.extra |= {
            "changed": tensors.changed, "identical": tensors.identical,
            "errors": [error.as_dict() for error in errors],
        }
        _write_others(source, plan, out, raw_config, same_files=written is arch)
    return Copied(tensors, errors)


def _written(source: Source, arch: ArchSpec, dtype: OutputDtype) -> tuple[ArchSpec, bytes]:
    """Architecture and config.json of the copy; `arch` itself where no stored form changes."""
    if dtype == "native":
        return arch, source.read_file("config.json")
    config = config_with_dtype(source.config(), _CONFIG_DTYPES[dtype])
    written = load_arch(config, source.where)
    if written.dtype != {"bf16": "BF16", "fp32": "F32"}[dtype]:
        rule = f"the config of {arch.family} cannot say {dtype}"
        raise ArchError("TT202", source.where, rule)
    return written, (json.dumps(config, indent=2) + "\n").encode()


def _write_others(
    source: Source, plan: CopyPlan, out: ArtefactWriter, config: bytes, *, same_files: bool
) -> None:
    """Index, config, tokenizer and the like."""
    index = released_index(source)
    if index is not None or len(plan.files) > 1:
        out.write(INDEX_NAME, index if index is not None and same_files else _index(plan))
    for name, data in companion_files(source).items():
        out.write(name, data)
    out.write("config.json", config)


def _index(plan: CopyPlan) -> bytes:
    total = sum(tensor.num_bytes for file in plan.files for tensor in file.tensors)
    weight_map = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2) + "\n").encode()


def export_adapter(
    src: str | Path, dst: str | Path, base: str | None = None, *, engine: str | None = None,
) -> Exported:
    """Write an adapter again in PEFT's form, held against its base.

    Adapters of routed experts are joined per layer, unless gate and up have an A each. For engines
    there is a pair per matrix instead, all names are released ones, and rank and scaling are the
    same everywhere.

    Args:
        src: adapter directory.
        dst: new directory.
        base: its base; by default what the adapter names.
        engine: write it for this inference engine instead of PEFT.

    Raises:
        AdapterError: TT502 if it does not fit the base; TT503 if it trains modules in full and is meant
            for engines.
        CheckpointError: TT309 if `dst` holds something.
    """
    base = base or adapter_base(src)
    source = open_source(base)
    arch = load_arch(source.config(), source.where)
    adapter = load_adapter(src, arch)
    fingerprint = adapter.manifest.source_fingerprint if adapter.manifest else None
    facts = CardFacts.read(adapter.manifest.extra.get("card") if adapter.manifest else None)
    if facts.licence is None:
        facts = replace(facts, licence=licence_of(source), versions=versions())
    targets, tensors = adapter.targets, adapter.tensors
    form = writable_form(targets)
    if engine is not None:
        targets, tensors = engine_adapter.for_engines(targets, tensors, str(src))
        form = "per_expert"
    meta = AdapterMeta(base, fingerprint, {"made_by": "export"}, form, facts)
    count = save_adapter(dst, arch, targets, tensors, meta)
    return Exported(count, () if engine is None else engine_adapter.ignored(targets, engine))



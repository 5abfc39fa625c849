"""Conversion: released weights into a layout that each rank reads front to back, as a stream.

Knows: what is planned, in which order files are written, how an interrupted conversion goes on.
Does not know: torch, how bytes move (`moves`, `stream`), where they go (`output`).

The order of writing is: marker, the conversion document, files with their records, small files,
manifest, marker removed. Whoever finds a marker finds in the document which conversion was begun.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trimtab.arch.maps import is_carried
from trimtab.checkpoint.companions import companion_files
from trimtab.checkpoint.layout import LAYOUT_NAME, UNMAPPED, FileKey, Layout
from trimtab.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    inventory_hash,
    manifest_bytes,
    remove_unfinished,
    versions,
)
from trimtab.checkpoint.marker import MARKER_NAME, is_begun_or_empty
from trimtab.checkpoint.moves import PlannedTensor, RawMove
from trimtab.checkpoint.output import WORK, LocalOutput, Output, record_name
from trimtab.checkpoint.planned import BaseDtype, plan_tensors, written_arch
from trimtab.checkpoint.released import RELEASED_NAME, released_document
from trimtab.checkpoint.source import Source
from trimtab.checkpoint.stream import FilePlan, Pipeline, least_bytes, plan_file, split_by_bytes
from trimtab.checkpoint.structure import is_skipped
from trimtab.errors import CheckpointError, ConfigError
from trimtab.units import format_bytes

Progress = Callable[[str, int, int], None]
"""Called with the current file, bytes done and bytes in all."""

# Above this size an owner's tensors are cut into several files.
LARGEST_FILE = 32 * 2**30
_RESERVE = 64 * 2**20
_DOCUMENT = f"{WORK}/document.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """A directory to be made from a checkpoint, before its first byte.

    Args:
        source: the checkpoint.
        files: weight files in the order of their owners.
        small: further files, whole.
        document: what tells this directory from any other that might be made; JSON.
        made_by: the verb.
        inventory: hash of the inventory that is written.
    """

    source: Source
    files: tuple[FilePlan, ...]
    small: dict[str, bytes]
    document: bytes
    made_by: str
    inventory: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size for file in self.files)

    def part(self, number: int, count: int) -> tuple[FilePlan, ...]:
        """The files of one of several hosts: neighbours, about as many bytes for each."""
        mine, done = [], 0
        for file in self.files:
            # A file belongs to the host in whose share its middle lies.
            if (2 * done + file.size) * count // (2 * max(1, self.num_bytes)) == number - 1:
                mine.append(file)
            done += file.size
        return tuple(mine)


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did.

    Args:
        files: weight files of the part.
        written: bytes written by this call.
        resumed: bytes that earlier calls had written.
        seconds: wall time of the writing.
        finished: every part is there and the manifest is written.
    """

    files: int
    written: int
    resumed: int
    seconds: float
    finished: bool


def plan_conversion(source: Source, layout: Layout, base_dtype: BaseDtype = "native") -> Plan:
    """Find out which bytes go where.

    Args:
        source: a checkpoint, released or converted.
        layout: made for the architecture of the source.
        base_dtype: `native` keeps every tensor's stored form, `bf16` and `fp32` decode packed
            matrices and write all tensors of the model's own dtype so.

    Raises:
        CheckpointError: TT302 to TT304 if tensors are not as the config says, TT313 if a cut goes
            through a block.
        ArchError: TT202 if the family's config cannot say `base_dtype`, TT205 if the stored form
            is only recognised.
    """
    arch, written, config = written_arch(source, base_dtype)
    by_key = plan_tensors(source, arch, written, layout)
    for name, entry in source.entries().items():
        # A cast leaves out multi-token prediction layers, which the written config does not have.
        if is_skipped(arch, name) and (base_dtype == "native" or is_carried(arch, name)):
            move = RawMove(source, name, entry.dtype, entry.shape, entry.num_bytes)
            by_key.setdefault(FileKey(0, UNMAPPED), []).append(move)
    files: list[FilePlan] = []
    owners: dict[str, list[object]] = {}
    for key in sorted(by_key):
        for file in _cut_files(key.name, by_key[key]):
            files.append(file)
            owners[file.name] = [key.stage, key.kind, key.index]
    document = {
        **layout.as_dict(), "base_dtype": base_dtype, "files": owners,
        "source_fingerprint": source.fingerprint(), "trimtab": versions()["trimtab"],
    }
    small = companion_files(source)
    is_cast = base_dtype != "native"
    if not is_cast and (released := released_document(source)) is not None:
        small[RELEASED_NAME] = released
    small["config.json"] = as_json(config) if is_cast else source.read_file("config.json")
    small[LAYOUT_NAME] = as_json(document)
    return Plan(
        source, tuple(files), small, small[LAYOUT_NAME], "convert", inventory_hash(written)
    )


def write_plan(
    plan: Plan, output: Output, *, memory: int, workers: int = 4, part: tuple[int, int] = (1, 1),
    progress: Progress | None = None, keep_every: int = 2**28,
) -> Report:
    """Write the files of a plan that are not there yet.

    Args:
        plan: what to write.
        output: a new directory, or one that an earlier call of the same conversion left.
        memory: bytes that the process may use, what it uses already included.
        workers: threads that read.
        part: number and count of the hosts that share the work.
        progress: see `Progress`.
        keep_every: bytes after which a file being written survives a kill.

    Raises:
        CheckpointError: TT309 if the output holds something else, TT311 if the disk is too small,
            TT312 if it holds another conversion or the source has changed, TT301 and TT310 if a
            tensor cannot be read or holds bad numbers.
        ConfigError: TT102 if the memory is too small.
    """
    mine = plan.part(*part)
    if _is_complete(plan, output):
        return Report(len(mine), 0, sum(file.size for file in mine), 0.0, True)
    buffers = _memory_left(memory, workers)
    pipeline = Pipeline(buffers, workers, keep_every, plan.source.store.spread)
    todo = [file for file in mine if not _is_written(output, file)]
    kept = {file.name: output.kept(file) for file in todo}
    total = sum(file.size for file in mine)
    done = total - sum(file.size for file in todo)
    resumed = done + sum(kept.values())
    _require_space(output, total - resumed)
    begun = time.perf_counter()
    _begin(plan, output)
    with pipeline, output.lock(_part_name(part)):
        _remember_source(plan, output, part)
        for file in todo:

            def moved(num_bytes: int, name: str = file.name) -> None:
                nonlocal done
                done += num_bytes
                if progress is not None:
                    progress(name, done, total)

            output.write(file, pipeline, moved)
        _require_same_source(plan, output, part)
        finished = _finish(plan, output)
    seconds = time.perf_counter() - begun
    return Report(len(mine), total - resumed, resumed, seconds, finished)


def resident_bytes() -> int:
    """Memory that this process holds now, 0 where the system does not say."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def _memory_left(memory: int, workers: int) -> int:
    """Bytes for buffers beside what the process holds."""
    held, least = resident_bytes(), least_bytes(workers)
    if memory < held + least:
        rule = f"must be at least {format_bytes(held + least)} for {workers} workers"
        raise ConfigError("TT102", "--memory", rule, value=format_bytes(memory),
                          hint="allow more memory or use fewer --workers")
    return memory - held


def _cut_files(name: str, tensors: Sequence[PlannedTensor]) -> list[FilePlan]:
    return [
        plan_file(f"{name}{f'.{number}' if number else ''}.safetensors", group)
        for number, group in enumerate(split_by_bytes(tensors, LARGEST_FILE))
    ]


def _is_complete(plan: Plan, output: Output) -> bool:
    """Whether this very conversion is finished; refuses an output that holds anything else."""
    names = output.names()
    if is_begun_or_empty(names):
        return False
    manifest = output.read(MANIFEST_NAME) if MANIFEST_NAME in names else None
    if manifest is not None and json.loads(manifest)["extra"] == _extra(plan):
        output.close()
        return True
    raise CheckpointError("TT309", output.where, "already holds something",
                          hint="choose another directory or remove that one")


def _is_written(output: Output, file: FilePlan) -> bool:
    return output.read(record_name(file.name)) is not None and output.complete(file)


def _begin(plan: Plan, output: Output) -> None:
    """Mark the output, or check that what was begun there is this conversion."""
    document = plan.document
    begun = output.read(_DOCUMENT)
    if begun is None:
        if isinstance(output, LocalOutput):
            remove_unfinished(Path(output.where))
        names = [*(file.name for file in plan.files), *plan.small]
        marked = [*names, *(f"{name}.tmp" for name in names)]
        output.put(MARKER_NAME, "".join(f"{name}\n" for name in marked).encode())
        output.put(_DOCUMENT, document)
    elif begun != document:
        raise CheckpointError(
            "TT312", output.where, _difference(json.loads(begun), json.loads(document)),
            hint="remove the output directory to begin again",
        )


def _remember_source(plan: Plan, output: Output, part: tuple[int, int]) -> None:
    """Note the state of the source's files, or compare it with what was noted."""
    states = as_json({file: plan.source.state(file) for file in plan.source.files()})
    name = f"{WORK}/{_part_name(part)}.source.json"
    if (earlier := output.read(name)) is None:
        output.put(name, states)
    elif earlier != states:
        _raise_changed(plan, json.loads(earlier))


def _require_same_source(plan: Plan, output: Output, part: tuple[int, int]) -> None:
    earlier = output.read(f"{WORK}/{_part_name(part)}.source.json")
    if earlier is not None:
        _raise_changed(plan, json.loads(earlier))


def _raise_changed(plan: Plan, earlier: dict[str, str]) -> None:
    for file in plan.source.files():
        if earlier.get(file) != plan.source.state(file):
            raise CheckpointError(
                "TT312", f"{plan.source.where}/{file}", "has changed since the conversion began",
                hint="remove the output directory and convert the new source",
            )


def _difference(begun: dict[str, object], wanted: dict[str, object]) -> str:
    for key, value in wanted.items():
        if begun.get(key) != value and key != "files":
            return f"a conversion with {key} {begun.get(key)} was begun there, not {value}"
    return "a conversion into other files was begun there"


def _part_name(part: tuple[int, int]) -> str:
    return f"part-{part[0]}-of-{part[1]}"


def _require_space(output: Output, num_bytes: int) -> None:
    free = output.free()
    if free is not None and free < num_bytes + _RESERVE:
        rule = f"{format_bytes(num_bytes + _RESERVE)} are needed, {format_bytes(free)} are free"
        raise CheckpointError("TT311", output.where, rule, hint="free space or choose another disk")


def _finish(plan: Plan, output: Output) -> bool:
    """Write what makes the directory whole, if the files of all parts are there."""
    records: dict[str, FileRecord] = {}
    for file in plan.files:
        record = output.read(record_name(file.name))
        if record is None or output.size(file.name) != file.size:
            # Another part may have finished all, and removed the records, in the meantime.
            return output.size(MARKER_NAME) is None and output.size(MANIFEST_NAME) is not None
        records[file.name] = FileRecord(**json.loads(record))
    for name, data in plan.small.items():
        output.put(name, data)
        records[name] = FileRecord(len(data), hashlib.sha256(data).hexdigest())
    fingerprint = json.loads(plan.document)["source_fingerprint"]
    manifest = Manifest(
        "checkpoint", records, fingerprint, plan.inventory, versions(), _extra(plan)
    )
    output.put(MANIFEST_NAME, manifest_bytes(manifest))
    output.remove(MARKER_NAME)
    output.close()
    return True


def _extra(plan: Plan) -> dict[str, object]:
    """What the manifest says of how the directory was made."""
    return {"made_by": plan.made_by, "document": hashlib.sha256(plan.document).hexdigest()}


def as_json(value: object) -> bytes:
    """The text of a JSON file."""
    return (json.dumps(value, indent=1) + "\n").encode()

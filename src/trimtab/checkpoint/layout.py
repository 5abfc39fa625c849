"""Layouts: which tensors of a converted directory hold which parts of which parameters, and where.

Knows: degrees of parallelism, the cut into pipeline stages, owners of files, how a stored tensor
is cut. Does not know: torch, files, how bytes get there.

A rank of stage s reads `stage-s.shared`, the file of its expert group and that of its tensor
shard, each from beginning to end. Routed experts are divided by expert, over the expert groups
only; other matrices along their heads, FFN width or vocabulary, over the tensor shards only; the
rest is stored once. Experts of a layer are stacked in order, in the form they are released in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final, Literal

from trimtab.arch.maps import census, stored_of
from trimtab.arch.params import ParamSpec, inventory
from trimtab.arch.spec import ArchSpec, MLASpec, MoESpec
from trimtab.arch.stored import DTYPE_BYTES, StoredTensor, Transform
from trimtab.errors import CheckpointError

FileKind = Literal["shared", "tp", "ep", "outside", "layer", "unmapped"]
# What the map does not name (multi-token prediction layers) keeps its released name and bytes.
UNMAPPED: Final = "unmapped"
_TP_AXES = ("heads", "ffn", "vocab")
_TP_OWNERS = ("embedding", "kda", "mla", "dense_ffn", "shared_expert", "head")
_FIRST_STAGE = ("embedding", "vision", "projector")
# Transforms that keep the elements of the part as they are.
PLAIN = ("same", "reshape", "pad_tail")

LAYOUT_NAME = "layout.json"

# Dtype and shape that a stored tensor has in the files at hand.
Found = Callable[[StoredTensor], tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Degrees:
    """Over how many ranks experts (ep), layers (pp) and matrices (tp) are divided."""

    ep: int = 1
    pp: int = 1
    tp: int = 1


@dataclass(frozen=True, slots=True, order=True)
class FileKey:
    """The owner of a file: a pipeline stage (or layer), and its expert group or tensor shard."""

    stage: int
    kind: FileKind
    index: int = 0

    @property
    def name(self) -> str:
        """File name without ending."""
        if self.kind == "layer":
            return f"layer-{self.stage:03d}"
        if self.kind in ("outside", "unmapped"):
            return self.kind
        tail = self.kind if self.kind == "shared" else f"{self.kind}-{self.index:03d}"
        return f"stage-{self.stage:02d}.{tail}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the parameters of a model are divided among files.

    Args:
        degrees: all 1 for a logical layout.
        stages: first layer of each pipeline stage and the one behind its last.
        is_logical: whole tensors in a file per layer, for ranks of any degrees.
    """

    degrees: Degrees
    stages: tuple[tuple[int, int], ...]
    is_logical: bool = False

    def stage_of(self, param: ParamSpec) -> int:
        """The pipeline stage that a parameter belongs to."""
        if param.layer is None:
            return 0 if param.owner in _FIRST_STAGE else len(self.stages) - 1
        layer = param.layer
        return next(n for n, (low, high) in enumerate(self.stages) if low <= layer < high)

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "degrees": asdict(self.degrees), "stages": [list(stage) for stage in self.stages],
            "is_logical": self.is_logical,
        }


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of a converted file: the same box of each of a run of stored tensors, stacked.

    Args:
        key: the file's owner.
        name: name of the parameter, with the kind of tensor where a matrix has several
            (`.packed`, `.scale`), `.tail` for stored padding.
        param: the parameter.
        transform: which of the tensors that hold a part.
        dtype: safetensors dtype string.
        shape: as in the file.
        matrix: rows and columns of one stored tensor.
        rows: rows of it that are held.
        columns: columns of it that are held.
        parts: parts of the parameter that are held, counted along its leading axes.
        experts: experts that are held, None where the parameter has none.
    """

    key: FileKey
    name: str
    param: ParamSpec
    transform: Transform
    dtype: str
    shape: tuple[int, ...]
    matrix: tuple[int, int]
    rows: range
    columns: range
    parts: range
    experts: range | None

    @property
    def item(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def piece_bytes(self) -> int:
        """Bytes of one part."""
        return len(self.rows) * len(self.columns) * self.item

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return len(self.parts) * self.piece_bytes

    def stored(self, arch: ArchSpec) -> tuple[StoredTensor, ...]:
        """The stored tensors behind the parts, in order."""
        of_all = stored_of(arch, self.param, self.experts)
        mine = [tensor for tensor in of_all if tensor.transform == self.transform]
        return tuple(sorted(mine, key=lambda tensor: tensor.index))


def layout_from_dict(value: Mapping[str, Any], where: str) -> Layout:
    """The inverse of `Layout.as_dict`.

    Raises:
        CheckpointError: TT306 if a member is missing or of another kind.
    """
    try:
        stages = tuple((int(low), int(high)) for low, high in value["stages"])
        return Layout(Degrees(**value["degrees"]), stages, bool(value["is_logical"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("TT306", where, f"not a layout document: {error}") from error


def logical_layout(arch: ArchSpec) -> Layout:
    """The layout that no plan enters: whole tensors, a file per layer."""
    return Layout(Degrees(), ((0, arch.num_layers),), is_logical=True)


def rank_layout(
    arch: ArchSpec, degrees: Degrees, stages: Sequence[tuple[int, int]] | None = None
) -> Layout:
    """The layout for ranks of these degrees.

    Args:
        arch: the model.
        degrees: what it is divided by.
        stages: layers of each pipeline stage; None balances their bytes.

    Raises:
        CheckpointError: TT313 if the model cannot be divided so.
    """
    for layer in arch.layers:
        if isinstance(layer.ffn, MoESpec) and layer.ffn.num_experts % degrees.ep:
            raise _unfit("ep", degrees.ep, f"must divide {layer.ffn.num_experts} experts")
        if layer.mixer.num_heads % degrees.tp:
            raise _unfit("tp", degrees.tp, f"must divide {layer.mixer.num_heads} heads")
    if degrees.pp > arch.num_layers:
        raise _unfit("pp", degrees.pp, f"the model has {arch.num_layers} layers")
    found = tuple(stages) if stages is not None else balanced_stages(arch, degrees.pp)
    _check_stages(arch, found, degrees.pp)
    return Layout(degrees, found)


def balanced_stages(arch: ArchSpec, count: int) -> tuple[tuple[int, int], ...]:
    """Cut the layers into stages so that the largest has as few stored bytes as possible.

    Input table and vision count to the first stage, final norm and head to the last. Layers that
    share the selection of an indexer stay together.

    Raises:
        CheckpointError: TT313 if there are not enough places to cut.
    """
    before, after = 0, 0
    layer_bytes = [0] * arch.num_layers
    for param, tensor, number in census(arch):
        size = tensor.num_bytes * number
        if param.layer is not None:
            layer_bytes[param.layer] += size
        elif param.owner in _FIRST_STAGE:
            before += size
        else:
            after += size
    layer_bytes[0] += before
    layer_bytes[-1] += after
    sums = [0]
    for size in layer_bytes:
        sums.append(sums[-1] + size)
    borders = [n for n in range(1, arch.num_layers) if not _follows(arch, n)]
    # best[k][border]: the smallest largest stage when layers before `border` make k stages.
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for _ in range(count):
        row: dict[int, tuple[int, int]] = {}
        for end in (*borders, arch.num_layers):
            options = [
                (max(worst, sums[end] - sums[begin]), begin)
                for begin, (worst, _) in best[-1].items() if begin < end
            ]
            if options:
                row[end] = min(options)
        best.append(row)
    if arch.num_layers not in best[count]:
        raise _unfit("pp", count, f"the layers can be cut in {len(borders)} places only")
    cuts = [arch.num_layers]
    for row in reversed(best[1:]):
        cuts.append(row[cuts[-1]][1])
    return tuple(pairwise(reversed(cuts)))


def targets(arch: ArchSpec, layout: Layout, param: ParamSpec, found: Found) -> Iterator[Target]:
    """The tensors that hold one parameter.

    Args:
        arch: the model.
        layout: how it is divided.
        param: the parameter.
        found: dtype and shape of stored tensors in the source; the first expert stands for all.

    Raises:
        CheckpointError: TT313 if a cut goes through a block of a quantised matrix.
    """
    is_expert = param.owner == "routed_expert"
    of_first = stored_of(arch, param, range(1) if is_expert else None)
    first_part = of_first[0].index
    lead = param.shape[: len(first_part)]
    per_expert = prod(lead[1:])
    for stored in of_first:
        if stored.index != first_part:
            continue
        dtype, shape = found(stored)
        for key, held, cut in _owners(layout, param):
            parts, experts = range(1), None
            if is_expert:
                experts = held
                parts = range(held.start * per_expert, held.stop * per_expert)
            yield from _boxes(param, stored, dtype, shape, key, cut, lead, parts, experts)


def all_targets(arch: ArchSpec, layout: Layout, found: Found) -> Iterator[Target]:
    """Every tensor of a converted directory, in forward order."""
    for param in inventory(arch):
        yield from targets(arch, layout, param, found)


def _owners(
    layout: Layout, param: ParamSpec
) -> Iterator[tuple[FileKey, range, tuple[int, int, int] | None]]:
    """Owner, experts held (empty for others), and axis, number and count of a tensor shard."""
    experts = param.shape[0] if param.owner == "routed_expert" else 0
    if layout.is_logical:
        kind: FileKind = "outside" if param.layer is None else "layer"
        yield FileKey(param.layer or 0, kind), range(experts), None
        return
    stage, axis = layout.stage_of(param), _tp_axis(param)
    if experts:
        each = experts // layout.degrees.ep
        for group in range(layout.degrees.ep):
            yield FileKey(stage, "ep", group), range(group * each, (group + 1) * each), None
    elif axis is not None and layout.degrees.tp > 1:
        for shard in range(layout.degrees.tp):
            yield FileKey(stage, "tp", shard), range(0), (axis, shard, layout.degrees.tp)
    else:
        yield FileKey(stage, "shared"), range(0), None


def _tp_axis(param: ParamSpec) -> int | None:
    if param.owner not in _TP_OWNERS:
        return None
    return next((n for n, axis in enumerate(param.axes) if axis in _TP_AXES), None)


def _boxes(
    param: ParamSpec, stored: StoredTensor, dtype: str, shape: tuple[int, ...], key: FileKey,
    cut: tuple[int, int, int] | None, lead: tuple[int, ...], parts: range, experts: range | None,
) -> Iterator[Target]:
    part = param.shape[len(lead):]
    # Elements in another shape are elements in order; only the parameter's own can be cut.
    kept = part if stored.transform in PLAIN else shape
    rows, columns = (kept[0] if kept else 1), prod(kept[1:])
    ranges = [range(rows), range(columns)]
    if cut is not None:
        axis, number, count = cut
        ranges[axis] = _cut(param, stored, part, kept, axis, number, count)
        kept = tuple(len(ranges[n]) if n == axis else size for n, size in enumerate(kept))
    held = (len(experts), *lead[1:]) if experts is not None else lead
    kind = "" if stored.transform in PLAIN else "." + stored.transform.rpartition("_")[2]
    name, matrix = param.name + kind, (prod(shape[:1]), prod(shape[1:]))
    if stored.transform in PLAIN:
        matrix = (rows, columns)
    yield Target(key, name, param, stored.transform, dtype, (*held, *kept), matrix,
                 ranges[0], ranges[1], parts, experts)
    extra = prod(shape) - rows * columns if stored.transform == "pad_tail" else 0
    # Padding stands with the first shard, so that the released tensor can be put together again.
    if extra and (cut is None or cut[1] == 0):
        yield Target(key, name + ".tail", param, stored.transform, dtype, (extra,), matrix,
                     range(rows, rows + extra), range(1), parts, experts)


def _cut(
    param: ParamSpec, stored: StoredTensor, part: Sequence[int], kept: Sequence[int],
    axis: int, number: int, count: int,
) -> range:
    """Rows or columns of a stored tensor that belong to one shard of its parameter."""
    size = part[axis]
    begin, end = size * number // count, size * (number + 1) // count
    unit = stored.block[axis]
    if unit == 1 and kept[axis] != size:
        unit = size // kept[axis]
    if size % count or begin % unit or (end % unit and end != size):
        rule = f"{size} elements of axis {axis} do not divide into {count} shards"
        rule += f" of whole blocks of {unit}" if unit > 1 else ""
        raise _unfit(f"tp: {param.name}", count, rule)
    return range(begin // unit, -(-end // unit))


def _follows(arch: ArchSpec, layer: int) -> bool:
    """Whether a layer uses the selection that an earlier one has made."""
    mixer = arch.layers[layer].mixer
    return isinstance(mixer, MLASpec) and mixer.indexer is not None and mixer.indexer.share == "shared"


def _check_stages(arch: ArchSpec, stages: Sequence[tuple[int, int]], count: int) -> None:
    borders = [0, *(end for _, end in stages)]
    whole = [begin for begin, _ in stages] == borders[:-1] and borders[-1] == arch.num_layers
    if len(stages) != count or not whole or any(low >= high for low, high in stages):
        rule = f"stages must cut layers 0 to {arch.num_layers - 1} into {count} runs"
        raise _unfit("stages", list(stages), rule)
    for begin, _ in stages[1:]:
        if _follows(arch, begin):
            rule = f"layer {begin} uses the selection of the layer before and must be in its stage"
            raise _unfit("stages", list(stages), rule)


def _unfit(where: str, value: object, rule: str) -> CheckpointError:
    return CheckpointError("TT313", where, rule, value=value,
                           hint="see `trimtab inspect` for the sizes of the model")

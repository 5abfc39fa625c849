"""Dumps: logits, losses and hidden states of given tokens, written for comparison elsewhere.

Knows: the names and dtypes of a dump, how two dumps are compared. Does not know: other tools.

A dump holds `logits.N` [T, W], `loss.N` (float64 scalar, mean over the T-1 next-token labels,
placeholders of images left out), and `hidden.N.embed` (image features in place), `hidden.N.L`,
`hidden.N.final` [T, D] for sequence N and layer L.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor

from trimtab.arch.load import load_arch
from trimtab.checkpoint.codec import Progress, to_tensor
from trimtab.checkpoint.load import load_model
from trimtab.checkpoint.manifest import check_output, inventory_hash, read_manifest, write_artefact
from trimtab.checkpoint.source import Source, open_source
from trimtab.errors import CheckpointError, DataError
from trimtab.models.context import ForwardContext, ImageBatch
from trimtab.models.decoder import CausalLM
from trimtab.verdict import Verdict

DumpDtype = Literal["float32", "float64", "bfloat16"]
DUMP_FILE = "tensors.safetensors"
_IGNORED = -100
DEFAULT_LIMITS: dict[str, float] = {"float64": 1e-10, "float32": 5e-5, "bfloat16": 2e-2}

COMPUTE: dict[DumpDtype, torch.dtype] = {
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16,
}


def read_sequences(path: str | Path) -> list[list[int]]:
    """Token sequences from a file `{"sequences": [[ids...], ...]}`.

    Raises:
        DataError: TT107 if the file is missing, TT402 if it has no sequence, TT401 if it has
            another form.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise DataError("TT107", str(path), "no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError("TT401", str(path), f"not valid JSON: {error}") from error
    sequences = value.get("sequences") if isinstance(value, dict) else None
    if not isinstance(sequences, list) or not all(isinstance(s, list) for s in sequences):
        raise DataError("TT401", str(path), 'must be {"sequences": [[ids...], ...]}')
    if not sequences or not all(sequences):
        raise DataError("TT402", str(path), "needs at least one sequence, none of them empty")
    for n, ids in enumerate(sequences):
        wrong = next((i for i in ids if type(i) is not int), None)
        if wrong is not None:
            raise DataError("TT401", f"{path}: sequences[{n}]", "token ids must be integers",
                            value=wrong)
    return sequences


def check_token_ids(sequences: Sequence[Sequence[int]], vocab_size: int, where: str) -> None:
    """Raise TT403 at the first id outside the vocabulary."""
    for n, ids in enumerate(sequences):
        for t, token in enumerate(ids):
            if not 0 <= token < vocab_size:
                rule = f"token id must be at least 0 and below the vocabulary size {vocab_size}"
                raise DataError("TT403", f"{where}: sequences[{n}][{t}]", rule, value=token,
                                hint="check that the tokenizer belongs to this model")


def write_dump(
    model_path: str | Path,
    sequences: Sequence[Sequence[int]],
    dst: str | Path,
    dtype: DumpDtype = "float32",
    *,
    images: Sequence[ImageBatch | None] | None = None,
    where: str = "input",
    progress: Progress | None = None,
) -> int:
    """Run a checkpoint on token sequences, unpacked, and write all states.

    Args:
        model_path: the checkpoint.
        sequences: token ids.
        dst: new directory.
        dtype: compute dtype; float64 also keeps the weights in float64.
        images: of each sequence, None where it has none; see `verify.images`.
        where: name of the input in messages.
        progress: called while weights are loaded, with bytes done and in all.

    Returns:
        Number of tensors written.

    Raises:
        DataError: TT403 if a token id is out of range, before weights are loaded.
        CheckpointError: the checkpoint does not fit, or TT309 if `dst` holds something else.
    """
    check_output(dst)
    source = open_source(model_path)
    check_token_ids(sequences, load_arch(source.config(), source.where).vocab_size, where)
    model, arch = load_model(
        model_path, base_dtype="fp64" if dtype == "float64" else "bf16",
        compute_dtype=COMPUTE[dtype], progress=progress,
    )
    tensors: dict[str, Tensor] = {}
    for number, ids in enumerate(sequences):
        batch = None if images is None else images[number]
        tensors.update(run_sequence(model, ids, number, batch))
    extra = {"dtype": dtype, "sequences": [list(ids) for ids in sequences]}
    with write_artefact(
        dst, "dump", source_fingerprint=source.fingerprint(),
        inventory_hash=inventory_hash(arch), extra=extra,
    ) as out:
        out.write(DUMP_FILE, save(tensors, metadata={"format": "pt"}))
    return len(tensors)


@torch.no_grad()
def run_sequence(
    model: CausalLM, ids: Sequence[int], number: int, images: ImageBatch | None = None
) -> dict[str, Tensor]:
    """The dump tensors of one sequence, see the module's docstring."""
    found: dict[str, Tensor] = {}

    def observe(name: str, value: Tensor) -> None:
        found[f"hidden.{number}.{name}"] = value.detach().clone()

    tokens = torch.tensor(ids, dtype=torch.int64)
    context = ForwardContext.packed([len(ids)], observe=observe, images=images)
    logits = model.logits(model(tokens, context))
    found[f"logits.{number}"] = logits.clone()
    labels = tokens[1:].clone()
    if images is not None:
        labels[tokens[1:] == model.arch.image_token_id] = _IGNORED
    if bool((labels != _IGNORED).any()):
        loss = torch.nn.functional.cross_entropy(logits[:-1].double(), labels, ignore_index=_IGNORED)
        found[f"loss.{number}"] = loss
    return found


def compare_dumps(
    one: str | Path, two: str | Path, limit: float | None = None
) -> list[Verdict]:
    """Compare two dumps tensor by tensor.

    The measured number is max|a - b| / max|b|; a tensor that only one dump has fails.

    Args:
        one: dump directory.
        two: dump directory, the reference.
        limit: largest relative error; by default that of the coarser dtype of the two dumps.

    Returns:
        One verdict a tensor, in name order.
    """
    a, b = _open_dump(one), _open_dump(two)
    if limit is None:
        limit = max(DEFAULT_LIMITS[_dump_dtype(path)] for path in (one, two))
    return list(_compare(a, b, limit))


def _compare(a: Source, b: Source, limit: float) -> Iterator[Verdict]:
    for name in sorted({*a.entries(), *b.entries()}):
        if name not in a.entries() or name not in b.entries():
            owner = a.where if name in a.entries() else b.where
            yield Verdict(name, float("inf"), limit, False, f"only in {owner}")
            continue
        x, y = _read(a, name), _read(b, name)
        if x.shape != y.shape:
            where = f"shapes {list(x.shape)} and {list(y.shape)}"
            yield Verdict(name, float("inf"), limit, False, where)
            continue
        error = float((x - y).abs().max()) if x.numel() else 0.0
        scale = float(y.abs().max()) if y.numel() else 1.0
        relative = error / scale if scale > 0 else error
        yield Verdict.at_most(name, relative, limit, f"max abs {error:.3g}")


def _open_dump(path: str | Path) -> Source:
    source = open_source(Path(path) / DUMP_FILE)
    read_manifest(path)
    return source


def _dump_dtype(path: str | Path) -> str:
    manifest = read_manifest(path)
    dtype = "float32" if manifest is None else str(manifest.extra.get("dtype"))
    if dtype not in DEFAULT_LIMITS:
        raise CheckpointError("TT306", str(path), "manifest names no known dtype", value=dtype)
    return dtype


def _read(source: Source, name: str) -> Tensor:
    entry = source.entries()[name]
    return to_tensor(source.read(name), entry.dtype, entry.shape).double()

"""quantization_config of a config.json -> the stored form of its matrices.

Knows: the declarations of block-scaled FP8 and INT4 in groups, and by name those that Trimtab
cannot read: NVFP4, MXFP4 outside its own family, other INT4 and W4A8. Does not know: any family.
"""

from __future__ import annotations

from trimtab.arch.quantization import Quantization, StoredPart
from trimtab.arch.readers.fields import Fields

_KEY = "quantization_config"
_NVFP4 = (
    StoredPart(".weight", "U8", 1, 2),
    StoredPart(".weight_scale", "F8_E4M3", 1, 16, "scale"),
    StoredPart(".weight_scale_2", "F32", kind="scalar"),
    StoredPart(".input_scale", "F32", kind="scalar"),
)
_FP8_NOISE = ("activation_scheme", "dequantize")


def read_quantization(owner: Fields) -> Quantization | None:
    """The stored form that `quantization_config` declares, None where matrices are plain.

    Args:
        owner: the object that may have the key.

    Raises:
        ArchError: a declaration that is not known (TT202), or a field of FP8 that is not (TT203).
    """
    if not owner.present(_KEY):
        return None
    fields = owner.section(_KEY)
    if fields.present("quant_algo"):
        return _modelopt(fields)
    method = fields.word("quant_method")
    if method == "fp8":
        return _block_fp8(fields)
    if method == "compressed-tensors":
        return _compressed(fields)
    if method in ("w4afp8", "w4a8", "w4a8_awq"):
        return Quantization("W4A8", _packed_int4(128), _keeps(fields))
    if method == "mxfp4":
        parts = (StoredPart(".weight_packed", "U8", 1, 2), _scale(".weight_scale", "U8", 32))
        return Quantization("MXFP4", parts, _keeps(fields))
    raise fields.fail("quant_method", "is not a stored form that Trimtab knows")


def _block_fp8(fields: Fields) -> Quantization:
    fields.expect("fmt", "e4m3", "the other FP8 format has too few bits for weights")
    if not fields.present("weight_block_size"):
        raise fields.fail("weight_block_size", "must be given: FP8 is read with block scales only")
    block = fields.integers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise fields.fail("weight_block_size", "must be two positive whole numbers")
    power_of_two = False
    if fields.present("scale_fmt"):
        power_of_two = fields.choice("scale_fmt", ("ue8m0", "float")) == "ue8m0"
    keeps = _keeps(fields)
    fields.skip("quant_method")
    fields.finish(_FP8_NOISE)
    rows, columns = block
    parts = (
        StoredPart(".weight", "F8_E4M3"),
        StoredPart(".weight_scale_inv", "F32", rows, columns, "scale"),
    )
    return Quantization("FP8", parts, keeps, readable=True, power_of_two_scales=power_of_two)


def _modelopt(fields: Fields) -> Quantization:
    algorithm = fields.word("quant_algo")
    if algorithm in ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"):
        return Quantization("NVFP4", _NVFP4, _keeps(fields))
    if algorithm.startswith(("W4A8", "W4A16")):
        return Quantization(algorithm.partition("_")[0], _packed_int4(128), _keeps(fields))
    raise fields.fail("quant_algo", "is not a stored form that Trimtab knows")


def _compressed(fields: Fields) -> Quantization:
    """A compressed-tensors declaration, by the first of its groups."""
    groups = fields.section("config_groups")
    group = groups.section(groups.keys()[0])
    single = len(groups.keys()) == 1
    weights = group.section("weights")
    bits, kind = weights.integer("num_bits"), weights.choice("type", ("int", "float"))
    size = weights.optional_integer("group_size", minimum=-1) or 0
    keeps = _keeps(fields)
    if (bits, kind, size) == (4, "float", 16):
        return Quantization("NVFP4", _NVFP4, keeps)
    if (bits, kind) == (4, "int"):
        eight = False
        if group.present("input_activations"):
            eight = group.section("input_activations").integer("num_bits") == 8
        if eight or not single or size < 2 or not _reads_int4(fields, group, weights):
            return Quantization("W4A8" if eight else "INT4", _packed_int4(max(size, 1)), keeps)
        parts = (*_packed_int4(size), StoredPart(".weight_shape", "I32", kind="shape"))
        return Quantization("INT4", parts, keeps, readable=True)
    rule = f"{bits}-bit {kind} weights are not a stored form that Trimtab knows"
    raise weights.fail("num_bits", rule)


def _reads_int4(fields: Fields, group: Fields, weights: Fields) -> bool:
    """Whether INT4 weights lie as Trimtab reads them: packed in order, symmetric, weights only."""
    symmetric = weights.boolean("symmetric", default=True)
    in_order = not weights.present("actorder")
    plain = not group.present("input_activations") and not group.present("output_activations")
    layout = fields.word("format") if fields.present("format") else None
    return symmetric and in_order and plain and layout == "pack-quantized"


def _packed_int4(group: int) -> tuple[StoredPart, ...]:
    return (StoredPart(".weight_packed", "I32", 1, 8), _scale(".weight_scale", "BF16", group))


def _scale(suffix: str, dtype: str, group: int) -> StoredPart:
    return StoredPart(suffix, dtype, 1, group, "scale")


def _keeps(fields: Fields) -> tuple[str, ...]:
    for key in ("modules_to_not_convert", "ignore", "exclude_modules"):
        if fields.present(key):
            return fields.words(key)
    return ()

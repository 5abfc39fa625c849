"""A naive float64 MoonViT-V2 tower with its projector, one image at a time.

Takes the released `vision_config` as a dict, tensors under their released names
(`vision_tower.*`, `mm_projector.*`), and loops over patches, heads and grid places. Follows
K3 sheet 1.6 (sizes), 2.0 (eps), 4 (equations) and 8.2 (eps of the tower's norms).

An image is `(patches, (t, h, w))`: patches [t*h*w, 3, P, P] float64, normalised, row-major within
a frame and frame after frame; h and w count patches and are multiples of the merge kernel.

Letters: N patches of one image, D tower width, K head width, D' text width.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .naive_ops import F64, rms_norm

Config = Mapping[str, Any]
Grid = tuple[int, int, int]
Image = tuple[Tensor, Grid]

NORM_EPS = 2.0**-23  # torch's RMSNorm without eps takes that of float32, K3 sheet 8.2
ROTARY_BASE = 10000.0
TIME_BASE = 10000.0
FORM = {
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}


def image_features(config: Config, tensors: Mapping[str, Tensor], image: Image) -> Tensor:
    """Return what replaces the placeholder rows of one image, [h/2 * w/2, D'] (K3 sheet 4)."""
    return project(config, tensors, merge(config, tower(config, tensors, image), image[1]))


def splice(
    config: Config,
    tensors: Mapping[str, Tensor],
    ids: Sequence[int],
    rows_TD: Tensor,
    images: Sequence[Image],
) -> Tensor:
    """Replace the rows of `media_placeholder_token_id` by image features, in order, unscaled."""
    vision = config["vision_config"]
    features = [row for image in images for row in image_features(vision, tensors, image)]
    places = [t for t, token in enumerate(ids) if token == config["media_placeholder_token_id"]]
    if len(places) != len(features):
        raise ValueError(f"{len(places)} placeholders, but {len(features)} rows of image features")
    rows = list(rows_TD)
    for place, feature in zip(places, features, strict=True):
        rows[place] = feature
    return torch.stack(rows)


def tower(config: Config, tensors: Mapping[str, Tensor], image: Image) -> Tensor:
    """Return the normed output of the last block, [N, D] (K3 sheet 4 steps 1 to 4)."""
    check_form(config)
    patches, (frames, height, width) = image
    if len(patches) != frames * height * width:
        raise ValueError(f"{len(patches)} patches do not make a {frames} x {height} x {width} grid")
    x = embed_patches(config, tensors, patches)
    x = x + positions(config, tensors, image[1])
    for index in range(config["vt_num_hidden_layers"]):
        x = block(config, tensors, index, x, image[1])
    return rms_norm(x, weight(tensors, "vision_tower.encoder.final_layernorm"), NORM_EPS)


def weight(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a weight as float64."""
    return tensors[f"{name}.weight"].to(F64)


def check_form(config: Config) -> None:
    """Refuse a tower of a form that the sheet does not describe."""
    for field, value in FORM.items():
        if config[field] != value:
            raise ValueError(f"{field} ({config[field]}): the sheet describes {value} only")
    for field in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        if config[field]:
            raise ValueError(f"{field}: the sheet describes towers without biases only")


def embed_patches(config: Config, tensors: Mapping[str, Tensor], patches: Tensor) -> Tensor:
    """Multiply each patch, flattened in (channel, y, x) order, by the kernel; [N, D] (step 1)."""
    kernel = weight(tensors, "vision_tower.patch_embed.proj")
    side = config["patch_size"]
    rows = []
    for patch in patches:
        total = torch.zeros(kernel.shape[0], dtype=F64)
        for channel in range(3):
            for y in range(side):
                total = total + kernel[:, channel, y, :] @ patch[channel, y, :]
        rows.append(total)
    return torch.stack(rows)


def positions(config: Config, tensors: Mapping[str, Tensor], grid: Grid) -> Tensor:
    """Return the learned (row, column) embedding, plus that of the frame if t > 1 (step 2)."""
    frames, height, width = grid
    if frames > config["init_pos_emb_time"]:
        raise ValueError(f"{frames} frames, but the time table has {config['init_pos_emb_time']}")
    stored = weight(tensors, "vision_tower.patch_embed.pos_emb")
    plane = stored if stored.shape[:2] == (height, width) else resize(stored, height, width)
    rows = []
    for frame in range(frames):
        time = time_embedding(frame, stored.shape[2]) if frames > 1 else 0.0
        rows += [plane[y, x] + time for y in range(height) for x in range(width)]
    return torch.stack(rows)


def resize(stored_YXD: Tensor, height: int, width: int) -> Tensor:
    """Interpolate bilinearly with half-pixel centres and no antialias, [height, width, D].

    Target place i lies at (i + 1/2) * in / out - 1/2 of the source, clamped to its first and last
    row or column.
    """
    rows = []
    for y in range(height):
        above, below, down = neighbours(y, stored_YXD.shape[0], height)
        row = []
        for x in range(width):
            left, right, across = neighbours(x, stored_YXD.shape[1], width)
            top = (1 - across) * stored_YXD[above, left] + across * stored_YXD[above, right]
            bottom = (1 - across) * stored_YXD[below, left] + across * stored_YXD[below, right]
            row.append((1 - down) * top + down * bottom)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def neighbours(place: int, size_in: int, size_out: int) -> tuple[int, int, float]:
    """Return the two source places around a target place, and the weight of the second."""
    source = (place + 0.5) * size_in / size_out - 0.5
    source = min(max(source, 0.0), size_in - 1.0)
    first = math.floor(source)
    return first, min(first + 1, size_in - 1), source - first


def time_embedding(frame: int, width: int) -> Tensor:
    """Return [sin(f w_i) for all i, then cos(f w_i)], w_i = 10000^(-i / (D/2)) (step 2)."""
    half = width // 2
    angles = [frame * TIME_BASE ** (-i / half) for i in range(half)]
    values = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(values, dtype=F64)


def block(
    config: Config, tensors: Mapping[str, Tensor], index: int, x_ND: Tensor, grid: Grid
) -> Tensor:
    """x += Wo attn(norm0(x)); x += fc1 gelu_tanh(fc0 norm1(x)) (step 3)."""
    at = f"vision_tower.encoder.blocks.{index}."
    normed = rms_norm(x_ND, weight(tensors, f"{at}norm0"), NORM_EPS)
    qkv = normed @ weight(tensors, f"{at}wqkv").T
    x = x_ND + attend_to_all(config, qkv, grid) @ weight(tensors, f"{at}wo").T
    normed = rms_norm(x, weight(tensors, f"{at}norm1"), NORM_EPS)
    inner = gelu_tanh(normed @ weight(tensors, f"{at}mlp.fc0").T)
    return x + inner @ weight(tensors, f"{at}mlp.fc1").T


def attend_to_all(config: Config, qkv: Tensor, grid: Grid) -> Tensor:
    """Attend from every patch of the image to every other, head by head; [N, H*K] (step 3).

    The columns of `qkv` are all heads of q, then of k, then of v.
    """
    heads, inner = config["vt_num_attention_heads"], config["qkv_hidden_size"]
    dim = inner // heads
    outputs = []
    for head in range(heads):
        q, k, v = (
            qkv[:, part * inner + head * dim : part * inner + (head + 1) * dim] for part in range(3)
        )
        q, k = rotate(q, grid), rotate(k, grid)
        rows = []
        for n in range(len(q)):
            p = torch.softmax((k @ q[n]) * dim**-0.5, dim=0)
            rows.append(p @ v)
        outputs.append(torch.stack(rows))
    return torch.cat(outputs, dim=1)


def rotate(x_NK: Tensor, grid: Grid) -> Tensor:
    """Turn each adjacent pair of one head by the angle of its patch (step 3).

    Pair p = (channels 2p, 2p + 1) is the complex number a + ib. Even pairs p = 2i turn by the
    column, odd ones p = 2i + 1 by the row, both times 10000^(-4i/K). All frames turn alike.
    """
    frames, height, width = grid
    places = [(y, x) for _ in range(frames) for y in range(height) for x in range(width)]
    dim = x_NK.shape[1]
    channels = []
    for pair in range(dim // 2):
        frequency = ROTARY_BASE ** (-4 * (pair // 2) / dim)
        angles = [(x if pair % 2 == 0 else y) * frequency for y, x in places]
        cos = torch.tensor([math.cos(a) for a in angles], dtype=F64)
        sin = torch.tensor([math.sin(a) for a in angles], dtype=F64)
        a, b = x_NK[:, 2 * pair], x_NK[:, 2 * pair + 1]
        channels += [a * cos - b * sin, a * sin + b * cos]
    return torch.stack(channels, dim=1)


def merge(config: Config, x_ND: Tensor, grid: Grid) -> Tensor:
    """Join each window of patches, averaged over the frames, to one row (step 5).

    The order inside a window is row-major: (row 0, column 0), (row 0, column 1), (row 1, ...).
    """
    frames, height, width = grid
    down, across = config["merge_kernel_size"]
    if height % down or width % across:
        raise ValueError(f"a {height} x {width} grid does not divide into {down} x {across}")
    rows = []
    for top in range(0, height, down):
        for left in range(0, width, across):
            window = []
            for y in range(top, top + down):
                for x in range(left, left + across):
                    same = [x_ND[(frame * height + y) * width + x] for frame in range(frames)]
                    window.append(torch.stack(same).sum(dim=0) / frames)
            rows.append(torch.cat(window))
    return torch.stack(rows)


def project(config: Config, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """RMS(W2 gelu(W0 x)) with the exact GELU (step 6)."""
    hidden = gelu_exact(x @ weight(tensors, "mm_projector.proj.0").T)
    out = hidden @ weight(tensors, "mm_projector.proj.2").T
    return rms_norm(out, weight(tensors, "mm_projector.post_norm"), config["projector_ln_eps"])


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_exact(x: Tensor) -> Tensor:
    """x/2 (1 + erf(x / sqrt 2))."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

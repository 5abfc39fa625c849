"""The naive tower against its own invariants and against torch's operators."""

import pytest
import torch

from tests.oracles import naive_k3, naive_vision, random_k3
from tests.support.compare import relative_error

EXACT = 1e-12  # the same float64 sums in another order
GRID = (1, 4, 6)


def toy(**vision) -> tuple[dict, dict[str, torch.Tensor]]:
    config = random_k3.tiny_config(vision=vision or True, experts=4, top_k=2)
    return config, random_k3.random_checkpoint(config, seed=3, dtype=torch.float32)


def features(config: dict, tensors: dict, image: naive_vision.Image) -> torch.Tensor:
    return naive_vision.image_features(config["vision_config"], tensors, image)


@pytest.mark.parametrize("size", [(5, 7), (4, 6), (6, 4), (2, 2), (12, 3), (1, 1), (10, 14)])
def test_the_interpolation_is_torchs_bilinear_one(size: tuple[int, int]) -> None:
    stored = torch.randn(5, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    planes = stored.permute(2, 0, 1)[None]
    want = torch.nn.functional.interpolate(
        planes, size=size, mode="bilinear", align_corners=False, antialias=False
    )[0].permute(1, 2, 0)
    assert (naive_vision.resize(stored, *size) - want).abs().max() < EXACT


def test_a_grid_of_the_stored_size_is_used_as_it_is() -> None:
    config, tensors = toy(merge_kernel_size=[1, 1])
    stored = tensors["vision_tower.patch_embed.pos_emb.weight"]
    found = naive_vision.positions(config["vision_config"], tensors, (1, 5, 7))
    assert torch.equal(found, stored.reshape(35, -1).double())
    assert torch.equal(naive_vision.resize(stored.double(), 5, 7), stored.double())


def test_the_patch_embedding_is_a_convolution() -> None:
    config, tensors = toy()
    patches, _ = random_k3.random_image((1, 2, 2), seed=0)
    kernel = tensors["vision_tower.patch_embed.proj.weight"].double()
    want = torch.nn.functional.conv2d(patches, kernel, stride=14)[:, :, 0, 0]
    found = naive_vision.embed_patches(config["vision_config"], tensors, patches)
    assert relative_error(found, want) < EXACT


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_each_gelu_is_the_one_it_says(approximate: str) -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    found = {"tanh": naive_vision.gelu_tanh, "none": naive_vision.gelu_exact}[approximate](x)
    want = torch.nn.functional.gelu(x, approximate=approximate)
    assert (found - want).abs().max() < EXACT


def test_the_time_table_starts_with_sines() -> None:
    assert naive_vision.time_embedding(0, 6).tolist() == [0, 0, 0, 1, 1, 1]
    table = naive_vision.time_embedding(3, 4)
    angles = torch.tensor([3.0, 3.0 * 10000**-0.5], dtype=torch.float64)
    assert torch.allclose(table, torch.cat([angles.sin(), angles.cos()]), rtol=0, atol=EXACT)


def test_scores_depend_on_offsets_and_tell_rows_from_columns() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 12, dtype=torch.float64, generator=generator)
    places = 20  # a 4 x 5 grid holding the same vector everywhere
    rotated_q = naive_vision.rotate(q.expand(places, 12), (1, 4, 5))
    rotated_k = naive_vision.rotate(k.expand(places, 12), (1, 4, 5))
    scores = (rotated_q @ rotated_k.T).reshape(4, 5, 4, 5)
    assert (scores[0, 0, 1, 2] - scores[2, 2, 3, 4]).abs() < EXACT
    assert (scores[0, 0, 1, 0] - scores[0, 0, 0, 1]).abs() > 1e-3
    assert torch.equal(rotated_q[0], q)
    # By hand: pair 0 turns by the column, pair 1 by the row, pair 2 by 10000^(-4/12) columns.
    turn = torch.polar(torch.ones(3, dtype=torch.float64), torch.tensor(
        [2.0, 3.0, 2.0 * 10000 ** (-1 / 3)], dtype=torch.float64
    ))
    want = torch.view_as_real(torch.view_as_complex(q[:6].reshape(3, 2)) * turn).flatten()
    assert torch.allclose(rotated_q[3 * 5 + 2, :6], want, rtol=0, atol=EXACT)


def test_attention_is_full_attention_over_the_image() -> None:
    config, _ = toy()
    qkv = torch.randn(24, 72, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = naive_vision.attend_to_all(config["vision_config"], qkv, GRID)
    q, k, v = qkv.reshape(24, 3, 2, 12).permute(1, 2, 0, 3)
    q, k = (torch.stack([naive_vision.rotate(head, GRID) for head in x]) for x in (q, k))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v).permute(1, 0, 2)
    assert relative_error(found, want.reshape(24, 24)) < EXACT


def test_windows_are_merged_in_row_major_order() -> None:
    config, _ = toy()
    x = torch.arange(24, dtype=torch.float64)[:, None].expand(24, 20)
    merged = naive_vision.merge(config["vision_config"], x, GRID)[:, ::20]
    assert merged.tolist()[:4] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], [12, 13, 18, 19]]
    frames = naive_vision.merge(config["vision_config"], torch.cat([x, x + 4]), (2, 4, 6))
    assert torch.equal(frames, naive_vision.merge(config["vision_config"], x, GRID) + 2)


@pytest.mark.parametrize(
    ("merge", "grid", "count"),
    [([2, 2], (1, 2, 2), 1), ([1, 1], (1, 1, 1), 1), ([1, 1], (1, 3, 5), 15)],
)
def test_the_smallest_images_have_features(merge: list[int], grid: tuple, count: int) -> None:
    config, tensors = toy(merge_kernel_size=merge)
    found = features(config, tensors, random_k3.random_image(grid, seed=0))
    assert found.shape == (count, config["text_config"]["hidden_size"])
    assert found.isfinite().all()
    assert found.abs().max() > 0.1


def test_permuting_two_images_permutes_their_features() -> None:
    config, tensors = toy()
    ids, (one, two) = random_k3.image_prompt(config, [GRID, (1, 6, 2)], seed=0)
    media = config["media_placeholder_token_id"]
    rows = torch.zeros(len(ids), config["text_config"]["hidden_size"], dtype=torch.float64)
    there = naive_vision.splice(config, tensors, ids, rows, [one, two])
    back = naive_vision.splice(config, tensors, ids, rows, [two, one])
    places = [t for t, token in enumerate(ids) if token == media]
    assert len(places) == 9
    assert torch.equal(back[places], torch.cat([there[places[6:]], there[places[:6]]]))
    assert torch.equal(there[places[:6]], features(config, tensors, one))
    text = [t for t in range(len(ids)) if t not in places]
    assert not there[text].any()


def test_frames_share_an_image_but_tell_their_order() -> None:
    config, tensors = toy()
    (first, grid), (second, _) = (random_k3.random_image((1, 2, 4), seed=s) for s in (0, 1))
    still = features(config, tensors, (first, grid))
    video = features(config, tensors, (torch.cat([first, second]), (2, 2, 4)))
    swapped = features(config, tensors, (torch.cat([second, first]), (2, 2, 4)))
    assert video.shape == still.shape
    assert relative_error(video, still) > 0.01
    assert relative_error(video, swapped) > 0.01


def test_a_turned_image_is_another_image() -> None:
    """Rows and columns are told apart: the transposed grid has other features."""
    config, tensors = toy(init_pos_emb_height=4, init_pos_emb_width=4)
    patches, grid = random_k3.random_image((1, 4, 4), seed=0)
    turned = patches.reshape(4, 4, 3, 14, 14).transpose(0, 1).reshape(16, 3, 14, 14)
    there = features(config, tensors, (patches, grid))
    back = features(config, tensors, (turned, grid)).reshape(2, 2, -1).transpose(0, 1)
    assert relative_error(back.reshape(4, -1), there) > 0.01


def test_counts_that_do_not_fit_are_refused() -> None:
    config, tensors = toy()
    ids, images = random_k3.image_prompt(config, [GRID], seed=0)
    with pytest.raises(ValueError, match="7 placeholders, but 6 rows"):
        naive_k3.logits(config, tensors, [*ids, config["media_placeholder_token_id"]], images)
    patches, _ = images[0]
    with pytest.raises(ValueError, match="do not make"):
        naive_k3.logits(config, tensors, ids, [(patches[:-1], GRID)])


def test_an_image_changes_what_follows_it_only() -> None:
    config, tensors = toy()
    ids, [image] = random_k3.image_prompt(config, [(1, 2, 4)], seed=0)
    other = random_k3.random_image((1, 2, 4), seed=99)
    start = ids.index(config["media_placeholder_token_id"])
    before = naive_k3.logits(config, tensors, ids, [image])
    after = naive_k3.logits(config, tensors, ids, [other])
    assert torch.equal(before[:start], after[:start])
    assert (before[start:] - after[start:]).abs().amax(dim=-1).min() > 1e-3


def test_placeholders_are_never_labels() -> None:
    config, tensors = toy()
    ids, images = random_k3.image_prompt(config, [(1, 2, 4)], seed=0)
    media = config["media_placeholder_token_id"]
    labels = naive_k3.text_labels(config, ids)
    assert len(labels) == len(ids) - 1 - ids.count(media)
    assert media not in {label for _, label in labels}
    log_p = torch.log_softmax(naive_k3.logits(config, tensors, ids, images), dim=-1)
    want = -torch.stack([log_p[t, label] for t, label in labels]).mean()
    assert relative_error(naive_k3.loss(config, tensors, ids, images), want) < EXACT


def test_every_image_tensor_reaches_the_loss() -> None:
    config, tensors = toy()
    leaves = naive_k3.float64_leaves(tensors)
    ids, images = random_k3.image_prompt(config, [GRID], seed=0)
    naive_k3.loss(config, leaves, ids, images).backward()
    names = [n for n in leaves if n.startswith(("vision_tower.", "mm_projector."))]
    assert len(names) == 2 + 6 * 3 + 1 + 3
    assert 2 + 6 * 27 + 1 == 165
    for name in names:
        assert leaves[name].grad.abs().max() > 1e-7, name


def test_the_gradient_of_the_grid_is_its_slope() -> None:
    config, tensors = toy()
    leaves = naive_k3.float64_leaves(tensors)
    ids, images = random_k3.image_prompt(config, [(1, 2, 4)], seed=0)
    naive_k3.loss(config, leaves, ids, images).backward()
    name = "vision_tower.patch_embed.pos_emb.weight"
    step = torch.zeros_like(leaves[name])
    step[1, 2] = 1e-5
    with torch.no_grad():
        up, down = (
            naive_k3.loss(config, {**leaves, name: leaves[name] + sign * step}, ids, images)
            for sign in (1, -1)
        )
    slope = leaves[name].grad[1, 2].sum().item()
    assert (up - down).item() / 2e-5 == pytest.approx(slope, rel=1e-5)

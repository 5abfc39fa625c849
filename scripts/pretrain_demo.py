"""Pretrain the base model of the demo and write it in the released format.

    python scripts/demo_data.py corpus --downloads DIR --out CORPUS
    python scripts/pretrain_demo.py train --corpus CORPUS --out TEXT --steps 1500
    python scripts/pretrain_demo.py train --corpus CORPUS --out IMAGES --steps 600 \
        --start TEXT --digits 0.5 --lr 2e-3 --sparse-from 0
    python scripts/pretrain_demo.py train --corpus CORPUS --out LAST --steps 260 \
        --start IMAGES --digits 0.4 --lr 1.2e-3 --final-lr 0.6 --sparse-from 0
    python scripts/pretrain_demo.py export --work LAST --out src/trimtab/demo/base

The first run sees text and short chats that ask to copy a phrase, or to write figures as words;
the second continues it with pictures of handwritten digits to read. The last one ends at a high
learning rate on purpose: a base that was cooled down to the last bit can only lose by tuning, one
that was not still improves. What is trained how:

- All weights train in float32 with AdamW on the next-token loss of texts and of the answers.
- Routed experts are rounded to MXFP4 before every forward pass and the gradient at the rounded
  weights updates the unrounded ones (straight through), so the exported experts are the trained
  ones.
- The router's selection bias moves against each expert's excess load, without a loss.
- The indexer trains on KL(attention || softmax(index scores)) over detached inputs, first beside
  dense attention; the last part of the run attends to the selected keys only.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.config.recipe import ImageSection
from trimtab.data.encode import Encoded, encode_record
from trimtab.data.images import read_rule
from trimtab.data.packing import IGNORED, build_pack
from trimtab.data.prompt import ImageProcessor
from trimtab.data.records import read_records
from trimtab.data.tokenizer import load_tokenizer
from trimtab.models.build import build_model
from trimtab.models.context import ForwardContext, ImageBatch
from trimtab.models.decoder import CausalLM
from trimtab.models.generate import generate
from trimtab.models.mla import MLA
from trimtab.models.moe import MoE
from trimtab.ops.attention.indexer import index_scores
from trimtab.ops.cross_entropy import cross_entropy
from trimtab.ops.mxfp4 import round_to_grid
from trimtab.ops.norm import layer_norm
from trimtab.train.batch import image_batch

PRESET = "k3.1-tiny"
BASE = Path(__file__).resolve().parent.parent / "src" / "trimtab" / "demo" / "base"
SEED = 17
MAX_LENGTH = 1024
BIAS_RATE = 2e-3
INDEXER_TOKENS = 512
HELD_OUT_RECORDS = 40
EVERY = 100


@dataclass(frozen=True)
class Plan:
    """Constants of the run."""

    steps: int
    tokens_per_step: int = 4096
    lr: float = 4e-3
    warmup: int = 80
    weight_decay: float = 0.05
    sparse_from: float = 0.75
    final: float = 0.03

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then cosine to `final` times the peak."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done)))


class Corpus:
    """Records of all sources as tokens; each source is shuffled anew whenever it is used up.

    Args:
        folder: what `demo_data.py corpus` wrote.
        digits: share of tokens from pictures of digits; the rest follows the sizes of the others.
    """

    def __init__(self, folder: Path, digits: float) -> None:
        arch = load_arch(preset_config(PRESET), PRESET)
        assert arch.vision is not None and arch.image_token_id is not None
        rule = read_rule(None, arch.vision, PRESET)
        self.processor = ImageProcessor(rule, arch.image_token_id, ImageSection())
        self.tokenizer = load_tokenizer(BASE)
        paths = [p for p in sorted(folder.glob("*.jsonl")) if digits or p.stem != "digits"]
        self.sources = {p.stem: self.encode(p) for p in paths}
        sizes = {n: float(sum(map(len, found))) for n, found in self.sources.items()}
        text = sum(size for name, size in sizes.items() if name != "digits")
        self.shares = {n: (1 - digits) * size / text for n, size in sizes.items() if n != "digits"}
        if digits:
            self.shares["digits"] = digits
        self.held = {n: self.sources[n][:100] for n in ("copying", "numbers", "digits") if n in self.sources}
        for name in self.held:
            self.sources[name] = self.sources[name][100:]
        self._random = np.random.default_rng(SEED)
        self._order: dict[str, list[int]] = {name: [] for name in self.sources}
        self._fed = dict.fromkeys(self.sources, 0.0)

    def encode(self, path: Path) -> list[Encoded]:
        """All records of a file, cut to the longest sequence."""
        return [
            encode_record(record, self.tokenizer, self.processor).truncated(MAX_LENGTH)
            for record in read_records(path)
        ]

    def next_record(self) -> Encoded:
        """From the source that is furthest behind its share."""
        total = sum(self._fed.values()) + 1
        name = max(self.shares, key=lambda n: self.shares[n] * total - self._fed[n])
        if not self._order[name]:
            self._order[name] = self._random.permutation(len(self.sources[name])).tolist()
        record = self.sources[name][self._order[name].pop()]
        self._fed[name] += len(record)
        return record

    def next_batch(self, size: int) -> Batch:
        """About `size` tokens."""
        records = [self.next_record()]
        while sum(map(len, records)) < size:
            records.append(self.next_record())
        return to_batch(records)


@dataclass(frozen=True)
class Batch:
    """A pack of whole records: flat ids, the label of each token or IGNORED, lengths, images."""

    ids: Tensor
    labels: Tensor
    lengths: list[int]
    images: ImageBatch | None


def to_batch(records: list[Encoded]) -> Batch:
    """Records end to end."""
    pack = build_pack(0, records, [""] * len(records), sum(map(len, records)), 0)
    images = image_batch(pack.images, pack.image_rows.tolist())
    ids, labels = torch.from_numpy(pack.input_ids), torch.from_numpy(pack.labels)
    return Batch(ids, labels, pack.lengths, images)


def initialise(model: CausalLM) -> None:
    """Random weights: matrices by fan-in, outputs small, gains one, decays spread over scales."""
    generator = torch.Generator().manual_seed(SEED)
    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 2)[-2:]
        if "norm" in leaf[0] and leaf[-1] == "weight":
            p.data.fill_(1.0)
        elif name.endswith(("bias", "A_log", "res_proj.weight")) and not name.endswith("dt_bias"):
            p.data.zero_()
        elif name.endswith("dt_bias"):
            low, high = math.log(1e-3), math.log(1e-1)
            dt = torch.exp(torch.empty_like(p).uniform_(low, high, generator=generator))
            p.data.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif "conv1d" in name:
            p.data.uniform_(-0.5, 0.5, generator=generator)
        elif name.endswith("pos_emb.weight"):
            p.data.normal_(std=0.02, generator=generator)
        elif name.endswith("patch_embed.proj.weight"):
            p.data.normal_(std=1 / math.sqrt(p[0].numel()), generator=generator)
        elif name == "embed.weight":
            p.data.normal_(std=0.5, generator=generator)
        else:
            small = leaf[0] in ("o_proj", "down_proj", "latent_up", "wo", "fc1")
            std = (0.4 if small else 1.0) / math.sqrt(p.shape[-1])
            p.data.normal_(std=std, generator=generator)


def split_parameters(model: CausalLM) -> list[dict[str, object]]:
    """AdamW groups: weight decay on matrices only; nothing for what has its own rule."""
    decay, plain = [], []
    for name, p in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            continue
        (decay if p.ndim > 1 and "conv1d" not in name else plain).append(p)
    return [{"params": decay}, {"params": plain, "weight_decay": 0.0}]


class StraightThrough:
    """Experts on the MXFP4 grid while gradients are taken, unrounded while they are updated."""

    def __init__(self, model: CausalLM) -> None:
        self.experts = [p for n, p in model.named_parameters() if ".experts." in n]
        self.masters = [p.detach().clone() for p in self.experts]

    def to_grid(self) -> None:
        """Show the model the rounded weights."""
        for p, master in zip(self.experts, self.masters, strict=True):
            master.copy_(p.data)
            p.data.copy_(round_to_grid(master))

    def to_masters(self) -> None:
        """Give the optimizer the unrounded ones."""
        for p, master in zip(self.experts, self.masters, strict=True):
            p.data.copy_(master)


class LoadBalancer:
    """Moves each router's selection bias against the excess load of an expert."""

    def __init__(self, model: CausalLM) -> None:
        self.biases = {
            layer.index: layer.mlp.router.e_score_correction_bias
            for layer in model.layers
            if isinstance(layer.mlp, MoE)
        }
        self.worst = 0.0

    def __call__(self, layer: int, counts: Tensor) -> None:
        mean = counts.float().mean()
        self.worst = max(self.worst, float(counts.max() / mean))
        bias = self.biases[layer].data
        bias -= BIAS_RATE * torch.sign(counts - mean)
        bias -= bias.mean()


class IndexerTeacher:
    """Keeps the inputs of every MLA layer and compares its indexer with its attention."""

    def __init__(self, model: CausalLM) -> None:
        self.inputs: dict[int, Tensor] = {}
        self.layers = [layer.self_attn for layer in model.layers if isinstance(layer.self_attn, MLA)]
        for mla in self.layers:
            mla.register_forward_pre_hook(self._keep)

    def _keep(self, mla: MLA, args: tuple[Tensor, ForwardContext]) -> None:
        self.inputs[mla.layer] = args[0].detach()

    def loss(self, ctx: ForwardContext) -> Tensor:
        """Mean KL over the queries of the longest sequences of the pack."""
        begin = int(np.argmax(ctx.lengths))
        start = sum(ctx.lengths[:begin])
        rows = slice(start, start + min(ctx.lengths[begin], INDEXER_TOKENS))
        losses = [self._layer_loss(mla, self.inputs[mla.layer][rows]) for mla in self.layers]
        return torch.stack(losses).mean()

    def _layer_loss(self, mla: MLA, x: Tensor) -> Tensor:
        spec, ctx = mla.spec, ForwardContext.packed([len(x)])
        with torch.no_grad():
            latent_q = mla.q_a_layernorm(mla.q_a_proj(x, ctx))
            q = mla.q_b_proj(latent_q, ctx).unflatten(-1, (spec.num_heads, spec.qk_head_dim))
            sizes = (spec.kv_lora_rank, spec.qk_rope_head_dim)
            latent, k_rope = mla.kv_a_proj_with_mqa(x, ctx).split(sizes, -1)
            kv = mla.kv_b_proj(mla.kv_a_layernorm(latent), ctx).unflatten(-1, (spec.num_heads, -1))
            nope = spec.qk_nope_head_dim
            scores = torch.einsum("thk,shk->hts", q[..., :nope], kv[..., :nope])
            scores = (scores + torch.einsum("thk,sk->hts", q[..., nope:], k_rope)) * spec.softmax_scale
            future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            target = torch.softmax(scores.masked_fill(future, float("-inf")), -1).mean(0)
        index = mla.indexer
        assert index is not None
        iq = index.wq_b(latent_q, ctx).unflatten(-1, (index.spec.heads, index.spec.dim))
        ik = layer_norm(
            index.wk(x, ctx), index.k_norm.weight, index.k_norm.bias, index.spec.norm_eps
        )
        w = index.weights_proj(x, ctx) * index.spec.heads**-0.5
        logits = index_scores(iq * index.spec.dim**-0.5, ik, w).masked_fill(future, float("-inf"))
        log_p = torch.log_softmax(logits, -1).masked_fill(future, 0.0)
        entropy = torch.special.entr(target).sum(-1)
        return (-(target * log_p).sum(-1) - entropy).mean()


def set_sparse(model: CausalLM, sparse: bool, top_k: int) -> None:
    """Attend to the selected keys, or to all."""
    for layer in model.layers:
        if isinstance(layer.self_attn, MLA) and layer.self_attn.indexer is not None:
            indexer = layer.self_attn.indexer
            indexer.spec = replace(indexer.spec, top_k=top_k if sparse else 10**9)


def batch_loss(model: CausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, int]:
    """Sum of the token losses in nats, and their number."""
    hidden = model(batch.ids, ctx)
    rows = (batch.labels != IGNORED).nonzero().squeeze(1)
    return cross_entropy(hidden[rows], model.head_weight, batch.labels[rows]), len(rows)


@torch.no_grad()
def bits_per_byte(model: CausalLM, records: list[Encoded]) -> float:
    """Of held-out plain text."""
    batch = to_batch(records)
    loss, _ = batch_loss(model, batch, ForwardContext.packed(batch.lengths))
    return float(loss) / math.log(2) / sum(r.num_bytes for r in records)


@torch.no_grad()
def exact_share(model: CausalLM, records: list[Encoded], stop_ids: tuple[int, ...]) -> float:
    """Share of chats answered exactly."""
    cuts = [int(np.argmax(r.loss_mask)) for r in records]
    prompts = [r.token_ids[:cut].tolist() for r, cut in zip(records, cuts, strict=True)]
    answers = [
        [int(t) for t in r.token_ids[cut:] if t not in stop_ids]
        for r, cut in zip(records, cuts, strict=True)
    ]
    starts = np.cumsum([0, *map(len, prompts)]).tolist()
    rows = [b + row for b, r in zip(starts, records, strict=False) for row in r.image_rows]
    images = image_batch([image for r in records for image in r.images], rows)
    found = generate(model, prompts, 40, stop_ids, images=images)
    return sum(a == b for a, b in zip(found, answers, strict=True)) / len(answers)


@dataclass(frozen=True)
class Examiner:
    """Scores on what is held out, every `EVERY` steps."""

    text: list[Encoded]
    chats: dict[str, list[Encoded]]
    stop_ids: tuple[int, ...]

    def __call__(self, model: CausalLM) -> dict[str, float]:
        scores = {"held_bits_per_byte": bits_per_byte(model, self.text)}
        for name, records in self.chats.items():
            scores[f"{name}_exact"] = exact_share(model, records, self.stop_ids)
        return scores


def start_weights(model: CausalLM, start: Path | None) -> None:
    """Random weights, or those of an earlier run where it has them."""
    initialise(model)
    if start is not None:
        found = load_file(start / "weights.safetensors")
        model.load_state_dict({**model.state_dict(), **found})
    model.requires_grad_(True)


def train(corpus_dir: Path, out: Path, plan: Plan, start: Path | None, digits: float) -> None:
    """The run; writes OUT/weights.safetensors every 100 steps and OUT/log.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    arch = load_arch(preset_config(PRESET), PRESET)
    model = build_model(arch, base_dtype="fp32", vision=digits > 0).to_empty(device="cpu")
    start_weights(model, start)
    corpus = Corpus(corpus_dir, digits)
    held_text = corpus.encode(BASE.parent / "data" / "general_heldout.jsonl")[:HELD_OUT_RECORDS]
    examine = Examiner(held_text, corpus.held, tuple(corpus.tokenizer.stop_ids))
    groups = split_parameters(model)
    optimizer = torch.optim.AdamW(
        groups, lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay, fused=True
    )
    experts, balancer, teacher = StraightThrough(model), LoadBalancer(model), IndexerTeacher(model)
    trained = [p for g in groups for p in g["params"]]
    top_k = next(
        layer.mixer.indexer.top_k for layer in arch.layers
        if getattr(layer.mixer, "indexer", None)
    )  # fmt: skip
    begin = time.perf_counter()
    for step in range(plan.steps):
        set_sparse(model, step >= plan.sparse_from * plan.steps, top_k)
        for group in optimizer.param_groups:
            group["lr"] = plan.lr_at(step)
        batch = corpus.next_batch(plan.tokens_per_step)
        balancer.worst = 0.0
        experts.to_grid()
        ctx = ForwardContext.packed(batch.lengths, stats=balancer, images=batch.images)
        total, count = batch_loss(model, batch, ctx)
        kl = teacher.loss(ctx)
        optimizer.zero_grad(set_to_none=True)
        (total / count + kl).backward()
        experts.to_masters()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        row = {
            "step": step, "nll_bits": total.item() / count / math.log(2), "kl": kl.item(),
            "grad_norm": norm.item(), "load": balancer.worst,
            "seconds": time.perf_counter() - begin,
        }  # fmt: skip
        if step % EVERY == 0 or step == plan.steps - 1:
            experts.to_grid()
            row.update(examine(model))
            save(model, out)
            experts.to_masters()
        if step % 20 == 0 or step == plan.steps - 1:
            with (out / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")


def save(model: CausalLM, out: Path) -> None:
    """Write the weights under a temporary name first."""
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    save_file(weights, out / "weights.part")
    (out / "weights.part").replace(out / "weights.safetensors")


def export(work: Path, out: Path) -> None:
    """Write WORK's weights in the released format into `out`, beside the tokenizer there."""
    from trimtab.checkpoint.save import save_checkpoint, tensors_from_model

    config = preset_config(PRESET)
    arch = load_arch(config, PRESET)
    model = build_model(arch, base_dtype="fp32").to_empty(device="cpu")
    model.load_state_dict(load_file(work / "weights.safetensors"))
    keep = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    extra = {name: (out / name).read_bytes() for name in keep}
    # A checkpoint is written to a new directory only; the finished one takes the place of the old.
    staging = out.with_name(f"{out.name}.new")
    save_checkpoint(staging, arch, config, tensors_from_model(model, arch), extra)
    shutil.rmtree(out)
    staging.replace(out)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train")
    one.add_argument("--corpus", type=Path, required=True)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--steps", type=int, default=1500)
    one.add_argument("--lr", type=float, default=4e-3)
    one.add_argument("--final-lr", type=float, default=0.03, help="share of --lr at the end")
    one.add_argument("--start", type=Path, help="folder of an earlier run to continue")
    one.add_argument("--digits", type=float, default=0.0, help="share of pictures of digits")
    one.add_argument("--sparse-from", type=float, default=0.75)
    one.add_argument("--threads", type=int, default=2)
    two = commands.add_parser("export")
    two.add_argument("--work", type=Path, required=True)
    two.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "train":
        torch.set_num_threads(args.threads)
        plan = Plan(args.steps, lr=args.lr, sparse_from=args.sparse_from, final=args.final_lr)
        train(args.corpus, args.out, plan, args.start, args.digits)
    else:
        export(args.work, args.out)


if __name__ == "__main__":
    main()

"""Pretrain the base model of the demo and write it in the released format.

    python scripts/demo_data.py corpus --downloads DIR --out CORPUS
    python scripts/pretrain_demo.py train --corpus CORPUS --out WORK
    python scripts/pretrain_demo.py export --work WORK --out src/trimtab/demo/base

What is trained how:

- All weights train in float32 with AdamW on the next-token loss of plain text and of short chats
  that ask to copy a phrase.
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
from tokenizers import Tokenizer
from torch import Tensor

from trimtab.arch.load import load_arch
from trimtab.arch.presets import preset_config
from trimtab.models.build import build_model
from trimtab.models.context import ForwardContext
from trimtab.models.decoder import CausalLM
from trimtab.models.generate import generate
from trimtab.models.mla import MLA
from trimtab.models.moe import MoE
from trimtab.ops.attention.indexer import index_scores
from trimtab.ops.cross_entropy import cross_entropy
from trimtab.ops.mxfp4 import round_to_grid
from trimtab.ops.norm import layer_norm

PRESET = "k3.1-tiny"
BASE = Path(__file__).resolve().parent.parent / "src" / "trimtab" / "demo" / "base"
SEED = 17
MAX_LENGTH = 1024
BIAS_RATE = 2e-3
INDEXER_TOKENS = 512
HELD_OUT_RECORDS = 40


@dataclass(frozen=True)
class Plan:
    """Constants of the run."""

    steps: int
    tokens_per_step: int = 4096
    lr: float = 4e-3
    warmup: int = 80
    weight_decay: float = 0.05
    sparse_from: float = 0.75

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then cosine to 3 % of the peak."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))


def read_corpus(folder: Path) -> list[np.ndarray]:
    """All records as token arrays, in an order that depends on the seed only."""
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    special = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("user", "assistant")}
    end, eos = tokenizer.token_to_id("<|end_of_msg|>"), tokenizer.token_to_id("<|eos|>")
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "text" in record:
                ids = [*record["text"].encode(), eos]
            else:
                ids = []
                for message in record["messages"]:
                    ids += [special[message["role"]], *message["content"].encode(), end]
            records.append(np.array(ids[:MAX_LENGTH], dtype=np.int64))
    order = np.random.default_rng(SEED).permutation(len(records))
    return [records[i] for i in order]


def packs(records: list[np.ndarray], size: int) -> list[list[np.ndarray]]:
    """Consecutive records, about `size` tokens together; repeated in a new order when used up."""
    out: list[list[np.ndarray]] = [[]]
    total = 0
    for record in records:
        if total + len(record) > size and out[-1]:
            out.append([])
            total = 0
        out[-1].append(record)
        total += len(record)
    return out


def initialise(model: CausalLM) -> None:
    """Random weights: matrices by fan-in, outputs small, gains one, decays spread over scales."""
    generator = torch.Generator().manual_seed(SEED)
    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 2)[-2:]
        if name.endswith(("norm.weight", "layernorm.weight")):
            p.data.fill_(1.0)
        elif name.endswith(("bias", "A_log", "res_proj.weight")) and not name.endswith("dt_bias"):
            p.data.zero_()
        elif name.endswith("dt_bias"):
            low, high = math.log(1e-3), math.log(1e-1)
            dt = torch.exp(torch.empty_like(p).uniform_(low, high, generator=generator))
            p.data.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif "conv1d" in name:
            p.data.uniform_(-0.5, 0.5, generator=generator)
        elif name == "embed.weight":
            p.data.normal_(std=0.5, generator=generator)
        else:
            small = leaf[0] in ("o_proj", "down_proj", "latent_up")
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


def to_batch(pack: list[np.ndarray]) -> tuple[Tensor, Tensor, list[int]]:
    """Flat ids, rows that have a next token, lengths."""
    ids = torch.from_numpy(np.concatenate(pack))
    lengths = [len(r) for r in pack]
    last = torch.cumsum(torch.tensor(lengths), 0) - 1
    keep = torch.ones(len(ids), dtype=torch.bool)
    keep[last] = False
    return ids, keep, lengths


@torch.no_grad()
def bits_per_byte(model: CausalLM, records: list[np.ndarray]) -> float:
    """Of held-out plain text; every token of the demo's tokenizer but the end is a byte."""
    ids, keep, lengths = to_batch(records)
    hidden = model(ids, ForwardContext.packed(lengths))
    rows = keep.nonzero().squeeze(1)
    loss = cross_entropy(hidden[rows], model.head_weight, ids[rows + 1])
    return float(loss) / math.log(2) / (len(ids) - len(lengths))


@torch.no_grad()
def copy_score(model: CausalLM, records: list[np.ndarray]) -> float:
    """Share of copying chats answered exactly."""
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    assistant, end = tokenizer.token_to_id("<|assistant|>"), tokenizer.token_to_id("<|end_of_msg|>")
    prompts, answers = [], []
    for record in records:
        cut = record.tolist().index(assistant) + 1
        prompts.append(record[:cut].tolist())
        answers.append(record[cut:-1].tolist())
    found = generate(model, prompts, 40, [end])
    return sum(a == b for a, b in zip(found, answers, strict=True)) / len(answers)


def train(corpus: Path, out: Path, steps: int, threads: int) -> None:
    """The run; writes WORK/weights.safetensors every 100 steps and WORK/log.jsonl."""
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    out.mkdir(parents=True, exist_ok=True)
    arch = load_arch(preset_config(PRESET), PRESET)
    model = build_model(arch, base_dtype="fp32").to_empty(device="cpu")
    initialise(model)
    model.requires_grad_(True)
    plan = Plan(steps)
    records = read_corpus(corpus)
    is_chat = [r for r in records if r[0] == 261]
    copies = is_chat[:100]
    held = {id(r) for r in copies}
    batches = packs([r for r in records if id(r) not in held], plan.tokens_per_step)
    text = [
        np.array([*json.loads(line)["text"].encode()][:MAX_LENGTH], dtype=np.int64)
        for line in (BASE.parent / "data" / "general_heldout.jsonl").read_text().splitlines()
    ][:HELD_OUT_RECORDS]
    groups = split_parameters(model)
    optimizer = torch.optim.AdamW(
        groups, lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay, fused=True
    )
    experts, balancer, teacher = StraightThrough(model), LoadBalancer(model), IndexerTeacher(model)
    trained = [p for g in groups for p in g["params"]]
    top_k = next(
        layer.mixer.indexer.top_k
        for layer in arch.layers
        if getattr(layer.mixer, "indexer", None)
    )
    log = (out / "log.jsonl").open("a")
    begin = time.perf_counter()
    set_sparse(model, False, top_k)
    for step in range(steps):
        if step == int(plan.sparse_from * steps):
            set_sparse(model, True, top_k)
        for group in optimizer.param_groups:
            group["lr"] = plan.lr_at(step)
        ids, keep, lengths = to_batch(batches[step % len(batches)])
        balancer.worst = 0.0
        experts.to_grid()
        ctx = ForwardContext.packed(lengths, stats=balancer)
        hidden = model(ids, ctx)
        rows = keep.nonzero().squeeze(1)
        nll = cross_entropy(hidden[rows], model.head_weight, ids[rows + 1]) / len(rows)
        kl = teacher.loss(ctx)
        optimizer.zero_grad(set_to_none=True)
        (nll + kl).backward()
        experts.to_masters()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            row = {
                "step": step, "nll_bits": nll.item() / math.log(2), "kl": kl.item(),
                "grad_norm": norm.item(), "load": balancer.worst,
                "seconds": time.perf_counter() - begin,
            }
            if step % 100 == 0 or step == steps - 1:
                experts.to_grid()
                row["held_bits_per_byte"] = bits_per_byte(model, text)
                row["copy_exact"] = copy_score(model, copies)
                weights = {n: p.detach().clone() for n, p in model.named_parameters()}
                save_file(weights, out / "weights.safetensors.part")
                (out / "weights.safetensors.part").replace(out / "weights.safetensors")
                experts.to_masters()
            log.write(json.dumps(row) + "\n")
            log.flush()


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
    one.add_argument("--steps", type=int, default=1900)
    one.add_argument("--threads", type=int, default=2)
    two = commands.add_parser("export")
    two.add_argument("--work", type=Path, required=True)
    two.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "train":
        train(args.corpus, args.out, args.steps, args.threads)
    else:
        export(args.work, args.out)


if __name__ == "__main__":
    main()

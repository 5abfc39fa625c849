"""Run transformers' KimiLinearForCausalLM on a released-format checkpoint, in its own process.

    python hf_kimi_linear.py CHECKPOINT_DIR IDS_JSON OUT.safetensors [--dtype float64] [--grads]

IDS_JSON holds a list of token-id lists; each is run alone. OUT receives, for sequence N:
`logits.N` [T, W], `loss.N`, `hidden.N.embed`, `hidden.N.{layer}`, `hidden.N.final`; with --grads
also `grad.NAME`, the gradient of the sum of the losses, under every released tensor name.

float64 follows hybrid sheet 6.1: the modelling module casts to float32 in many places, so its
`torch` is replaced by a proxy that answers float64. A process of its own, because the absence of
`fla` has to be arranged before transformers is imported and the patches are global.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

for _absent in ("fla", "causal_conv1d", "kernels"):
    sys.modules[_absent] = None  # type: ignore[assignment]

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers.models.kimi_linear import modeling_kimi_linear as modeling  # noqa: E402


class _Float64Torch:
    """The torch module, except that float32 means float64."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def mean_float64_by_float32() -> None:
    """Make every float32 cast of the modelling module a float64 cast (for good)."""
    modeling.torch = _Float64Torch()
    torch.Tensor.float = torch.Tensor.double


def load(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Load the checkpoint, refusing missing, unexpected and mismatched tensors."""
    model, info = modeling.KimiLinearForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise ValueError(f"{path}: transformers did not load it cleanly: {problems}")
    model.set_experts_implementation("eager")
    wrong = [n for n, t in model.state_dict().items() if t.dtype != dtype]
    if wrong:
        raise ValueError(f"{path}: not {dtype} after loading: {wrong}")
    return model.eval()


def watch_hidden(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a dict that every forward pass refills with the hidden states by place."""
    seen: dict[str, torch.Tensor] = {}
    places = {"embed": model.model.embed_tokens, "final": model.model.norm}
    places.update({str(i): layer for i, layer in enumerate(model.model.layers)})
    for place, module in places.items():
        module.register_forward_hook(
            lambda _module, _args, out, place=place: seen.__setitem__(place, out[0].detach())
        )
    return seen


def run_sequences(model: torch.nn.Module, sequences: list[list[int]], grads: bool) -> dict:
    """Run each sequence alone; with `grads`, add up the gradients of the losses."""
    hidden, out = watch_hidden(model), {}
    for n, ids in enumerate(sequences):
        tokens = torch.tensor([ids])
        with torch.set_grad_enabled(grads):
            logits = model(input_ids=tokens, use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
        if grads:
            loss.backward()
        out[f"logits.{n}"], out[f"loss.{n}"] = logits.detach(), loss.detach()
        out.update({f"hidden.{n}.{place}": x for place, x in hidden.items()})
    return out


def released_gradients(model: torch.nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """Return the gradient for every tensor name of the checkpoint (hybrid sheet 3.8).

    The selection bias is a buffer and has none. A parameter without a gradient counts as zero.
    """
    parameters = dict(model.named_parameters())
    out = {}
    for name in _tensor_names(path):
        if name.endswith("e_score_correction_bias"):
            continue
        memory, part = _in_memory(name)
        parameter = parameters[memory]
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        out[f"grad.{name}"] = _part_of(grad, part)
    return out


def _tensor_names(path: Path) -> list[str]:
    names: list[str] = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names.extend(tensors.keys())
    return names


def _in_memory(name: str) -> tuple[str, tuple[str, int] | None]:
    """Return the name of the parameter in memory, and which part of it the tensor is."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    name = re.sub(
        r"self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", name
    )
    if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(w[123])\.weight", name):
        fused = "down_proj" if match[3] == "w2" else "gate_up_proj"
        return f"{match[1]}.{fused}", (match[3], int(match[2]))
    if match := re.fullmatch(r"(.*)\.([qkv])_conv1d\.weight", name):
        return f"{match[1]}.conv1d.weight", ("conv", "qkv".index(match[2]))
    return name, None


def _part_of(grad: torch.Tensor, part: tuple[str, int] | None) -> torch.Tensor:
    """Cut the released tensor out of a fused gradient: gate rows first, convs in order q, k, v."""
    if part is None:
        return grad.contiguous()
    kind, index = part
    if kind == "conv":
        return grad.chunk(3)[index].contiguous()
    if kind == "w2":
        return grad[index].contiguous()
    return grad[index].chunk(2)[0 if kind == "w1" else 1].contiguous()


def main() -> None:
    """Read the arguments, run, write."""
    parser = argparse.ArgumentParser(description="kimi_linear through transformers on the CPU")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--grads", action="store_true")
    args = parser.parse_args()
    if args.dtype == "float64":
        mean_float64_by_float32()
    model = load(args.checkpoint, getattr(torch, args.dtype))
    out = run_sequences(model, json.loads(args.ids.read_text()), args.grads)
    if args.grads:
        out.update(released_gradients(model, args.checkpoint))
    save_file({name: tensor.clone() for name, tensor in out.items()}, args.out)


if __name__ == "__main__":
    main()

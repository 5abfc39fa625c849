"""Run a transformers model on a released-format checkpoint, in a process of its own.

    python hf_model.py CHECKPOINT_DIR IDS_JSON OUT.safetensors [--dtype float64] [--grads]
                       [--select FORCED.safetensors] [--inputs INPUTS.safetensors]

IDS_JSON holds a list of token-id lists; each is run alone. OUT receives, for sequence N:
`logits.N` [T, W], `loss.N` (over labels that are no placeholder), `hidden.N.embed`, `hidden.N.{layer}`, `hidden.N.final`, and
`selection.N.{layer}` [T, S], what each indexer returned; with --grads also `grad.NAME`, the
gradient of the sum of the losses, under every released tensor name.

--select replaces what the indexers return by the tensors of that file, named as in OUT. --inputs
gives further arguments of the forward pass, such as `pixel_values.0` for sequence 0.

float64 follows hybrid sheet 6.1: the modelling module casts to float32 in many places, so its
`torch` is replaced by a proxy that answers float64. That happens after the model is built: rotary
frequencies are float32 constants, and only their angles are taken in float64. A process of its
own, because the absence of `fla` has to be arranged before transformers is imported and the
patches are global.
"""

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

for _absent in ("fla", "causal_conv1d", "kernels"):
    sys.modules[_absent] = None  # type: ignore[assignment]

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

# model_type -> class of transformers.models.MODEL_TYPE.modeling_MODEL_TYPE
CLASSES = {
    "kimi_linear": "KimiLinearForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
}


class _Float64Torch:
    """The torch module, except that float32 means float64."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def mean_float64_by_float32(model: torch.nn.Module) -> None:
    """Make every float32 cast of the model's modelling modules a float64 cast (for good)."""
    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("transformers.models."):
            sys.modules[name].torch = _Float64Torch()  # type: ignore[attr-defined]
    torch.Tensor.float = torch.Tensor.double


def load(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Load the checkpoint, refusing missing, unexpected and mismatched tensors."""
    model_type = json.loads((path / "config.json").read_text())["model_type"]
    modeling = importlib.import_module(
        f"transformers.models.{model_type}.modeling_{model_type}"
    )
    model, info = getattr(modeling, CLASSES[model_type]).from_pretrained(
        path, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise ValueError(f"{path}: transformers did not load it cleanly: {problems}")
    model.set_experts_implementation("eager")
    if dtype is torch.float64:
        model.double()
        mean_float64_by_float32(model)
    wrong = [n for n, t in model.state_dict().items() if t.dtype != dtype]
    if wrong:
        raise ValueError(f"{path}: not {dtype} after loading: {wrong}")
    return model.eval()


def decoder(model: torch.nn.Module) -> torch.nn.Module:
    """The module that owns `embed_tokens`, `layers` and `norm` of the text model."""
    return getattr(model.model, "language_model", model.model)


def watch(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a dict that every forward pass refills: hidden states and selections by place."""
    seen: dict[str, torch.Tensor] = {}
    text = decoder(model)
    places = {"hidden.embed": text.embed_tokens, "hidden.final": text.norm}
    for i, layer in enumerate(text.layers):
        places[f"hidden.{i}"] = layer
        indexer = getattr(getattr(layer, "self_attn", None), "indexer", None)
        if indexer is not None:
            places[f"selection.{i}"] = indexer
    for place, module in places.items():

        def keep(_module: Any, _args: Any, out: Any, place: str = place) -> None:
            first = out[0] if isinstance(out, tuple) else out
            seen[place] = first[0].detach()  # of the one sequence in the batch

        module.register_forward_hook(keep)
    return seen


class Forced:
    """Replaces what indexers return by given selections; `sequence` says which are due."""

    def __init__(self, model: torch.nn.Module, selections: dict[str, torch.Tensor]) -> None:
        self.selections, self.sequence = selections, 0
        for i, layer in enumerate(decoder(model).layers):
            indexer = getattr(getattr(layer, "self_attn", None), "indexer", None)
            if indexer is not None:
                indexer.register_forward_hook(
                    lambda _module, _args, out, i=i: self._replace(out, i)
                )

    def _replace(self, out: torch.Tensor, layer: int) -> torch.Tensor:
        forced = self.selections.get(f"selection.{self.sequence}.{layer}")
        return out if forced is None else forced.to(out.dtype).unsqueeze(0)


def run_sequences(
    model: torch.nn.Module,
    sequences: list[list[int]],
    grads: bool,
    selections: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Run each sequence alone; with `grads`, add up the gradients of the losses."""
    forced = Forced(model, selections)
    seen, out = watch(model), {}
    for n, ids in enumerate(sequences):
        tokens, forced.sequence = torch.tensor([ids]), n
        more = {
            name.removesuffix(f".{n}"): value
            for name, value in inputs.items()
            if name.endswith(f".{n}")
        }
        with torch.set_grad_enabled(grads):
            logits = model(input_ids=tokens, use_cache=False, **more).logits[0]
            labels = tokens[0, 1:].clone()
            labels[labels == getattr(model.config, "image_token_id", -1)] = -100
            loss = torch.nn.functional.cross_entropy(logits[:-1], labels)
        if grads:
            loss.backward()
        out[f"logits.{n}"], out[f"loss.{n}"] = logits.detach(), loss.detach()
        for place, value in seen.items():
            kind, _, leaf = place.partition(".")
            out[f"{kind}.{n}.{leaf}"] = value
    return out


def released_gradients(model: torch.nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """Return the gradient for every tensor name of the checkpoint (hybrid sheet 3.8).

    The selection bias is a buffer and has none, and neither has a tower that no text reaches. Any other
    parameter without a gradient counts as zero.
    """
    parameters = dict(model.named_parameters())
    out = {}
    for name in _tensor_names(path):
        if name.endswith("e_score_correction_bias") or name.startswith(_CARRIED):
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


_CARRIED = ("vision_tower.", "mm_projector.")
_EXPERT_PARTS = {
    "w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", None),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
}
Part = tuple[str, int, int | None]


def _in_memory(name: str) -> tuple[str, Part | None]:
    """Return the name of the parameter in memory, and which part of it the tensor is."""
    name = re.sub(r"^language_model\.(model)", r"\1.language_model", name)
    name = name.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp.")
    name = re.sub(r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2", name)
    name = re.sub(
        r"self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", name
    )
    if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
        fused, half = _EXPERT_PARTS[match[3]]
        return f"{match[1]}.{fused}", ("expert", int(match[2]), half)
    if match := re.fullmatch(r"(.*)\.([qkv])_conv1d\.weight", name):
        return f"{match[1]}.conv1d.weight", ("conv", "qkv".index(match[2]), None)
    return name, None


def _part_of(grad: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Cut the released tensor out of a fused gradient: gate rows first, convs in order q, k, v."""
    if part is None:
        return grad.contiguous()
    kind, index, half = part
    if kind == "conv":
        return grad.chunk(3)[index].contiguous()
    expert = grad[index]
    return (expert if half is None else expert.chunk(2)[half]).contiguous()


def main() -> None:
    """Read the arguments, run, write."""
    parser = argparse.ArgumentParser(description="a model through transformers on the CPU")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--grads", action="store_true")
    parser.add_argument("--select", type=Path)
    parser.add_argument("--inputs", type=Path)
    args = parser.parse_args()
    model = load(args.checkpoint, getattr(torch, args.dtype))
    selections = {} if args.select is None else load_file(args.select)
    inputs = {} if args.inputs is None else load_file(args.inputs)
    sequences = json.loads(args.ids.read_text())
    out = run_sequences(model, sequences, args.grads, selections, inputs)
    if args.grads:
        out.update(released_gradients(model, args.checkpoint))
    save_file({name: tensor.clone().contiguous() for name, tensor in out.items()}, args.out)


if __name__ == "__main__":
    main()

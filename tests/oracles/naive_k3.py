"""A naive float64 Kimi model: K3, K3.1 (indexer) and kimi_linear, one sequence at a time.

Takes a released `config.json` as a dict and tensors under their released names, and loops over
tokens, queries and experts. Variants are read off the configuration:

    text_config present        names carry the `language_model.` prefix
    attn_res_block_size        Attention Residuals instead of the plain residual stream
    gate_lower_bound           bounded decay instead of softplus
    use_full_rank_gate         g_proj instead of g_a_proj, g_b_proj
    q_lora_rank                low-rank query instead of q_proj
    mla_use_output_gate        sigmoid gate before the MLA output projection
    routed_expert_hidden_size  latent MoE
    hidden_act                 situ or silu
    dsa_config                 lightning indexer with top-k key selection

Images are given as `(patches, grid)` pairs (`naive_vision`); their features replace the embedding
rows of the placeholder tokens, which never count as labels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import naive_ops as ops
from . import naive_vision
from .naive_ops import F64

Config = Mapping[str, Any]
LATENT_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm ignore rms_norm_eps, K3 sheet 2.0 and 8.1


class Weights:
    """Released tensors by short name, as float64 (a float64 tensor is passed through as it is)."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.tensors = tensors
        self.prefix = prefix

    def __call__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].to(F64)

    def expert(self, name: str) -> Tensor:
        """Return an expert matrix, decoded when it is stored packed (K3 sheet 3.2)."""
        full = self.prefix + name
        if full + ".weight" in self.tensors:
            return self(name + ".weight")
        return ops.decode_mxfp4(
            self.tensors[full + ".weight_packed"], self.tensors[full + ".weight_scale"]
        )

    def at(self, part: str) -> "Weights":
        """Return the same tensors seen from below `part`."""
        return Weights(self.tensors, self.prefix + part)


def logits(
    config: Config,
    tensors: Mapping[str, Tensor],
    ids: list[int],
    images: Sequence[naive_vision.Image] = (),
) -> Tensor:
    """Return lm_head @ RMS(h; model.norm) for every position, [T, W] float64 (K3 sheet 2.1)."""
    head = Weights(tensors, prefix_of(config))("lm_head.weight")
    return hidden_states(config, tensors, ids, images)["final"] @ head.T


def loss(
    config: Config,
    tensors: Mapping[str, Tensor],
    ids: list[int],
    images: Sequence[naive_vision.Image] = (),
) -> Tensor:
    """Return the mean cross-entropy of the next token over labels that are text, in nats."""
    log_p = torch.log_softmax(logits(config, tensors, ids, images)[:-1], dim=-1)
    labels = text_labels(config, ids)
    return -torch.stack([log_p[t, label] for t, label in labels]).mean()


def text_labels(config: Config, ids: list[int]) -> list[tuple[int, int]]:
    """Return (position, next token) wherever the next token is no image placeholder."""
    media = config.get("media_placeholder_token_id")
    return [(t, ids[t + 1]) for t in range(len(ids) - 1) if ids[t + 1] != media]


def hidden_states(
    config: Config,
    tensors: Mapping[str, Tensor],
    ids: list[int],
    images: Sequence[naive_vision.Image] = (),
) -> dict[str, Tensor]:
    """Run the model (K3 sheet 2.1, images section 4).

    Returns:
        `embed` (image features in place), `0` .. `L-1` (the accumulator, or the plain residual
        stream, after that layer) and `final` (the input of lm_head), each [T, D] float64.
    """
    text = text_of(config)
    model = Weights(tensors, prefix_of(config) + "model.")
    acc = model("embed_tokens.weight")[ids]
    if images:
        acc = naive_vision.splice(config, tensors, ids, acc, images)
    states = {"embed": acc}
    run = _attn_res_layers if text.get("attn_res_block_size") else _plain_layers
    out = run(text, model, acc, states)
    states["final"] = ops.rms_norm(out, model("norm.weight"), text["rms_norm_eps"])
    return states


def text_of(config: Config) -> Config:
    """Return the text part of a released configuration."""
    return config.get("text_config", config)


def prefix_of(config: Config) -> str:
    """Return what released text tensor names start with (K3 sheet 3.1, hybrid sheet 3.1)."""
    return "language_model." if "text_config" in config else ""


def float64_leaves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float64 leaves that require gradients, packed experts decoded to `.weight`."""
    leaves = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_scale"):
            continue
        value = tensor.to(F64)
        if name.endswith(".weight_packed"):
            value = ops.decode_mxfp4(tensor, tensors[name[: -len("packed")] + "scale"])
            name = name[: -len("_packed")]
        leaves[name] = value.detach().clone().requires_grad_()
    return leaves


def _plain_layers(text: Config, model: Weights, acc: Tensor, states: dict[str, Tensor]) -> Tensor:
    """x += attn(norm(x)); x += ffn(norm(x)) (kimi_linear)."""
    for index in range(text["num_hidden_layers"]):
        layer = model.at(f"layers.{index}.")
        acc = acc + attention(text, layer, index, acc)
        acc = acc + feed_forward(text, layer, index, acc)
        states[str(index)] = acc
    return acc


def _attn_res_layers(
    text: Config, model: Weights, acc: Tensor, states: dict[str, Tensor]
) -> Tensor:
    """Run the layers over a bank of frozen rows and one accumulator (K3 sheet 2.1)."""
    eps = text["rms_norm_eps"]
    bank: list[Tensor] = []

    def mix(where: Weights, site: str, current: Tensor) -> Tensor:
        norm, proj = where(f"{site}_res_norm.weight"), where(f"{site}_res_proj.weight")
        return ops.attn_res_mix([*bank, current], norm, proj, eps)

    for index in range(text["num_hidden_layers"]):
        layer = model.at(f"layers.{index}.")
        x = mix(layer, "self_attention", acc) if bank else acc
        starts_block = index % text["attn_res_block_size"] == 0
        if starts_block:
            bank.append(acc)
        out = attention(text, layer, index, x)
        acc = out if starts_block else acc + out
        acc = acc + feed_forward(text, layer, index, mix(layer, "mlp", acc))
        states[str(index)] = acc
    return mix(model, "output_attn", acc)


def attention(text: Config, layer: Weights, index: int, x_TD: Tensor) -> Tensor:
    """Norm, then KDA or MLA by the 1-based schedule of the configuration (K3 sheet 1.3)."""
    x = ops.rms_norm(x_TD, layer("input_layernorm.weight"), text["rms_norm_eps"])
    mixer = mla if index + 1 in text["linear_attn_config"]["full_attn_layers"] else kda
    return mixer(text, layer.at("self_attn."), x)


def kda(text: Config, w: Weights, x_TD: Tensor) -> Tensor:
    """Kimi Delta Attention (K3 sheet 2.2; kimi_linear variants hybrid sheet 2.2)."""
    linear = text["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    shape = (len(x_TD), heads, dim)
    q, k, v = (
        ops.short_conv(x_TD @ w(f"{n}_proj.weight").T, w(f"{n}_conv1d.weight")).reshape(shape)
        for n in "qkv"
    )
    g = _kda_decay(linear, w, x_TD)
    beta = torch.sigmoid(x_TD @ w("b_proj.weight").T)
    o, _ = ops.kda_recurrence(ops.l2_norm(q) * dim**-0.5, ops.l2_norm(k), v, g, beta)
    o = ops.rms_norm(o, w("o_norm.weight"), text["rms_norm_eps"])
    o = o * torch.sigmoid(_kda_gate(linear, w, x_TD).reshape(shape))
    return o.reshape(len(x_TD), heads * dim) @ w("o_proj.weight").T


def _kda_decay(linear: Config, w: Weights, x_TD: Tensor) -> Tensor:
    """z = W_fb (W_fa x) + dt_bias, then the bounded or the softplus form (K3 sheet 2.2 step 4)."""
    heads, dim = linear["num_heads"], linear["head_dim"]
    z = x_TD @ w("f_a_proj.weight").T @ w("f_b_proj.weight").T + w("dt_bias")
    z = z.reshape(len(x_TD), heads, dim)
    a_log = w("A_log").reshape(-1)[:heads]  # K3 stores a zero tail behind the heads
    bound = linear.get("gate_lower_bound")
    return ops.softplus_decay(z, a_log) if bound is None else ops.bounded_decay(z, a_log, bound)


def _kda_gate(linear: Config, w: Weights, x_TD: Tensor) -> Tensor:
    """W_g x, or W_gb (W_ga x) in kimi_linear (K3 sheet 2.2 step 7, hybrid sheet 2.2 step 6)."""
    if linear.get("use_full_rank_gate"):
        return x_TD @ w("g_proj.weight").T
    return x_TD @ w("g_a_proj.weight").T @ w("g_b_proj.weight").T


def mla(text: Config, w: Weights, x_TD: Tensor) -> Tensor:
    """Latent attention without positions, gated in K3 (K3 sheet 2.3, hybrid sheet 2.5)."""
    tokens, heads = len(x_TD), text["num_attention_heads"]
    nope, rest, v_dim = (text[f] for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q, q_latent = _mla_query(text, w, x_TD)
    q = q.reshape(tokens, heads, nope + rest)
    compressed = x_TD @ w("kv_a_proj_with_mqa.weight").T
    latent, k_rest = compressed.split([text["kv_lora_rank"], rest], dim=-1)
    latent = ops.rms_norm(latent, w("kv_a_layernorm.weight"), LATENT_EPS)
    kv = (latent @ w("kv_b_proj.weight").T).reshape(tokens, heads, nope + v_dim)
    k_nope, v = kv.split([nope, v_dim], dim=-1)
    k = torch.cat([k_nope, k_rest[:, None, :].expand(tokens, heads, rest)], dim=-1)
    o = ops.attend(q, k, v, visible_keys(text, w, x_TD, q_latent)).reshape(tokens, heads * v_dim)
    if text.get("mla_use_output_gate"):
        o = o * torch.sigmoid(x_TD @ w("g_proj.weight").T)
    return o @ w("o_proj.weight").T


def _mla_query(text: Config, w: Weights, x_TD: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the query [T, H*K] and the normed query latent (None without a query LoRA)."""
    if text["q_lora_rank"] is None:
        return x_TD @ w("q_proj.weight").T, None
    latent = ops.rms_norm(x_TD @ w("q_a_proj.weight").T, w("q_a_layernorm.weight"), LATENT_EPS)
    return latent @ w("q_b_proj.weight").T, latent


def visible_keys(
    text: Config, w: Weights, x_TD: Tensor, q_latent: Tensor | None
) -> list[list[int]]:
    """Return the keys each query attends to: all s <= t, or the indexer's choice among them."""
    tokens, dsa = len(x_TD), text.get("dsa_config")
    if dsa is None:
        return [list(range(t + 1)) for t in range(tokens)]
    scores = mla_indexer_scores(text, w.at("indexer."), x_TD, q_latent)
    return ops.causal_selection(scores, dsa["index_topk"])


def mla_indexer_scores(text: Config, w: Weights, x_TD: Tensor, q_latent: Tensor) -> Tensor:
    """Lightning indexer on the normed input and the normed query latent (hybrid sheet 2.6)."""
    dsa = text["dsa_config"]
    q = q_latent @ w("wq_b.weight").T
    q = q.reshape(len(x_TD), dsa["index_n_heads"], dsa["index_head_dim"])
    norm, bias = w("k_norm.weight"), w("k_norm.bias")
    k = ops.layer_norm(x_TD @ w("wk.weight").T, norm, bias, text["rms_norm_eps"])
    return ops.indexer_scores(q, k, x_TD @ w("weights_proj.weight").T)


def feed_forward(text: Config, layer: Weights, index: int, x_TD: Tensor) -> Tensor:
    """Norm, then the dense or the MoE feed-forward (K3 sheet 1.4)."""
    x = ops.rms_norm(x_TD, layer("post_attention_layernorm.weight"), text["rms_norm_eps"])
    if index < text["first_k_dense_replace"]:
        return _mlp(text, layer.at("mlp."), x)
    return moe(text, layer.at("block_sparse_moe."), x)


def _act(text: Config, gate: Tensor, up: Tensor) -> Tensor:
    """SiTU for K3, SwiGLU for kimi_linear (K3 sheet 2.4)."""
    if text["hidden_act"] == "silu":
        return ops.swiglu(gate, up)
    if text["hidden_act"] != "situ":
        raise ValueError(f"hidden_act ({text['hidden_act']}): not a Kimi activation")
    beta, linear_beta = text["activation_situ_beta"], text["activation_situ_linear_beta"]
    return ops.situ(gate, up, beta, linear_beta)


def _mlp(text: Config, w: Weights, x_TD: Tensor) -> Tensor:
    """W_down act(W_gate x, W_up x)."""
    hidden = _act(text, x_TD @ w("gate_proj.weight").T, x_TD @ w("up_proj.weight").T)
    return hidden @ w("down_proj.weight").T


def moe(text: Config, w: Weights, x_TD: Tensor) -> Tensor:
    """Routed experts (in a latent for K3) plus shared experts (K3 sheet 2.5)."""
    latent = bool(text.get("routed_expert_hidden_size"))
    z = x_TD @ w("routed_expert_down_proj.weight").T if latent else x_TD
    cache: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    rows = []
    for t, chosen in enumerate(route(text, w.at("gate."), x_TD)):
        total = torch.zeros_like(z[t])
        for e, weight in chosen:
            if e not in cache:
                cache[e] = tuple(w.expert(f"experts.{e}.{n}") for n in ("w1", "w3", "w2"))
            w_gate, w_up, w_down = cache[e]
            total = total + weight * (w_down @ _act(text, w_gate @ z[t], w_up @ z[t]))
        rows.append(total)
    routed = torch.stack(rows)
    if latent:
        if text["latent_moe_use_norm"]:
            norm = w("routed_expert_norm.weight")
            routed = ops.rms_norm(routed, norm, text["rms_norm_eps"])
        routed = routed @ w("routed_expert_up_proj.weight").T
    return routed + _mlp(text, w.at("shared_experts."), x_TD)


def route(text: Config, w: Weights, x_TD: Tensor) -> list[list[tuple[int, Tensor]]]:
    """Return per token its experts and their weights (K3 sheet 2.5, groups hybrid sheet 2.9).

    s = sigmoid(W_r x); experts are the top-k of s + bias; weight = s / (sum of chosen s + 1e-20)
    times routed_scaling_factor. The bias never enters the weight.
    """
    if text["moe_router_activation_func"] != "sigmoid":
        raise ValueError("moe_router_activation_func: only sigmoid is described by the sheets")
    scores = torch.sigmoid(x_TD @ w("weight").T)
    choice = (scores + w("e_score_correction_bias")).tolist()
    routed = []
    for t, row in enumerate(choice):
        chosen = ops.select_experts(
            row, text["num_experts_per_token"], text["num_expert_group"], text["topk_group"]
        )
        total = torch.stack([scores[t, e] for e in chosen]).sum() + ops.RENORM_EPS
        divisor = total if text["moe_renormalize"] else 1.0
        factor = text["routed_scaling_factor"]
        routed.append([(e, scores[t, e] / divisor * factor) for e in chosen])
    return routed

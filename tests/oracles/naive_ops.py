"""The operations of the naive float64 model, one function per equation.

Knows the mathematics only: no configuration, no tensor names. Every function is differentiable
except the two selections (`top_k_lowest_index_first`, `select_experts`) that return plain integers.

Letters: T tokens, D hidden, H heads, K key dim, V value dim, E experts.
"""

import torch
from torch import Tensor

F64 = torch.float64
L2_EPS = 1e-6  # added to the sum of squares, K3 sheet 2.0
RENORM_EPS = 1e-20  # K3 sheet 2.5
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_GROUP = 32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps) over the last dim (K3 sheet, notation of section 2)."""
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """w * (x - mean) / sqrt(var + eps) + b, biased variance (hybrid sheet 2.1, indexer key)."""
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return weight * centred / torch.sqrt(variance + eps) + bias


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dim (K3 sheet 2.2 step 3)."""
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPS)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * torch.sigmoid(x)


def situ(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """[beta tanh(g/beta) sigmoid(g)] * [lb tanh(u/lb)] (K3 sheet 2.4); lb None keeps u linear."""
    left = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    right = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return left * right


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(g) * u (kimi_linear, hybrid sheet 2.9)."""
    return silu(gate) * up


def short_conv(x_TC: Tensor, weight_C1K: Tensor) -> Tensor:
    """SiLU(sum_j w[c, 0, j] * x[t - (K-1) + j, c]), zeros before the start (K3 sheet 2.2 step 2).

    The last tap multiplies the current token.
    """
    taps = weight_C1K.shape[-1]
    rows = []
    for t in range(x_TC.shape[0]):
        total = torch.zeros_like(x_TC[0])
        for j in range(taps):
            source = t - (taps - 1) + j
            if source >= 0:
                total = total + weight_C1K[:, 0, j] * x_TC[source]
        rows.append(silu(total))
    return torch.stack(rows)


def bounded_decay(z_THK: Tensor, a_log_H: Tensor, lower_bound: float) -> Tensor:
    """g = bound * sigmoid(exp(A_log_h) * z), so g in (bound, 0) (K3 sheet 2.2 step 4)."""
    return lower_bound * torch.sigmoid(torch.exp(a_log_H)[None, :, None] * z_THK)


def softplus_decay(z_THK: Tensor, a_log_H: Tensor) -> Tensor:
    """g = -exp(A_log_h) * log(1 + exp(z)) (kimi_linear, hybrid sheet 2.2 step 3)."""
    softplus = torch.logaddexp(z_THK, torch.zeros_like(z_THK))
    return -torch.exp(a_log_H)[None, :, None] * softplus


def kda_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule token by token (K3 sheet 2.2 step 6).

    S' = diag(exp g_t) S ;  u_t = beta_t (v_t - S'^T k_t) ;  S = S' + k_t u_t^T ;  o_t = S^T q_t

    Args:
        q: queries [T, H, K], already L2-normalised and scaled by K^-1/2.
        k: keys [T, H, K], already L2-normalised.
        v: values [T, H, V].
        g: log decay [T, H, K], <= 0.
        beta: write strength [T, H], in (0, 1).
        state: initial state [H, K, V]; zeros when absent.

    Returns:
        outputs [T, H, V] and the state [H, K, V] after the last token.
    """
    if state is None:
        state = torch.zeros(k.shape[1], k.shape[2], v.shape[2], dtype=v.dtype)
    outputs = []
    for t in range(q.shape[0]):
        decayed = torch.exp(g[t])[:, :, None] * state
        predicted = torch.einsum("hkv,hk->hv", decayed, k[t])
        update = beta[t][:, None] * (v[t] - predicted)
        state = decayed + torch.einsum("hk,hv->hkv", k[t], update)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state


def attend(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, visible: list[list[int]]) -> Tensor:
    """softmax(q_t . k_s * K^-1/2 over s in visible[t]) v_s, one query at a time (K3 sheet 2.3)."""
    scale = q_THK.shape[-1] ** -0.5
    rows = []
    for t, keys in enumerate(visible):
        scores = torch.einsum("hk,shk->hs", q_THK[t], k_THK[keys]) * scale
        rows.append(torch.einsum("hs,shv->hv", torch.softmax(scores, dim=-1), v_THV[keys]))
    return torch.stack(rows)


def top_k_lowest_index_first(values: list[float], k: int) -> list[int]:
    """Return the positions of the k largest values, equal values by ascending position."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def indexer_scores(q_THK: Tensor, k_TK: Tensor, weights_TH: Tensor) -> Tensor:
    """I[t, s] = sum_h w[t,h] H^-1/2 * relu(q[t,h] . k[s] * K^-1/2) (hybrid sheet 2.6, no rope).

    Returns all T x T pairs; causality belongs to the selection.
    """
    heads, dim = q_THK.shape[1:]
    dots = torch.relu(torch.einsum("thk,sk->ths", q_THK, k_TK) * dim**-0.5)
    return torch.einsum("th,ths->ts", weights_TH * heads**-0.5, dots)


def causal_selection(scores_TT: Tensor, top_k: int) -> list[list[int]]:
    """Select per query t the top_k best keys s <= t, all of them when t + 1 <= top_k."""
    table = scores_TT.tolist()
    return [sorted(top_k_lowest_index_first(row[: t + 1], top_k)) for t, row in enumerate(table)]


def select_experts(choice_E: list[float], top_k: int, groups: int, top_groups: int) -> list[int]:
    """Select top_k experts by biased score, inside the best groups (hybrid sheet 2.9).

    A group is worth the sum of its two best scores; experts of other groups are not eligible.
    """
    eligible = list(range(len(choice_E)))
    if groups > 1:
        size = len(choice_E) // groups
        worth = [sum(sorted(choice_E[i * size : (i + 1) * size])[-2:]) for i in range(groups)]
        kept = top_k_lowest_index_first(worth, top_groups)
        eligible = [e for e in eligible if e // size in kept]
    best = top_k_lowest_index_first([choice_E[e] for e in eligible], top_k)
    return [eligible[i] for i in best]


def attn_res_mix(rows: list[Tensor], norm_weight: Tensor, proj_1D: Tensor, eps: float) -> Tensor:
    """sum_j p_j R_j with p = softmax_j <norm * proj, R_j> / sqrt(mean(R_j^2) + eps) (K3 sheet 2.1).

    The keys are the normed rows, the values the raw rows; one mix per token.
    """
    scores = [rms_norm(row, norm_weight, eps) @ proj_1D[0] for row in rows]
    p = torch.softmax(torch.stack(scores), dim=0)
    return sum(p[j][:, None] * row for j, row in enumerate(rows))


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Decode E2M1 nibbles and E8M0 scales to float64 (K3 sheet 3.2).

    Byte j of a row holds element 2j in the low nibble and 2j+1 in the high nibble; nibble bit 3 is
    the sign; one scale 2^(byte - 127) serves 32 consecutive elements of the row.
    """
    table = torch.tensor([*E2M1, *(-m for m in E2M1)], dtype=F64)
    rows, half = packed.shape
    out = torch.empty(rows, 2 * half, dtype=F64)
    for j in range(half):
        codes = packed[:, j].long()
        factor = 2.0 ** (scale[:, 2 * j // MXFP4_GROUP].to(F64) - 127)
        out[:, 2 * j] = table[codes % 16] * factor
        out[:, 2 * j + 1] = table[codes // 16] * factor
    return out

// What surrounds the scan of a KDA layer, each in one pass over its tokens, float32.
//
// Short causal depthwise convolution, SiLU and L2 norm per head:
//   z_t = sum_b w[taps - 1 - b] x_{t-b} over b <= position_t,  s = SiLU(z),
//   y = s, or per head y = s r with r = 1 / sqrt(sum s^2 + eps)
//
// Gated RMS norm per head:  n = x / sqrt(mean(x^2) + eps),  y = w n sigmoid(gate)
//
// Backward runs the forward again token by token. A thread has all tokens of a head, so that sums
// over tokens do not depend on the number of threads.

#include <cmath>
#include <omp.h>

#include "vec.h"

using vec::load;
using vec::splat;
using vec::store;
using vec::stride;
using vec::v8;

namespace {

constexpr int MAX_HEAD = 512, MAX_TAPS = 8;

struct Conv {
  const float *x, *weight;  // [T, P], [P, taps]
  const int64_t *positions;
  int64_t T;
  int P, taps, head, norm;
  float eps;
};

// Weights of one head by tap: column b of w[taps - 1 - b].
void taps_of(const Conv &c, int first, float *w) {
  for (int b = 0; b < c.taps; b++)
    for (int i = 0; i < c.head; i++) w[b * c.head + i] = c.weight[(first + i) * c.taps + c.taps - 1 - b];
}

int reach(const Conv &c, int64_t t) {
  return c.positions[t] < c.taps - 1 ? int(c.positions[t]) : c.taps - 1;
}

v8 sigmoid(v8 z) {
  const v8 most = splat(87.f);
  const v8 minus = -z;
  return 1.f / (1.f + vec::exp(minus > most ? most : minus));
}

// s of token t and the factor r of its norm; z too unless null.
float activate(const Conv &c, const float *w, int first, int64_t t, float *s, float *sig, float *z) {
  const int back = reach(c, t);
  v8 squares = {};
  for (int i = 0; i < c.head; i += 8) {
    v8 sum = load(w + i) * load(c.x + t * c.P + first + i);
    for (int b = 1; b <= back; b++)
      sum += load(w + b * c.head + i) * load(c.x + (t - b) * c.P + first + i);
    const v8 gate = sigmoid(sum), y = sum * gate;
    store(s + i, y);
    if (z) store(z + i, sum), store(sig + i, gate);
    squares += y * y;
  }
  return c.norm ? 1.f / std::sqrt(vec::sum(squares) + c.eps) : 1.f;
}

void forward(const Conv &c, int first, float *out) {
  float w[MAX_TAPS * MAX_HEAD], s[MAX_HEAD];
  taps_of(c, first, w);
  for (int64_t t = 0; t < c.T; t++) {
    const float r = activate(c, w, first, t, s, nullptr, nullptr);
    for (int i = 0; i < c.head; i += 8) store(out + t * c.P + first + i, r * load(s + i));
  }
}

// dz of token t from dy: through the norm and SiLU.
void inner_gradient(const Conv &c, const float *w, int first, int64_t t, const float *dy, float *dz) {
  float s[MAX_HEAD], sig[MAX_HEAD], z[MAX_HEAD];
  const float r = activate(c, w, first, t, s, sig, z);
  v8 along = {};
  for (int i = 0; i < c.head; i += 8) along += load(dy + i) * load(s + i);
  const float shift = c.norm ? r * r * vec::sum(along) : 0.f;
  for (int i = 0; i < c.head; i += 8) {
    const v8 ds = r * (load(dy + i) - shift * load(s + i)), g = load(sig + i);
    store(dz + i, ds * g * (1.f + load(z + i) * (1.f - g)));
  }
}

void backward(const Conv &c, int first, const float *dy, float *dx, float *dweight) {
  float w[MAX_TAPS * MAX_HEAD], dw[MAX_TAPS * MAX_HEAD], later[MAX_TAPS][MAX_HEAD];
  taps_of(c, first, w);
  std::memset(dw, 0, sizeof(float) * c.taps * c.head);
  for (int64_t t = c.T - 1; t >= 0; t--) {
    float *dz = later[t % MAX_TAPS];
    const stride at = t * c.P + first;
    inner_gradient(c, w, first, t, dy + at, dz);
    const int back = reach(c, t);
    for (int i = 0; i < c.head; i += 8) {
      v8 sum = load(w + i) * load(dz + i);
      for (int b = 1; b < c.taps && t + b < c.T; b++)
        if (c.positions[t + b] >= b)
          sum += load(w + b * c.head + i) * load(later[(t + b) % MAX_TAPS] + i);
      store(dx + at + i, sum);
      for (int b = 0; b <= back; b++) {
        float *to = dw + b * c.head + i;
        store(to, load(to) + load(dz + i) * load(c.x + at - (stride)b * c.P + i));
      }
    }
  }
  for (int b = 0; b < c.taps; b++)
    for (int i = 0; i < c.head; i++)
      dweight[(first + i) * c.taps + c.taps - 1 - b] = dw[b * c.head + i];
}

struct Norm {
  const float *x, *gate, *weight;  // [T, H, V] twice, [V]
  int64_t T;
  int H, V;
  float eps;
};

// 1 / sqrt(mean square) of one head of one token.
float inverse_rms(const Norm &c, const float *x) {
  v8 squares = {};
  for (int i = 0; i < c.V; i += 8) squares += load(x + i) * load(x + i);
  return 1.f / std::sqrt(vec::sum(squares) / c.V + c.eps);
}

void norm_forward(const Norm &c, int h, float *out) {
  for (int64_t t = 0; t < c.T; t++) {
    const stride at = (t * c.H + h) * c.V;
    const float r = inverse_rms(c, c.x + at);
    for (int i = 0; i < c.V; i += 8)
      store(out + at + i, r * load(c.weight + i) * load(c.x + at + i) * sigmoid(load(c.gate + at + i)));
  }
}

void norm_backward(const Norm &c, int h, const float *dy, float *dx, float *dgate, float *dweight) {
  std::memset(dweight, 0, sizeof(float) * c.V);
  for (int64_t t = 0; t < c.T; t++) {
    const stride at = (t * c.H + h) * c.V;
    const float r = inverse_rms(c, c.x + at);
    v8 along = {};
    for (int i = 0; i < c.V; i += 8) {
      const v8 n = r * load(c.x + at + i), g = sigmoid(load(c.gate + at + i));
      const v8 d = load(dy + at + i), w = load(c.weight + i);
      store(dweight + i, load(dweight + i) + d * n * g);
      store(dgate + at + i, d * w * n * g * (1.f - g));
      store(dx + at + i, d * w * g);
      along += d * w * g * n;
    }
    const float shift = vec::sum(along) / c.V * r;
    for (int i = 0; i < c.V; i += 8)
      store(dx + at + i, r * (load(dx + at + i) - shift * load(c.x + at + i)));
  }
}

}  // namespace

extern "C" {

// V is a multiple of 8.
void gated_norm_forward(const float *x, const float *gate, const float *weight, int64_t T, int H,
                        int V, float eps, float *out, int threads) {
  const Norm c{x, gate, weight, T, H, V, eps};
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int h = 0; h < H; h++) norm_forward(c, h, out);
}

// dweight is [H, V]: one sum per head.
void gated_norm_backward(const float *dy, const float *x, const float *gate, const float *weight,
                         int64_t T, int H, int V, float eps, float *dx, float *dgate,
                         float *dweight, int threads) {
  const Norm c{x, gate, weight, T, H, V, eps};
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int h = 0; h < H; h++) norm_backward(c, h, dy, dx, dgate, dweight + (stride)h * V);
}

// Heads of `head` channels, a multiple of 8 up to 512; at most 8 taps.
void conv_forward(const float *x, const float *weight, const int64_t *positions, int64_t T, int P,
                  int taps, int head, int norm, float eps, float *out, int threads) {
  const Conv c{x, weight, positions, T, P, taps, head, norm, eps};
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int first = 0; first < P; first += head) forward(c, first, out);
}

void conv_backward(const float *dy, const float *x, const float *weight, const int64_t *positions,
                   int64_t T, int P, int taps, int head, int norm, float eps, float *dx,
                   float *dweight, int threads) {
  const Conv c{x, weight, positions, T, P, taps, head, norm, eps};
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int first = 0; first < P; first += head) backward(c, first, dy, dx, dweight);
}

}  // extern "C"

// The gated delta rule in chunks of 32 tokens, forward and backward, one head of one sequence at a
// time. The equations are those of ops/kda/chunk.py.
//
// Decays. With a_t = exp(g_t), every decay is a product of values a, so it is at most 1 and exact
// to rounding for any gate; exp is taken once per element and never of a sum. Pairs of tokens
//   - within a block of 8 rows multiply their decay up step by step;
//   - of the two blocks of 8 in a block of 16, and of the two blocks of 16, split it at the border:
//     (row side: product from the border to i) x (column side: product from j to the border).
//
// Backward. Per chunk, with Y = (I + L)^-T dv', dX = beta Y: the state's part and the parts of the
// scores give dq, dk by rows and dk by columns; the decay's gradient is
//   dG = q dq + k (dk_rows - dk_columns),  dg = its sum over later rows,
// so no decay has a tensor of its own. States are stored once per segment; a segment is run
// forward again before its backward.
//
// K and V are padded to multiples of 16 in the working buffers, rows to 32; padded rows have
// beta = k = g = 0 and change nothing.

#include <omp.h>

#include "vec.h"

using vec::load;
using vec::product;
using vec::splat;
using vec::store;
using vec::stride;
using vec::v8;

namespace {

constexpr int C = 32;        // rows of a chunk
constexpr int SEGMENT = 8;   // chunks of a segment
constexpr float FLOOR = -80.f;

struct Tensor {
  void *data;
  int bfloat16;
};

// Shapes of one call; the pointers follow the argument order of the C functions below.
struct Call {
  const int64_t *cu;
  int N, H, K, V;
  float scale;
  Tensor q, k, v, g, beta, o, dout, dq, dk, dv, dg, dbeta;
  const float *initial;
  float *states, *final_state;
  const float *dfinal;
  float *dinitial;
};

int padded(int n) { return (n + 15) / 16 * 16; }

// Elements [offset, offset + n) as float, times `factor`, zeros up to `width`.
void load_row(const Tensor &x, stride offset, int n, int width, float factor, float *out) {
  if (x.bfloat16) {
    const uint16_t *from = (const uint16_t *)x.data + offset;
    for (int i = 0; i < n; i++) out[i] = factor * vec::from_bfloat16(from[i]);
  } else {
    const float *from = (const float *)x.data + offset;
    for (int i = 0; i < n; i++) out[i] = factor * from[i];
  }
  for (int i = n; i < width; i++) out[i] = 0.f;
}

void store_row(const Tensor &x, stride offset, int n, const float *from) {
  if (x.bfloat16) {
    uint16_t *to = (uint16_t *)x.data + offset;
    for (int i = 0; i < n; i++) to[i] = vec::to_bfloat16(from[i]);
  } else {
    std::memcpy((float *)x.data + offset, from, n * sizeof(float));
  }
}

// The rows of one chunk of one head in a [T, H, n] tensor.
struct Rows {
  stride token, heads, head;
  int valid, ahead;  // rows of the chunk; how far on the next chunk's rows are
  stride at(int row, int n) const { return ((token + row) * heads + head) * n; }
};

void load_rows(const Tensor &x, const Rows &rows, int n, int width, float factor, float *out) {
  const int bytes = x.bfloat16 ? 2 : 4;
  for (int r = 0; r < rows.valid; r++) {
    // Rows of one head lie apart: the machine does not foresee them.
    const char *next = (const char *)x.data + rows.at(r + rows.ahead, n) * bytes;
    for (int b = 0; b < n * bytes; b += 64) __builtin_prefetch(next + b);
    load_row(x, rows.at(r, n), n, width, factor, out + r * width);
  }
  std::memset(out + rows.valid * width, 0, (C - rows.valid) * width * sizeof(float));
}

void store_rows(const Tensor &x, const Rows &rows, int n, int width, const float *from) {
  for (int r = 0; r < rows.valid; r++) store_row(x, rows.at(r, n), n, from + r * width);
}

// What scores and state need of one chunk. All are [C][Kp] unless noted.
struct Chunk {
  float *q, *k, *g, *a;
  float *w8, *w16;          // decay to the border, row side or column side by position
  float *from, *to;         // decay from the chunk's start to the row, from the row to its end
  float *q8, *k8, *q16, *k16;
  float *qs, *ks, *kd;      // q from, k from (adjacent), k to
  float *total;             // [Kp]
  float *run8, *run16, *run32;  // [Kp], products so far
  float *beta;              // [C]
  float *columns;           // [Kp][16]
  float *P, *M, *L;         // [C][C]; L = beta M
};

// Hands out a thread's buffer. Arrays begin at different offsets within a page, or loads would wait
// for stores to other arrays.
struct Cursor {
  float *base;
  stride used = 0;
  float *take(int n) {
    float *p = base + used;
    used += n + 48;
    return p;
  }
};

Chunk chunk_buffers(Cursor &cursor, int Kp) {
  Chunk c{};
  float **all[] = {&c.q,  &c.k,  &c.g,  &c.a,   &c.w8,  &c.w16, &c.from,
                   &c.to, &c.q8, &c.k8, &c.q16, &c.k16, &c.kd};
  for (float **p : all) *p = cursor.take(C * Kp);
  c.qs = cursor.take(2 * C * Kp), c.ks = c.qs + C * Kp;
  c.total = cursor.take(Kp);
  c.run8 = cursor.take(Kp), c.run16 = cursor.take(Kp), c.run32 = cursor.take(Kp);
  c.beta = cursor.take(C);
  c.columns = cursor.take(Kp * 16);
  c.L = cursor.take(C * C);
  return c;
}

void store_at(float *p, stride at, v8 x) { store(p + at, x); }

// One row further from the chunk's start; `Backward` keeps the decays themselves too.
template <bool Backward>
void decay_down(const Chunk &c, int Kp, int i) {
  for (int d = 0; d < Kp; d += 8) {
    const stride at = i * Kp + d;
    const v8 g = load(c.g + at), floor = splat(FLOOR), q = load(c.q + at), k = load(c.k + at);
    const v8 a = vec::exp(g < floor ? floor : g);
    const v8 by8 = i % 8 ? load(c.run8 + d) * a : a;
    const v8 by16 = i % 16 ? load(c.run16 + d) * a : a;
    const v8 all = i ? load(c.total + d) * a : a;
    store(c.run8 + d, by8), store(c.run16 + d, by16), store(c.total + d, all);
    store_at(c.a, at, a);
    store_at(c.qs, at, q * all), store_at(c.ks, at, k * all);
    if (Backward) store_at(c.from, at, all);
    if (i % 16 >= 8) {
      store_at(c.q8, at, q * by8), store_at(c.k8, at, k * by8);
      if (Backward) store_at(c.w8, at, by8);
    }
    if (i >= 16) {
      store_at(c.q16, at, q * by16), store_at(c.k16, at, k * by16);
      if (Backward) store_at(c.w16, at, by16);
    }
  }
}

// One row further from the chunk's end.
template <bool Backward>
void decay_up(const Chunk &c, int Kp, int i) {
  const v8 one = splat(1.f);
  for (int d = 0; d < Kp; d += 8) {
    const stride at = i * Kp + d;
    const v8 k = load(c.k + at), after = i < C - 1 ? load(c.a + at + Kp) : one;
    const v8 by8 = i % 8 < 7 ? load(c.run8 + d) * after : one;
    const v8 by16 = i % 16 < 15 ? load(c.run16 + d) * after : one;
    const v8 all = i < C - 1 ? load(c.run32 + d) * after : one;
    store(c.run8 + d, by8), store(c.run16 + d, by16), store(c.run32 + d, all);
    store_at(c.kd, at, k * all);
    if (Backward) store_at(c.to, at, all);
    if (i % 16 < 8) {
      store_at(c.k8, at, k * by8);
      if (Backward) store_at(c.w8, at, by8);
    }
    if (i < 16) {
      store_at(c.k16, at, k * by16);
      if (Backward) store_at(c.w16, at, by16);
    }
  }
}

// Load q, k, g, beta and multiply the decays up.
template <bool Backward>
void prepare(const Call &call, const Rows &rows, int Kp, const Chunk &c) {
  load_rows(call.q, rows, call.K, Kp, call.scale, c.q);
  load_rows(call.k, rows, call.K, Kp, 1.f, c.k);
  load_rows(call.g, rows, call.K, Kp, 1.f, c.g);
  load_rows(call.beta, rows, 1, 1, 1.f, c.beta);
  for (int i = 0; i < C; i++) decay_down<Backward>(c, Kp, i);
  for (int i = C - 1; i >= 0; i--) decay_up<Backward>(c, Kp, i);
}

// Scores of pairs inside one block of 8 rows; W vectors of channels at a time.
template <int W>
void near_scores(const float *q, const float *k, const float *a, int ld, v8 *acc) {
  for (int j = 0; j < 8; j++) {
    v8 kd[W];
    for (int w = 0; w < W; w++) kd[w] = load(k + j * ld + 8 * w);
    for (int i = j; i < 8; i++, acc += 2) {
      v8 p[2] = {}, m[2] = {};
      for (int w = 0; w < W; w++) {
        if (i > j) kd[w] *= load(a + i * ld + 8 * w);
        p[w & 1] += load(q + i * ld + 8 * w) * kd[w];
        m[w & 1] += load(k + i * ld + 8 * w) * kd[w];
      }
      acc[0] += p[0] + p[1];
      acc[1] += m[0] + m[1];
    }
  }
}

constexpr int PAIRS = 36;

void near_block(const Chunk &c, int Kp, int first) {
  v8 acc[2 * PAIRS] = {};
  const stride at = first * Kp;
  int d = 0;
  for (; d + 64 <= Kp; d += 64) near_scores<8>(c.q + at + d, c.k + at + d, c.a + at + d, Kp, acc);
  for (; d < Kp; d += 16) near_scores<2>(c.q + at + d, c.k + at + d, c.a + at + d, Kp, acc);
  float found[2 * PAIRS];
  for (int p = 0; p < 2 * PAIRS; p += 8) store(found + p, vec::sums(acc + p));
  const float *next = found;
  for (int j = 0; j < 8; j++)
    for (int i = j; i < 8; i++, next += 2) {
      c.P[(first + i) * C + first + j] = next[0];
      c.M[(first + i) * C + first + j] = i > j ? next[1] : 0.f;
    }
}

// P and M below the diagonal, zeros above; L = beta M.
void scores(const Chunk &c, int Kp) {
  std::memset(c.P, 0, C * C * sizeof(float));
  std::memset(c.M, 0, C * C * sizeof(float));
  for (int first = 0; first < C; first += 8) near_block(c, Kp, first);
  for (int size = 8; size <= 16; size *= 2) {
    const float *q = size == 8 ? c.q8 : c.q16, *k = size == 8 ? c.k8 : c.k16;
    for (int first = 0; first < C; first += 2 * size) {
      const int row = first + size;
      vec::transpose(k + first * Kp, Kp, size, Kp, c.columns, size);
      const auto put = [&](float *out) {
        return [=](int i, int j, v8 x) { store(out + (row + i) * C + first + j, x); };
      };
      product(size, size, Kp, q + row * Kp, Kp, 1, c.columns, size, put(c.P));
      product(size, size, Kp, k + row * Kp, Kp, 1, c.columns, size, put(c.M));
    }
  }
  for (int i = 0; i < C; i++)
    for (int j = 0; j < C; j += 8) store(c.L + i * C + j, c.beta[i] * load(c.M + i * C + j));
}

// (I + L) out = beta x, four rows by 16 columns at a time.
void solve(const float *L, const float *beta, const float *x, int Vp, float *out) {
  for (int i = 0; i < C; i += 4)
    for (int j = 0; j < Vp; j += 16) {
      v8 acc[4][2] = {};
      vec::tile<4, 2>(acc, L + i * C, C, 1, out + j, Vp, i);
      for (int r = 0; r < 4; r++)
        for (int w = 0; w < 2; w++) {
          acc[r][w] = beta[i + r] * load(x + (i + r) * Vp + j + 8 * w) - acc[r][w];
          for (int s = 0; s < r; s++) acc[r][w] -= L[(i + r) * C + i + s] * acc[s][w];
          store(out + (i + r) * Vp + j + 8 * w, acc[r][w]);
        }
    }
}

// (I + L)^T y = y in place, from the last rows up.
void solve_transposed(const float *L, int Vp, float *y) {
  for (int i = C - 4; i >= 0; i -= 4)
    for (int j = 0; j < Vp; j += 16) {
      v8 acc[4][2] = {};
      vec::tile<4, 2>(acc, L + (i + 4) * C + i, 1, C, y + (i + 4) * Vp + j, Vp, C - 4 - i);
      for (int r = 3; r >= 0; r--)
        for (int w = 0; w < 2; w++) {
          float *at = y + (i + r) * Vp + j + 8 * w;
          acc[r][w] = load(at) - acc[r][w];
          for (int s = r + 1; s < 4; s++) acc[r][w] -= L[(i + s) * C + i + r] * acc[s][w];
          store(at, acc[r][w]);
        }
    }
}

// Deltas of a chunk and, unless `out` is null, its outputs; `x` holds v and then v - (k from) S.
void chunk_forward(const Chunk &c, int Kp, int Vp, const float *S, float *x, float *delta, float *out) {
  scores(c, Kp);
  product(C, Vp, Kp, c.ks, Kp, 1, S, Vp, [&](int i, int j, v8 y) {
    float *at = x + i * Vp + j;
    store(at, load(at) - y);
  });
  solve(c.L, c.beta, x, Vp, delta);
  if (!out) return;
  product(C, Vp, Kp, c.qs, Kp, 1, S, Vp, [&](int i, int j, v8 y) { store(out + i * Vp + j, y); });
  for (int r = 0; r < C; r += 8)
    product(8, Vp, r + 8, c.P + r * C, C, 1, delta, Vp, [&](int i, int j, v8 y) {
      float *at = out + (r + i) * Vp + j;
      store(at, load(at) + y);
    });
}

// next = diag(total) S + (k to)^T delta; `next` may be S.
void advance(const Chunk &c, int Kp, int Vp, const float *S, const float *delta, float *next) {
  product(Kp, Vp, C, c.kd, 1, Kp, delta, Vp, [&](int d, int j, v8 y) {
    store(next + d * Vp + j, c.total[d] * load(S + d * Vp + j) + y);
  });
}

void load_state(const float *from, int K, int V, int Kp, int Vp, float *S) {
  std::memset(S, 0, sizeof(float) * Kp * Vp);
  if (from)
    for (int d = 0; d < K; d++) std::memcpy(S + d * Vp, from + d * V, V * sizeof(float));
}

void store_state(const float *S, int K, int V, int Vp, float *to) {
  for (int d = 0; d < K; d++) std::memcpy(to + d * V, S + d * Vp, V * sizeof(float));
}

// Segments of sequence n start at this index; the ranges of two sequences never meet.
stride first_segment(const Call &call, int n) { return call.cu[n] / (C * SEGMENT) + n; }

struct ForwardBuffers {
  Chunk c;
  float *S, *x, *delta, *out;
};

ForwardBuffers forward_buffers(Cursor &cursor, int Kp, int Vp) {
  ForwardBuffers b;
  b.c = chunk_buffers(cursor, Kp);
  b.c.P = cursor.take(C * C), b.c.M = cursor.take(C * C);
  b.S = cursor.take(Kp * Vp), b.x = cursor.take(C * Vp), b.delta = cursor.take(C * Vp);
  b.out = cursor.take(C * Vp);
  return b;
}

void forward(const Call &call, int n, int h, float *work) {
  const int K = call.K, V = call.V, Kp = padded(K), Vp = padded(V);
  Cursor cursor{work};
  const auto [c, S, x, delta, out] = forward_buffers(cursor, Kp, Vp);
  const stride head_state = (stride)K * V, begin = call.cu[n], end = call.cu[n + 1];
  const stride own = ((stride)n * call.H + h) * head_state;
  load_state(call.initial ? call.initial + own : nullptr, K, V, Kp, Vp, S);
  for (stride t = begin, chunk = 0; t < end; t += C, chunk++) {
    if (call.states && chunk % SEGMENT == 0) {
      const stride segment = first_segment(call, n) + chunk / SEGMENT;
      store_state(S, K, V, Vp, call.states + (segment * call.H + h) * head_state);
    }
    const Rows rows{t, call.H, h, end - t < C ? int(end - t) : C, C};
    prepare<false>(call, rows, Kp, c);
    load_rows(call.v, rows, V, Vp, 1.f, x);
    chunk_forward(c, Kp, Vp, S, x, delta, out);
    store_rows(call.o, rows, V, Vp, out);
    advance(c, Kp, Vp, S, delta, S);
  }
  if (call.final_state) store_state(S, K, V, Vp, call.final_state + own);
}

// What the backward of a chunk needs of its forward.
struct Kept {
  float *S, *x, *delta, *P, *M;
};

struct Gradients {
  float *dout, *y;                 // [C][Vp] each, adjacent; y becomes -beta Y
  float *delta_columns;            // [Vp][C]
  float *dP, *W;                   // [C][C]
  float *transposed;               // [Vp][Kp]
  float *dq, *dk_rows, *dk_columns, *dG;  // [C][Kp]
  float *dS, *edge;                // [Kp][Vp], [Kp]
  float *dbeta;                    // [C]
};

// Gradients of pairs inside one block of 8 rows, by Horner's rule over the steps between them.
template <int W>
void near_gradients(const Chunk &c, const Gradients &d, int Kp, int first, int channel) {
  const stride at = (stride)first * Kp + channel;
  const float *q = c.q + at, *k = c.k + at, *a = c.a + at;
  const float *dP = d.dP + first * C + first, *dM = d.W + first * C + first;
  for (int i = 0; i < 8; i++) {
    v8 dq[W] = {}, dk[W] = {};
    for (int j = 0; j < i; j++)
      for (int w = 0; w < W; w++) {
        const v8 kj = load(k + j * Kp + 8 * w), step = load(a + (j + 1) * Kp + 8 * w);
        dq[w] = (dq[w] + dP[i * C + j] * kj) * step;
        dk[w] = (dk[w] + dM[i * C + j] * kj) * step;
      }
    for (int w = 0; w < W; w++) {
      const stride to = at + i * Kp + 8 * w;
      store(d.dq + to, load(d.dq + to) + dq[w] + dP[i * C + i] * load(k + i * Kp + 8 * w));
      store(d.dk_rows + to, load(d.dk_rows + to) + dk[w]);
    }
  }
  for (int j = 0; j < 8; j++) {
    v8 dk[W] = {};
    for (int i = 7; i > j; i--)
      for (int w = 0; w < W; w++) {
        dk[w] += dP[i * C + j] * load(q + i * Kp + 8 * w);
        dk[w] += dM[i * C + j] * load(k + i * Kp + 8 * w);
        dk[w] *= load(a + i * Kp + 8 * w);
      }
    for (int w = 0; w < W; w++) {
      const stride to = at + j * Kp + 8 * w;
      store(d.dk_columns + to,
            load(d.dk_columns + to) + dk[w] + dP[j * C + j] * load(q + j * Kp + 8 * w));
    }
  }
}

// Add what the scores give to dq, dk_rows, dk_columns; W holds dM.
void score_gradients(const Chunk &c, const Gradients &d, int Kp) {
  for (int size = 8; size <= 16; size *= 2) {
    const float *q = size == 8 ? c.q8 : c.q16, *k = size == 8 ? c.k8 : c.k16;
    const float *w = size == 8 ? c.w8 : c.w16;
    for (int first = 0; first < C; first += 2 * size) {
      const int row = first + size;
      const auto add = [&](float *out, int begin) {
        return [=](int i, int j, v8 x) {
          const stride at = (stride)(begin + i) * Kp + j;
          store(out + at, load(out + at) + load(w + at) * x);
        };
      };
      const float *dP = d.dP + row * C + first, *dM = d.W + row * C + first;
      product(size, Kp, size, dP, C, 1, k + first * Kp, Kp, add(d.dq, row));
      product(size, Kp, size, dM, C, 1, k + first * Kp, Kp, add(d.dk_rows, row));
      product(size, Kp, size, dP, 1, C, q + row * Kp, Kp, add(d.dk_columns, first));
      product(size, Kp, size, dM, 1, C, k + row * Kp, Kp, add(d.dk_columns, first));
    }
  }
  for (int first = 0; first < C; first += 8) {
    int channel = 0;
    for (; channel + 32 <= Kp; channel += 32) near_gradients<4>(c, d, Kp, first, channel);
    for (; channel < Kp; channel += 16) near_gradients<2>(c, d, Kp, first, channel);
  }
}

// Y, dv (as -beta Y), dP, dM and dbeta of a chunk from dO and the state's gradient.
void delta_gradients(const Chunk &c, const Kept &kept, const Gradients &d, int Kp, int Vp) {
  product(C, Vp, Kp, c.kd, Kp, 1, d.dS, Vp, [&](int i, int j, v8 x) { store(d.y + i * Vp + j, x); });
  for (int r = 0; r < C; r += 8)
    product(8, Vp, C - r, kept.P + r * C + r, 1, C, d.dout + r * Vp, Vp, [&](int i, int j, v8 x) {
      float *at = d.y + (r + i) * Vp + j;
      store(at, load(at) + x);
    });
  solve_transposed(c.L, Vp, d.y);
  vec::transpose(kept.delta, Vp, C, Vp, d.delta_columns, C);
  for (int r = 0; r < C; r += 16) {
    const int width = r + 16;
    const auto put = [&](float *out) {
      return [=](int i, int j, v8 x) { store(out + (r + i) * C + j, x); };
    };
    product(16, width, Vp, d.dout + r * Vp, Vp, 1, d.delta_columns, C, put(d.dP));
    product(16, width, Vp, d.y + r * Vp, Vp, 1, d.delta_columns, C, put(d.W));
  }
  for (int i = 0; i < C; i++) {
    v8 by_x = {}, by_scores = {};
    for (int j = 0; j < Vp; j += 8) {
      float *y = d.y + i * Vp + j;
      by_x += load(y) * load(kept.x + i * Vp + j);
      store(y, -c.beta[i] * load(y));
    }
    for (int j = i + 1; j < C; j++) d.dP[i * C + j] = 0.f;
    for (int j = i; j < C; j++) d.W[i * C + j] = 0.f;
    for (int j = 0; j < C; j += 8) {
      const v8 w = load(d.W + i * C + j);
      by_scores += w * load(kept.M + i * C + j);
      store(d.W + i * C + j, -c.beta[i] * w);
    }
    d.dbeta[i] = vec::sum(by_x - by_scores);
  }
}

// Parts of dq, dk that pass through the states, and the state's own gradient.
void state_gradients(const Chunk &c, const Kept &kept, const Gradients &d, int Kp, int Vp) {
  vec::transpose(kept.S, Vp, Kp, Vp, d.transposed, Kp);
  const auto scaled = [Kp](float *out, const float *w) {
    return [=](int i, int j, v8 x) {
      const stride at = (stride)i * Kp + j;
      store(out + at, load(w + at) * x);
    };
  };
  product(C, Kp, Vp, d.dout, Vp, 1, d.transposed, Kp, scaled(d.dq, c.from));
  product(C, Kp, Vp, d.y, Vp, 1, d.transposed, Kp, scaled(d.dk_rows, c.from));
  vec::transpose(d.dS, Vp, Kp, Vp, d.transposed, Kp);
  product(C, Kp, Vp, kept.delta, Vp, 1, d.transposed, Kp, scaled(d.dk_columns, c.to));
  for (int k = 0; k < Kp; k++) {  // the gradient of the decay of the whole chunk
    v8 x = {};
    for (int j = 0; j < Vp; j += 8) x += load(d.dS + k * Vp + j) * load(kept.S + k * Vp + j);
    d.edge[k] = c.total[k] * vec::sum(x);
  }
  for (int j = 0; j < Kp; j += 8) {
    v8 x = load(d.edge + j);
    for (int i = 0; i < C; i++) x += load(c.k + i * Kp + j) * load(d.dk_columns + i * Kp + j);
    store(d.edge + j, x);
  }
  // q from and k from are adjacent, so are dO and -beta Y: one product over 2 C rows.
  product(Kp, Vp, 2 * C, c.qs, 1, Kp, d.dout, Vp, [&](int k, int j, v8 x) {
    float *at = d.dS + k * Vp + j;
    store(at, c.total[k] * load(at) + x);
  });
}

void store_gradients(const Call &call, const Rows &rows, const Chunk &c, const Gradients &d, int Kp, int Vp) {
  for (int j = 0; j < Kp; j += 8) {
    v8 running = load(d.edge + j);
    for (int i = C - 1; i >= 0; i--) {
      const stride at = (stride)i * Kp + j;
      const v8 q = load(c.q + at), k = load(c.k + at), g = load(c.g + at);
      const v8 dq = load(d.dq + at), by_row = load(d.dk_rows + at), by_column = load(d.dk_columns + at);
      running += q * dq + k * (by_row - by_column);
      store(d.dG + at, g < splat(FLOOR) ? splat(0.f) : running);
      store(d.dq + at, call.scale * dq);
      store(d.dk_rows + at, by_row + by_column);
    }
  }
  for (int i = 0; i < C * Vp; i += 8) store(d.y + i, -load(d.y + i));
  store_rows(call.dq, rows, call.K, Kp, d.dq);
  store_rows(call.dk, rows, call.K, Kp, d.dk_rows);
  store_rows(call.dv, rows, call.V, Vp, d.y);
  store_rows(call.dg, rows, call.K, Kp, d.dG);
  store_rows(call.dbeta, rows, 1, 1, d.dbeta);
}

struct BackwardBuffers {
  Chunk c;
  Kept kept[SEGMENT];
  Gradients d;
};

BackwardBuffers backward_buffers(Cursor &cursor, int Kp, int Vp) {
  BackwardBuffers b;
  b.c = chunk_buffers(cursor, Kp);
  for (Kept &s : b.kept) {
    s.S = cursor.take(Kp * Vp), s.x = cursor.take(C * Vp), s.delta = cursor.take(C * Vp);
    s.P = cursor.take(C * C), s.M = cursor.take(C * C);
  }
  Gradients &d = b.d;
  d.dout = cursor.take(2 * C * Vp), d.y = d.dout + C * Vp, d.delta_columns = cursor.take(C * Vp);
  d.dP = cursor.take(C * C), d.W = cursor.take(C * C), d.transposed = cursor.take(Kp * Vp);
  d.dq = cursor.take(C * Kp), d.dk_rows = cursor.take(C * Kp);
  d.dk_columns = cursor.take(C * Kp), d.dG = cursor.take(C * Kp);
  d.dS = cursor.take(Kp * Vp), d.edge = cursor.take(Kp), d.dbeta = cursor.take(C);
  return b;
}

void backward(const Call &call, int n, int h, float *work) {
  const int K = call.K, V = call.V, Kp = padded(K), Vp = padded(V);
  Cursor cursor{work};
  auto [c, kept, d] = backward_buffers(cursor, Kp, Vp);
  const stride head_state = (stride)K * V, begin = call.cu[n], end = call.cu[n + 1];
  const stride own = ((stride)n * call.H + h) * head_state, length = C * SEGMENT;
  load_state(call.dfinal ? call.dfinal + own : nullptr, K, V, Kp, Vp, d.dS);
  for (stride segment = (end - begin + length - 1) / length - 1; segment >= 0; segment--) {
    const stride start = begin + segment * length, stop = end - start < length ? end : start + length;
    const int chunks = int((stop - start + C - 1) / C);
    load_state(call.states + ((first_segment(call, n) + segment) * call.H + h) * head_state, K, V, Kp,
               Vp, kept[0].S);
    for (int pass = 0; pass < 2 * chunks; pass++) {  // forward through the segment, then back
      const bool again = pass < chunks;
      const int m = again ? pass : 2 * chunks - 1 - pass;
      const stride t = start + m * C;
      const Rows rows{t, call.H, h, stop - t < C ? int(stop - t) : C, again ? C : -C};
      Kept &s = kept[m];
      c.P = s.P, c.M = s.M;
      if (m + 1 < chunks && again)
        prepare<false>(call, rows, Kp, c);
      else if (again || pass != chunks)  // the last chunk is still at hand when the way back begins
        prepare<true>(call, rows, Kp, c);
      if (again) {
        load_rows(call.v, rows, V, Vp, 1.f, s.x);
        chunk_forward(c, Kp, Vp, s.S, s.x, s.delta, nullptr);
        if (m + 1 < chunks) advance(c, Kp, Vp, s.S, s.delta, kept[m + 1].S);
        continue;
      }
      if (pass != chunks)
        for (int i = 0; i < C; i++)
          for (int j = 0; j < C; j += 8) store(c.L + i * C + j, c.beta[i] * load(c.M + i * C + j));
      load_rows(call.dout, rows, V, Vp, 1.f, d.dout);
      delta_gradients(c, s, d, Kp, Vp);
      state_gradients(c, s, d, Kp, Vp);
      score_gradients(c, d, Kp);
      store_gradients(call, rows, c, d, Kp, Vp);
    }
  }
  if (call.dinitial) store_state(d.dS, K, V, Vp, call.dinitial + own);
}

template <class Run>
void over_heads(const Call &call, int threads, float *work, int64_t floats, const Run &run) {
  const stride tasks = (stride)call.N * call.H;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (stride task = 0; task < tasks; task++) {
    const vec::FlushTiny flush;
    run(call, int(task / call.H), int(task % call.H), work + omp_get_thread_num() * floats);
  }
}

}  // namespace

// Tensors are contiguous: q, k, g [T, H, K], v [T, H, V], beta [T, H], states [*, H, K, V] float32.
// Each tensor in `tensors` comes with a flag in `bfloat16`; a null pointer stands for None. `work`
// has room for `floats` values per thread.
extern "C" {

// Values that one thread needs.
int64_t kda_floats(int backward, int K, int V) {
  Cursor cursor{nullptr};
  if (backward)
    backward_buffers(cursor, padded(K), padded(V));
  else
    forward_buffers(cursor, padded(K), padded(V));
  return cursor.used;
}

void kda_forward(const int64_t *cu, int N, int H, int K, int V, float scale, void *const *tensors,
                 const int *bfloat16, const float *initial, float *states, float *final_state,
                 int threads, float *work, int64_t floats) {
  Call call{};
  call.cu = cu, call.N = N, call.H = H, call.K = K, call.V = V, call.scale = scale;
  Tensor *order[] = {&call.q, &call.k, &call.v, &call.g, &call.beta, &call.o};
  for (int i = 0; i < 6; i++) *order[i] = {tensors[i], bfloat16[i]};
  call.initial = initial, call.states = states, call.final_state = final_state;
  over_heads(call, threads, work, floats, forward);
}

void kda_backward(const int64_t *cu, int N, int H, int K, int V, float scale, void *const *tensors,
                  const int *bfloat16, const float *states, const float *dfinal, float *dinitial,
                  int threads, float *work, int64_t floats) {
  Call call{};
  call.cu = cu, call.N = N, call.H = H, call.K = K, call.V = V, call.scale = scale;
  Tensor *order[] = {&call.q,  &call.k,  &call.v,  &call.g,  &call.beta, &call.dout,
                     &call.dq, &call.dk, &call.dv, &call.dg, &call.dbeta};
  for (int i = 0; i < 11; i++) *order[i] = {tensors[i], bfloat16[i]};
  call.states = const_cast<float *>(states), call.dfinal = dfinal, call.dinitial = dinitial;
  over_heads(call, threads, work, floats, backward);
}

}  // extern "C"

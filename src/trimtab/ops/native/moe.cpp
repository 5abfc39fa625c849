// Routed experts: gather, gated activation and its gradient, weighted scatter, dropout, and matrix
// products of a few rows, which a BLAS spends mostly on packing the weights.
//
// Every element of a result is computed by one thread in one order, so the number of threads
// changes nothing.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int WIDE = 8;
typedef float vec __attribute__((vector_size(4 * WIDE)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDE)));

inline vec load(const float *p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float *p, vec v) { std::memcpy(p, &v, sizeof v); }
inline vec splat(float x) { return vec{x, x, x, x, x, x, x, x}; }
inline vec bits(ivec v) { return (vec)v; }
inline vec pick(ivec mask, vec a, vec b) { return bits((mask & (ivec)a) | (~mask & (ivec)b)); }
inline vec lower(vec a, vec b) { return pick(a < b, a, b); }
inline vec higher(vec a, vec b) { return pick(a > b, a, b); }
inline float total(vec v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// e^x by 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 2e-7. NaN stays NaN.
inline vec exponential(vec x) {
    const vec inside = higher(lower(x, splat(88.3f)), splat(-87.3f));
    const vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const vec n = (inside * splat(1.44269504f) + shifter) - shifter;
    const vec r = (inside - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(0.5f);
    p = p * (r * r) + r + splat(1.0f);
    const ivec scale = (__builtin_convertvector(n, ivec) + 127) << 23;
    return pick(x == x, p * bits(scale), x);
}

inline vec sigmoid(vec x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); }

// tanh: an odd polynomial near 0, where the quotient of exponentials would cancel.
inline vec hyperbolic(vec x) {
    const ivec sign = (ivec)x & (ivec)splat(-0.0f);
    const vec a = bits((ivec)x & ~(ivec)splat(-0.0f));
    const vec far = splat(1.0f) - splat(2.0f) / (exponential(a + a) + splat(1.0f));
    const vec z = x * x;
    vec p = splat(-5.70498872745e-3f);
    p = p * z + splat(2.06390887954e-2f);
    p = p * z + splat(-5.37397155531e-2f);
    p = p * z + splat(1.33314422036e-1f);
    p = p * z + splat(-3.33332819422e-1f);
    const vec near = x + x * z * p;
    return pick(a < splat(0.625f), near, bits((ivec)far | sign));
}

// act(g, u) = left(g) right(u), with both factors' derivatives.
struct Gated {
    vec left, right, d_left, d_right;
};

struct Situ {
    float beta, linear_beta;  // linear_beta 0: the up branch is linear
    Gated operator()(vec g, vec u) const {
        const vec t = hyperbolic(g * splat(1 / beta)), s = sigmoid(g), one = splat(1.0f);
        Gated out{splat(beta) * t * s, u, s * ((one - t * t) + splat(beta) * t * (one - s)), one};
        if (linear_beta > 0) {
            const vec v = hyperbolic(u * splat(1 / linear_beta));
            out.right = splat(linear_beta) * v;
            out.d_right = one - v * v;
        }
        return out;
    }
};

struct SwiGLU {
    float clamp;  // infinity: none
    Gated operator()(vec g, vec u) const {
        const vec most = splat(clamp), one = splat(1.0f), none = splat(0.0f);
        const ivec g_free = g <= most, u_free = (u <= most) & (u >= -most);
        g = pick(g > most, most, g);
        u = pick(u > most, most, pick(u < -most, -most, u));
        const vec s = sigmoid(g);
        return {g * s, u, pick(g_free, s * (one + g * (one - s)), none), pick(u_free, one, none)};
    }
};

// The last few columns of a row are copied into a full vector and back.
template <typename Body>
void across(int64_t columns, Body body) {
    int64_t f = 0;
    for (; f + WIDE <= columns; f += WIDE) body(f, WIDE);
    if (f < columns) body(f, int(columns - f));
}
inline vec load_part(const float *p, int count) {
    if (count == WIDE) return load(p);
    float full[WIDE] = {};
    for (int i = 0; i < count; ++i) full[i] = p[i];
    return load(full);
}
inline void store_part(float *p, vec v, int count) {
    if (count == WIDE) return store(p, v);
    for (int i = 0; i < count; ++i) p[i] = v[i];
}

template <typename Act>
void gate(Act act, const float *pre, float *out, int64_t rows, int64_t f_size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *g = pre + 2 * row * f_size, *u = g + f_size;
        float *h = out + row * f_size;
        across(f_size, [&](int64_t f, int n) {
            const Gated a = act(load_part(g + f, n), load_part(u + f, n));
            store_part(h + f, a.left * a.right, n);
        });
    }
}

template <typename Act>
void gate_backward(Act act, const float *pre, const float *dh, const float *weight, float *d_pre,
                   float *h, float *dw, int64_t rows, int64_t f_size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float *g = pre + 2 * row * f_size, *u = g + f_size;
        float *d_g = d_pre + 2 * row * f_size, *d_u = d_g + f_size;
        const float *d = dh + row * f_size;
        const vec w = splat(weight[row]);
        vec sum = splat(0.0f);
        across(f_size, [&](int64_t f, int n) {
            const Gated a = act(load_part(g + f, n), load_part(u + f, n));
            const vec value = a.left * a.right, grad = load_part(d + f, n), scaled = grad * w;
            sum += grad * value;
            store_part(d_g + f, scaled * a.d_left * a.right, n);
            store_part(d_u + f, scaled * a.left * a.d_right, n);
            store_part(h + row * f_size + f, value, n);
        });
        dw[row] = total(sum);
    }
}

// Dot products of ROWS rows of x with COLS rows of w, both of length k.
template <int ROWS, int COLS>
inline void dots(const float *x, const float *w, float *out, int64_t k, int64_t n,
                 const float *ahead, int64_t ahead_size) {
    vec sum[ROWS][COLS] = {};
    int64_t i = 0;
    for (; i + WIDE <= k; i += WIDE) {
        if (i * COLS < ahead_size) {
            for (int c = 0; c < COLS; ++c) __builtin_prefetch(ahead + (i * COLS + c * WIDE));
        }
        vec a[ROWS];
        for (int r = 0; r < ROWS; ++r) a[r] = load(x + r * k + i);
        for (int c = 0; c < COLS; ++c) {
            const vec b = load(w + c * k + i);
            for (int r = 0; r < ROWS; ++r) sum[r][c] += a[r] * b;
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLS; ++c) {
            float value = total(sum[r][c]);
            for (int64_t j = i; j < k; ++j) value += x[r * k + j] * w[c * k + j];
            out[r * n + c] = value;
        }
}

template <int COLS>
void dots_of_rows(const float *x, const float *w, float *out, int64_t m, int64_t k, int64_t n,
                  bool more) {
    // The weights of the next columns are fetched while these are at work, a share per row block.
    const int64_t share = more ? COLS * k / ((m + 2) / 3) : 0;
    int64_t row = 0, block = 0;
    for (; row + 3 <= m; row += 3, ++block)
        dots<3, COLS>(x + row * k, w, out + row * n, k, n, w + COLS * k + block * share, share);
    if (m - row == 2) dots<2, COLS>(x + row * k, w, out + row * n, k, n, w, 0);
    if (m - row == 1) dots<1, COLS>(x + row * k, w, out + row * n, k, n, w, 0);
}

// out[ROWS, WIDE * VECS] (+)= x[ROWS, k] w[k, n], a block of columns of w.
template <int ROWS, int VECS>
inline void outer(const float *x, int64_t x_stride, const float *w, float *out, int64_t k,
                  int64_t n, bool add) {
    vec sum[ROWS][VECS];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < VECS; ++c)
            sum[r][c] = add ? load(out + r * n + c * WIDE) : splat(0.0f);
    for (int64_t i = 0; i < k; ++i) {
        vec b[VECS];
        for (int c = 0; c < VECS; ++c) b[c] = load(w + i * n + c * WIDE);
        for (int r = 0; r < ROWS; ++r) {
            const vec a = splat(x[r * x_stride + i]);
            for (int c = 0; c < VECS; ++c) sum[r][c] += a * b[c];
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < VECS; ++c) store(out + r * n + c * WIDE, sum[r][c]);
}

template <int VECS>
void outer_of_rows(const float *x, int64_t x_stride, const float *w, float *out, int64_t m,
                   int64_t k, int64_t n, bool add) {
    int64_t row = 0;
    for (; row + 6 <= m; row += 6)
        outer<6, VECS>(x + row * x_stride, x_stride, w, out + row * n, k, n, add);
    const float *rest = x + row * x_stride;
    float *to = out + row * n;
    switch (m - row) {
        case 5: outer<5, VECS>(rest, x_stride, w, to, k, n, add); break;
        case 4: outer<4, VECS>(rest, x_stride, w, to, k, n, add); break;
        case 3: outer<3, VECS>(rest, x_stride, w, to, k, n, add); break;
        case 2: outer<2, VECS>(rest, x_stride, w, to, k, n, add); break;
        case 1: outer<1, VECS>(rest, x_stride, w, to, k, n, add); break;
        default: break;
    }
}

constexpr int64_t DEEP = 64;  // rows of w that stay in the cache over all rows of x

// The columns [begin, end) of out = x w.
void product_columns(const float *x, const float *w, float *out, int64_t m, int64_t k, int64_t n,
                     int64_t begin, int64_t end) {
    for (int64_t deep = 0; deep < k; deep += DEEP) {
        const int64_t count = k - deep < DEEP ? k - deep : DEEP;
        const float *here = w + deep * n;
        const bool more = deep + count < k;
        int64_t column = begin;
        for (; column + 2 * WIDE <= end; column += 2 * WIDE) {
            if (more)
                for (int64_t i = 0; i < count; ++i)
                    __builtin_prefetch(here + (count + i) * n + column);
            outer_of_rows<2>(x + deep, k, here + column, out + column, m, count, n, deep > 0);
        }
        for (; column + WIDE <= end; column += WIDE)
            outer_of_rows<1>(x + deep, k, here + column, out + column, m, count, n, deep > 0);
        for (; column < end; ++column)
            for (int64_t row = 0; row < m; ++row) {
                float value = deep > 0 ? out[row * n + column] : 0.0f;
                for (int64_t i = 0; i < count; ++i)
                    value += x[row * k + deep + i] * here[i * n + column];
                out[row * n + column] = value;
            }
    }
}

inline uint64_t mixed(uint64_t h) {
    h = (h ^ (h >> 31)) * 0xBF58476D1CE4E5B9u;
    return (h ^ (h >> 31)) * 0x94D049BB133111EBu;
}

}  // namespace

extern "C" {

// A stable counting sort. ids [rows], those outside [0, experts) left out -> order, counts [experts].
void moe_sort(const int64_t *ids, int64_t rows, int64_t experts, int64_t *order, int64_t *counts) {
    std::memset(counts, 0, experts * sizeof(int64_t));
    for (int64_t i = 0; i < rows; ++i)
        if (ids[i] >= 0 && ids[i] < experts) ++counts[ids[i]];
    int64_t begin = 0;
    for (int64_t e = 0; e < experts; ++e) {
        const int64_t count = counts[e];
        counts[e] = begin;
        begin += count;
    }
    for (int64_t i = 0; i < rows; ++i)
        if (ids[i] >= 0 && ids[i] < experts) order[counts[ids[i]]++] = i;
    for (int64_t e = experts - 1; e > 0; --e) counts[e] -= counts[e - 1];
}

// x [*, d], tokens [rows] -> out [rows, d].
void moe_gather(const float *x, const int64_t *tokens, float *out, int64_t rows, int64_t d,
                int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        std::memcpy(out + row * d, x + tokens[row] * d, d * sizeof(float));
}

// out[tokens[row]] += weight[row] * y[row]; tokens are distinct, weight may be null for 1.
void moe_scatter(const float *y, const int64_t *tokens, const float *weight, float *out,
                 int64_t rows, int64_t d, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const float w = weight ? weight[row] : 1.0f;
        const float *from = y + row * d;
        float *to = out + tokens[row] * d;
        for (int64_t i = 0; i < d; ++i) to[i] += w * from[i];
    }
}

// pre [rows, 2F] -> out [rows, F]; situ where beta > 0, else swiglu with its clamp.
void moe_gate(const float *pre, float *out, int64_t rows, int64_t f, float beta,
              float linear_beta, float clamp, int threads) {
    if (beta > 0) gate(Situ{beta, linear_beta}, pre, out, rows, f, threads);
    else gate(SwiGLU{clamp}, pre, out, rows, f, threads);
}

// d_pre [rows, 2F], the gradient of pre for dh [rows, F] times weight [rows]; h = act(pre) and
// dw[row] = dh . h.
void moe_gate_backward(const float *pre, const float *dh, const float *weight, float *d_pre,
                       float *h, float *dw, int64_t rows, int64_t f, float beta,
                       float linear_beta, float clamp, int threads) {
    if (beta > 0)
        gate_backward(Situ{beta, linear_beta}, pre, dh, weight, d_pre, h, dw, rows, f, threads);
    else
        gate_backward(SwiGLU{clamp}, pre, dh, weight, d_pre, h, dw, rows, f, threads);
}

// x [rows, d] -> out: kept elements times factor, dropped ones 0. See ops/dropout.py.
void moe_dropout(const float *x, const int64_t *tokens, float *out, int64_t rows, int64_t d,
                 uint64_t key, int64_t least, float factor, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const uint64_t of_row = uint64_t(tokens[row]) * 0x9E3779B97F4A7C15u + key;
        for (int64_t i = 0; i < d; ++i) {
            const uint64_t h = mixed(of_row + uint64_t(i) * 0xD1B54A32D192ED03u);
            const int64_t uniform = int64_t(h >> 39) & 0xFFFFFF;
            out[row * d + i] = uniform >= least ? x[row * d + i] * factor : 0.0f;
        }
    }
}

// out [m, n] = x [m, k] w^T, w [n, k].
void moe_dots(const float *x, const float *w, float *out, int64_t m, int64_t k, int64_t n,
              int threads) {
    const int64_t tiles = (n + 3) / 4;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t column = tile * 4;
        const float *from = w + column * k;
        if (column + 4 <= n) {
            dots_of_rows<4>(x, from, out + column, m, k, n, column + 8 <= n);
        } else {
            for (int64_t c = column; c < n; ++c)
                dots_of_rows<1>(x, w + c * k, out + c, m, k, n, false);
        }
    }
}

// out [m, n] = x [m, k] w, w [k, n].
void moe_product(const float *x, const float *w, float *out, int64_t m, int64_t k, int64_t n,
                 int threads) {
    const int64_t tiles = (n + 2 * WIDE - 1) / (2 * WIDE);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int part = 0; part < threads; ++part) {
        const int64_t begin = tiles * part / threads * 2 * WIDE;
        const int64_t stop = tiles * (part + 1) / threads * 2 * WIDE;
        product_columns(x, w, out, m, k, n, begin, stop < n ? stop : n);
    }
}

}

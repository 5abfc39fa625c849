// Eight float lanes and the small dense pieces built on them. The compiler's vector extension maps
// them to AVX2 where the flags allow it, to narrower instructions elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace vec {

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef long stride;

static inline v8 load(const float *p) {
  v8 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

static inline void store(float *p, v8 x) { std::memcpy(p, &x, sizeof x); }

static inline v8 splat(float x) { return v8{x, x, x, x, x, x, x, x}; }

// exp(x) for x <= 88; below -87 the result stays at 1.2e-38. NaN stays NaN.
static inline v8 exp(v8 x) {
  const v8 lowest = splat(-87.3f);
  x = x < lowest ? lowest : x;
  const v8 magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const v8 t = x * 1.44269504f + magic;
  const v8 n = t - magic;
  const v8 r = x - n * 0.693359375f - n * -2.12194440e-4f;
  v8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  const i8 power = ((i8)t - (i8)magic + 127) << 23;
  return p * (v8)power;
}

#if defined(__clang__)
#define VEC_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define VEC_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (i8){__VA_ARGS__})
#endif

static inline void transpose8(v8 r[8]) {
  v8 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = VEC_SHUFFLE(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    t[i + 1] = VEC_SHUFFLE(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  v8 u[8];
  for (int b = 0; b < 8; b += 4)
    for (int i = 0; i < 2; i++) {
      u[b + i] = VEC_SHUFFLE(t[b + i], t[b + i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      u[b + i + 2] = VEC_SHUFFLE(t[b + i], t[b + i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    r[i] = VEC_SHUFFLE(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = VEC_SHUFFLE(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// out[n][m] = x[m][n]; both sizes are multiples of 8.
static inline void transpose(const float *x, stride ldx, int rows, int cols, float *out, stride ldo) {
  for (int i = 0; i < rows; i += 8)
    for (int j = 0; j < cols; j += 8) {
      v8 r[8];
      for (int s = 0; s < 8; s++) r[s] = load(x + (i + s) * ldx + j);
      transpose8(r);
      for (int s = 0; s < 8; s++) store(out + (j + s) * ldo + i, r[s]);
    }
}

// The lane sums of eight vectors.
static inline v8 sums(v8 r[8]) {
  transpose8(r);
  return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
}

static inline float sum(v8 x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// acc[r][w] += sum_k A(r, k) B[k][8 w ...], with A(r, k) at a[r * row + k * col].
template <int R, int W>
static inline void tile(v8 (&acc)[R][W], const float *a, stride row, stride col, const float *b,
                        stride ldb, int n) {
  for (int k = 0; k < n; k++, a += col, b += ldb) {
    v8 x[W];
    for (int w = 0; w < W; w++) x[w] = load(b + 8 * w);
    for (int r = 0; r < R; r++)
      for (int w = 0; w < W; w++) acc[r][w] += a[r * row] * x[w];
  }
}

template <int R, int W, class Finish>
static inline void block(int i, int j, int n, const float *a, stride row, stride col,
                         const float *b, stride ldb, const Finish &finish) {
  v8 acc[R][W] = {};
  tile<R, W>(acc, a + i * row, row, col, b + j, ldb, n);
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) finish(i + r, j + 8 * w, acc[r][w]);
}

// finish(i, j, (A B)[i][j..j+7]) for an m x width product over n; m is a multiple of 4, width of 8.
template <class Finish>
static inline void product(int m, int width, int n, const float *a, stride row, stride col,
                           const float *b, stride ldb, const Finish &finish) {
  int j = 0;
  for (; j + 16 <= width; j += 16) {
    int i = 0;
    for (; i + 6 <= m; i += 6) block<6, 2>(i, j, n, a, row, col, b, ldb, finish);
    if (i + 4 <= m) block<4, 2>(i, j, n, a, row, col, b, ldb, finish), i += 4;
    if (i + 2 <= m) block<2, 2>(i, j, n, a, row, col, b, ldb, finish);
  }
  if (j < width)
    for (int i = 0; i < m; i += 4) block<4, 1>(i, j, n, a, row, col, b, ldb, finish);
}

// Results below 1e-38 become zero while this lives: arithmetic on them is slow on some machines.
class FlushTiny {
#if defined(__SSE__)
  unsigned before = _mm_getcsr();

 public:
  FlushTiny() { _mm_setcsr(before | 0x8040); }
  ~FlushTiny() { _mm_setcsr(before); }
#else
 public:
  FlushTiny() {}
  ~FlushTiny() {}
#endif
};

static inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Rounded to nearest, ties to even; NaN stays NaN.
static inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace vec

// Passes over the scores of sparse attention and its indexer, for one block of queries.
//
// Rows are independent and each is reduced in one fixed order, so results do not depend on the
// number of threads. A row is masked by packed bits (bit j of byte i is column 8i + j) or, without
// bits, by a range of columns. Eight lanes are written as a GCC vector: AVX2 where the flags allow
// it, pairs of SSE or NEON registers elsewhere.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t kLanes = 8;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

constexpr float kLowest = -std::numeric_limits<float>::infinity();
const Ints kBit = {1, 2, 4, 8, 16, 32, 64, 128};
const Ints kLane = {0, 1, 2, 3, 4, 5, 6, 7};

inline Floats all(float x) { return Floats{} + x; }

inline Floats load(const float* from, int64_t count) {
  Floats x = {};
  if (count >= kLanes)
    std::memcpy(&x, from, sizeof x);
  else
    std::memcpy(&x, from, 4 * count);
  return x;
}

inline void store(float* to, Floats x, int64_t count) {
  if (count >= kLanes)
    std::memcpy(to, &x, sizeof x);
  else
    std::memcpy(to, &x, 4 * count);
}

inline Floats keep(Floats x, Ints mask) { return (Floats)((Ints)x & mask); }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// exp(x) to about one unit in the last place; below -87 it is 0, NaN stays NaN. With n = round(x / ln 2) and
// r = x - n ln 2, the series to r^7 leaves out less than 6e-9 of the value.
inline Floats exponential(Floats x) {
  const Floats limited = x < -87.0f ? all(-87.0f) : x;
  const Floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = limited * 1.44269504f + shift;
  const Floats n = shifted - shift;
  const Floats r = (limited - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Floats y = all(1.0f / 5040) * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const Ints power = ((Ints)shifted << 23) + (Ints)y;  // times 2^n, in the exponent's bits
  const Floats found = keep((Floats)power, x > -87.0f);
  return x == x ? found : x;
}

// Which of eight columns a row may use.
struct Mask {
  const uint8_t* bits;  // null: the range counts
  int32_t first, last;

  inline Ints at(int64_t column) const {
    if (bits) return ((Ints{} + int32_t(bits[column / 8])) & kBit) != 0;
    const Ints place = kLane + int32_t(column);
    return (place >= first) & (place < last);
  }
};

struct Masks {
  const uint8_t* bits;
  int64_t row_bytes;
  const int32_t *first, *last;

  inline Mask row(int64_t r) const {
    if (bits) return {bits + r * row_bytes, 0, 0};
    return {nullptr, first[r], last[r]};
  }
};

inline float sum_of(Floats x) {
  return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

bool has_nan(const float* s, int64_t width, Mask mask) {
  Ints found = {};
  for (int64_t j = 0; j < width; j += kLanes) {
    const Floats x = load(s + j, width - j);
    found |= (x != x) & mask.at(j);
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (found[lane]) return true;
  return false;
}

void softmax_row(float* s, int64_t width, Mask mask, float* lse, float* weight) {
  Floats top = all(kLowest);
  for (int64_t j = 0; j < width; j += kLanes) {
    const Floats x = load(s + j, width - j);
    top = larger(top, mask.at(j) ? x : all(kLowest));
  }
  float most = kLowest;
  for (int lane = 0; lane < kLanes; ++lane) most = top[lane] > most ? top[lane] : most;
  if (most == kLowest) {
    if (!has_nan(s, width, mask)) {  // nothing may be used
      std::memset(s, 0, 4 * width);
      *lse = *weight = 0;
      return;
    }
    most = 0;  // NaN is not greater than anything; it must reach the output all the same
  }
  double total = 0;
  constexpr int64_t kStretch = 64 * kLanes;  // summed in float before it joins the total
  for (int64_t begin = 0; begin < width; begin += kStretch) {
    const int64_t end = begin + kStretch < width ? begin + kStretch : width;
    Floats part = {};
    for (int64_t j = begin; j < end; j += kLanes) {
      const Floats p = keep(exponential(load(s + j, width - j) - most), mask.at(j));
      part += p;
      store(s + j, p, width - j);
    }
    total += sum_of(part);
  }
  *lse = most + float(std::log(total));
  *weight = float(1.0 / total);
}

void probabilities_row(float* s, int64_t width, Mask mask, float lse) {
  for (int64_t j = 0; j < width; j += kLanes) {
    const Floats p = exponential(load(s + j, width - j) - lse);
    store(s + j, keep(p, mask.at(j)), width - j);
  }
}

// Larger floats get larger keys; both zeros get the same, NaN that of infinity.
inline uint32_t order_key(float x) {
  const float plain = x == x ? x + 0.0f : std::numeric_limits<float>::infinity();
  uint32_t u;
  std::memcpy(&u, &plain, 4);
  return u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u);
}

// The key of rank `wanted` (1 is the largest) among `keys`, and how many equal ones are wanted.
// Radix select from the highest digit; `keys` is left with those that share the digits so far.
uint32_t threshold_key(std::vector<uint32_t>& keys, int64_t wanted, int64_t* room) {
  static const int kShift[3] = {21, 10, 0}, kBits[3] = {11, 11, 10};
  for (int pass = 0; pass < 3; ++pass) {
    const uint32_t digits = (1u << kBits[pass]) - 1;
    int64_t counts[2048] = {};
    for (const uint32_t key : keys) ++counts[key >> kShift[pass] & digits];
    uint32_t digit = digits;
    while (counts[digit] < wanted) wanted -= counts[digit--];
    size_t kept = 0;
    for (const uint32_t key : keys) {
      keys[kept] = key;
      kept += (key >> kShift[pass] & digits) == digit;
    }
    keys.resize(kept);
  }
  *room = wanted;
  return keys[0];
}

void select_row(
    const float* scores, int64_t first, int64_t last, int64_t top_k, uint8_t* bits,
    int64_t row_bytes, std::vector<uint32_t>& keys) {
  std::memset(bits, 0, row_bytes);
  if (last - first <= top_k) {
    for (int64_t j = first; j < last; ++j) bits[j / 8] |= uint8_t(1 << j % 8);
    return;
  }
  keys.resize(last - first);
  for (int64_t j = first; j < last; ++j) keys[j - first] = order_key(scores[j]);
  int64_t room;
  const uint32_t threshold = threshold_key(keys, top_k, &room);
  for (int64_t j = first; j < last; ++j) {
    const uint32_t key = order_key(scores[j]);
    const bool equal = key == threshold && room > 0;
    room -= equal;
    bits[j / 8] |= uint8_t((key > threshold || equal) << j % 8);
  }
}

}  // namespace

extern "C" {

// scores[r, j] += weights[r * weight_stride] * max(products[r, j], 0)
void attention_add_relu(
    float* scores, const float* products, const float* weights, int64_t weight_stride,
    int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const float w = weights[r * weight_stride];
    float* s = scores + r * width;
    const float* p = products + r * width;
    for (int64_t j = 0; j < width; ++j) s[j] += w * (p[j] < 0 ? 0.0f : p[j]);
  }
}

// bits[r]: the top_k of columns first[r] .. last[r] - 1, of equal scores the lowest columns.
void attention_select(
    const float* scores, const int32_t* first, const int32_t* last, int64_t rows, int64_t width,
    int64_t top_k, uint8_t* bits, int64_t row_bytes, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<uint32_t> keys;
#pragma omp for schedule(dynamic, 8)
    for (int64_t r = 0; r < rows; ++r)
      select_row(
          scores + r * width, first[r], last[r], top_k, bits + r * row_bytes, row_bytes, keys);
  }
}

// scores [heads, rows, width] to exp(s - max); lse and weight [heads, rows].
void attention_softmax(
    float* scores, int64_t heads, int64_t rows, int64_t width, const uint8_t* bits,
    int64_t row_bytes, const int32_t* first, const int32_t* last, float* lse, float* weight,
    int threads) {
  const Masks masks = {bits, row_bytes, first, last};
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t n = 0; n < heads * rows; ++n)
    softmax_row(scores + n * width, width, masks.row(n % rows), lse + n, weight + n);
}

// scores [heads, rows, width] to probabilities, given lse [heads, rows].
void attention_probabilities(
    float* scores, int64_t heads, int64_t rows, int64_t width, const uint8_t* bits,
    int64_t row_bytes, const int32_t* first, const int32_t* last, const float* lse, int threads) {
  const Masks masks = {bits, row_bytes, first, last};
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t n = 0; n < heads * rows; ++n)
    probabilities_row(scores + n * width, width, masks.row(n % rows), lse[n]);
}

// gradient[n, j] = p[n, j] * (gradient[n, j] - delta[n])
void attention_score_gradient(
    float* gradient, const float* p, const float* delta, int64_t rows, int64_t width,
    int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t n = 0; n < rows; ++n) {
    float* g = gradient + n * width;
    const float* q = p + n * width;
    const float d = delta[n];
    for (int64_t j = 0; j < width; ++j) g[j] = q[j] * (g[j] - d);
  }
}
}

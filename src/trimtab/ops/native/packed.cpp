// Packed matrices to float32 and back: MXFP4, INT4 in groups, FP8 in blocks.
//
// Layouts are those of ops/mxfp4.py, ops/int4.py and ops/fp8.py, and so is every bit of the result.
// Rows are independent, so the number of threads changes nothing.

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

const float E2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
const float INT4[16] = {-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f,
                        0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f};

float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// 2^(code - 127); 255 is NaN.
float e8m0(uint8_t code) {
    if (code == 255) return NAN;
    return code ? from_bits(uint32_t(code) << 23) : from_bits(1u << 22);
}

float bfloat16(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

uint16_t to_bfloat16(float value) {  // finite values, to nearest even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// One group of nibbles, low one first: out[i] = table[nibble i] * scale.
void unpack(const uint8_t *packed, int64_t columns, const float *table, float scale, float *out) {
    int64_t i = 0;
#ifdef __AVX2__
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    const __m256 factor = _mm256_set1_ps(scale);
    const __m128i mask = _mm_set1_epi8(15);
    for (; i + 16 <= columns; i += 16) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(packed + i / 2));
        const __m128i even = _mm_and_si128(bytes, mask);
        const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        const __m128i codes = _mm_unpacklo_epi8(even, odd);
        for (int half = 0; half < 2; ++half) {
            const __m256i code = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(codes, 8) : codes);
            // bit 3 of the code, moved to the sign, picks the upper half of the table
            const __m256 pick = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
            const __m256 value = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code),
                                                  _mm256_permutevar8x32_ps(high, code), pick);
            _mm256_storeu_ps(out + i + 8 * half, _mm256_mul_ps(value, factor));
        }
    }
#endif
    for (; i < columns; i += 2) {
        out[i] = table[packed[i / 2] & 15] * scale;
        out[i + 1] = table[packed[i / 2] >> 4] * scale;
    }
}

// E4M3 to float: exponent and mantissa move into place; below the smallest normal number the leading
// one that this adds is taken away again.
float e4m3(uint8_t code) {
    const uint32_t magnitude = code & 0x7F, bits = (magnitude << 20) + (120u << 23);
    float value = magnitude < 8 ? from_bits(bits + (1u << 23)) - 0x1p-6f : from_bits(bits);
    if (magnitude == 0x7F) value = NAN;
    return code & 0x80 ? -value : value;
}

// out[i] = E4M3 value i * scale.
void unpack_fp8(const uint8_t *values, int64_t count, float scale, float *out) {
    int64_t i = 0;
#ifdef __AVX2__
    const __m256 factor = _mm256_set1_ps(scale), one = _mm256_set1_ps(0x1p-6f);
    const __m256i low = _mm256_set1_epi32(0x7F), bias = _mm256_set1_epi32(120 << 23);
    const __m256i step = _mm256_set1_epi32(1 << 23), normal = _mm256_set1_epi32(8);
    for (; i + 8 <= count; i += 8) {
        const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(values + i)));
        const __m256i magnitude = _mm256_and_si256(code, low);
        const __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), bias);
        const __m256 tiny = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_add_epi32(bits, step)), one);
        __m256 value = _mm256_blendv_ps(_mm256_castsi256_ps(bits), tiny,
                                        _mm256_castsi256_ps(_mm256_cmpgt_epi32(normal, magnitude)));
        const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 7), 31);
        const __m256i rest = _mm256_or_si256(sign, _mm256_cmpeq_epi32(magnitude, low));
        value = _mm256_or_ps(value, _mm256_castsi256_ps(rest));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(value, factor));
    }
#endif
    for (; i < count; ++i) out[i] = e4m3(values[i]) * scale;
}

// Smallest e with largest <= 6 * 2^e, within what a scale byte can say.
int block_exponent(double largest) {
    if (largest == 0) return 0;
    int exponent;
    std::frexp(largest / 6.0, &exponent);
    if (std::ldexp(6.0, exponent - 1) >= largest) --exponent;
    return exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
}

// Index of the nearest E2M1 magnitude; halfway the even index wins.
uint8_t nearest(float m) {
    return uint8_t((m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                   (m >= 3.5f) + (m > 5.0f));
}

double largest_of(const float *values, int64_t count) {
    float found = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float m = std::fabs(values[i]);
        found = m > found ? m : found;
    }
    return found;
}

double code_of(double value, double scale) {
    const double code = std::nearbyint(value / scale);
    return code < -8 ? -8 : code > 7 ? 7 : code;
}

// Sum of squared errors under one scale. Sixteen at a time, so that the divisions are vectorised
// while the sum keeps its order.
double int4_error(const float *values, int64_t group, double scale) {
    double error = 0, part[16];
    for (int64_t begin = 0; begin < group; begin += 16) {
        const int64_t count = group - begin < 16 ? group - begin : 16;
        for (int64_t i = 0; i < count; ++i) {
            const double off = code_of(values[begin + i], scale) * scale - values[begin + i];
            part[i] = off * off;
        }
        for (int64_t i = 0; i < count; ++i) error += part[i];
    }
    return error;
}

// Of the scales largest / divisor, the one with the least squared error; the first of equals.
float int4_scale(const float *values, int64_t group) {
    static const double divisors[] = {8, 7.5, 7, 6, 5, 4, 3, 2, 1};
    const double largest = largest_of(values, group);
    double least = INFINITY;
    float best = 1.0f;
    for (double divisor : divisors) {
        const float scale = bfloat16(to_bfloat16(float(largest / divisor)));
        if (scale == 0) continue;
        const double error = int4_error(values, group, scale);
        if (error < least) least = error, best = scale;
    }
    return best;
}

}  // namespace

extern "C" {

// packed [rows, columns/2], scale [rows, columns/32] -> out [rows, columns].
void mxfp4_decode(const uint8_t *packed, const uint8_t *scale, float *out, int64_t rows,
                  int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < columns; i += 32)
            unpack(packed + (row * columns + i) / 2, 32, E2M1,
                   e8m0(scale[(row * columns + i) / 32]), out + row * columns + i);
}

// packed [rows, columns/2], scale [rows, columns/group] bfloat16 -> out [rows, columns].
void int4_decode(const uint8_t *packed, const uint16_t *scale, float *out, int64_t rows,
                 int64_t columns, int64_t group, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < columns; i += group)
            unpack(packed + (row * columns + i) / 2, group, INT4,
                   bfloat16(scale[(row * columns + i) / group]), out + row * columns + i);
}

// values [rows, columns] E4M3, scale [ceil(rows/height), ceil(columns/width)] -> out.
void fp8_decode(const uint8_t *values, const float *scale, float *out, int64_t rows,
                int64_t columns, int64_t height, int64_t width, int threads) {
    const int64_t across = (columns + width - 1) / width;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t block = 0; block < across; ++block) {
            const int64_t begin = row * columns + block * width;
            const int64_t left = columns - block * width, count = left < width ? left : width;
            const float factor = scale[row / height * across + block];
            unpack_fp8(values + begin, count, factor, out + begin);
        }
}

// values [rows, columns] -> packed [rows, columns/2], scale [rows, columns/32].
void mxfp4_encode(const float *values, uint8_t *packed, uint8_t *scale, int64_t rows,
                  int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < rows * columns / 32; ++block) {
        const float *x = values + block * 32;
        const int exponent = block_exponent(largest_of(x, 32));
        const float factor = e8m0(uint8_t(127 - exponent));
        uint8_t codes[32];
        for (int i = 0; i < 32; ++i)
            codes[i] = uint8_t(nearest(std::fabs(x[i]) * factor) + 8 * (std::signbit(x[i]) != 0));
        for (int i = 0; i < 16; ++i)
            packed[block * 16 + i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
        scale[block] = uint8_t(exponent + 127);
    }
}

// values [rows, columns] -> packed [rows, columns/2], scale [rows, columns/group] bfloat16.
void int4_encode(const float *values, uint8_t *packed, uint16_t *scale, int64_t rows,
                 int64_t columns, int64_t group, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t number = 0; number < rows * columns / group; ++number) {
        const float *x = values + number * group;
        const float factor = int4_scale(x, group);
        for (int64_t i = 0; i < group; i += 2) {
            const int low = int(code_of(x[i], factor)) + 8;
            const int high = int(code_of(x[i + 1], factor)) + 8;
            packed[(number * group + i) / 2] = uint8_t(low | high << 4);
        }
        scale[number] = to_bfloat16(factor);
    }
}

}

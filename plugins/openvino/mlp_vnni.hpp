// Two linears with GELU between them, and a norm, on CPUs with AVX-512 VNNI: the hidden values of a few tokens stay in L2.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "vnni.hpp"

namespace swin_quant {

constexpr size_t PANEL = 64;   // columns of W whose sums stay in registers; a last panel may have 16, 32 or 48
constexpr size_t TOKENS = 96;  // of a tile at most

// uint8 levels of `scale` around `zero`.
struct Levels {
    float scale;
    int zero;
};

// y = x W scales + bias, for x uint8 [tokens, in], W int8 [in, out], scales and bias [out].
struct Linear {
    size_t in, out;
    const int8_t* weights;
    const float *scales, *bias;
    Levels x;
};

// Layer normalisation of [width].
struct Norm {
    const float *gain, *bias;
    float epsilon;
};

// x + fc2(GELU(fc1(norm(x)))), or x + norm(fc2(GELU(fc1(x)))): what quantizes stands with each linear.
struct Branch {
    Linear first, second;
    Norm norm;
    bool norm_last;
};

inline bool is_fast(const Branch& branch) {
    return branch.first.in % 16 == 0 && branch.first.out % PANEL == 0;
}

#if defined(__x86_64__) && defined(__GNUC__)

// A linear in the order of its loops: panel by panel, four rows of W side by side, which one instruction multiplies.
class Packed {
public:
    // `behind_gelu`: the order of x is that in which `gelu_levels` leaves it.
    Packed(const Linear& linear, bool behind_gelu)
        : in(linear.in), out(linear.out), scales(linear.scales, linear.scales + out), bias(linear.bias, linear.bias + out),
          starts(out),
          m_memory(static_cast<int8_t*>(std::aligned_alloc(64, (in * out + 63) / 64 * 64)), &std::free) {
        if (!m_memory)
            throw std::bad_alloc();
        for (auto& scale : scales)
            scale *= linear.x.scale;
        auto* place = m_memory.get();
        for (size_t first = 0; first < out; first += PANEL)
            for (size_t group = 0; group < in / 4; ++group) {
                const size_t from = behind_gelu ? group / 16 * 16 + group % 4 * 4 + group % 16 / 4 : group;
                for (size_t column = first; column < std::min(first + PANEL, out); ++column)
                    for (size_t row = 4 * from; row < 4 * from + 4; ++row)
                        starts[column] -= linear.x.zero * (*place++ = linear.weights[row * out + column]);
            }
    }

    const int8_t* panel(size_t column) const {
        return m_memory.get() + column * in;
    }

    size_t in, out;
    std::vector<float> scales, bias;
    std::vector<int32_t> starts;  // of the sums: what the zero point adds

private:
    std::unique_ptr<int8_t, decltype(&std::free)> m_memory;
};

// GELU(x) = x / 2 + |x| erf(|x| / sqrt 2) / 2. The second part is a parabola in each of 32 segments: within 4e-5.
struct Gelu {
    static constexpr size_t SEGMENTS = 32;
    static constexpr float WIDTH = 0.14f;  // of a segment; its middle is a multiple of it. The last one is |x| / 2

    Gelu() {
        const auto exact = [](double x) { return x / 2 * std::erf(x * std::sqrt(0.5)); };
        for (size_t i = 0; i + 1 < SEGMENTS; ++i) {
            const double middle = i ? i * WIDTH : WIDTH / 4, step = (i ? WIDTH : WIDTH / 2) * std::sqrt(0.1875);
            const double low = exact(middle - step), high = exact(middle + step), between = exact(middle);
            const double slope = (high - low) / (2 * step), bend = ((high + low) / 2 - between) / (step * step);
            terms[0][i] = float(between - middle * slope + middle * middle * bend);
            terms[1][i] = float(slope - 2 * middle * bend);
            terms[2][i] = float(bend);
        }
        terms[1][SEGMENTS - 1] = 0.5f;
    }

    alignas(64) float terms[3][SEGMENTS] = {};
};

// The values of 16 segments and of 16 more, at `index`.
SWIN_QUANT_INLINE inline __m512 of_segment(const float* values, __m512i index) {
    return _mm512_permutex2var_ps(_mm512_load_ps(values), index, _mm512_load_ps(values + 16));
}

// GELU(x) * inverse + zero.
SWIN_QUANT_INLINE inline __m512 gelu_level(const Gelu& table, __m512 x, __m512 inverse, __m512 half, __m512 zero) {
    const __m512 size = _mm512_abs_ps(x), end = _mm512_set1_ps((Gelu::SEGMENTS - 1) * Gelu::WIDTH);
    const __m512 rounded = _mm512_fmadd_ps(_mm512_min_ps(size, end), _mm512_set1_ps(1 / Gelu::WIDTH), _mm512_set1_ps(8388608));
    const __m512i index = _mm512_castps_si512(rounded);  // its last bits
    __m512 even = _mm512_fmadd_ps(of_segment(table.terms[2], index), size, of_segment(table.terms[1], index));
    even = _mm512_fmadd_ps(even, size, of_segment(table.terms[0], index));
    return _mm512_fmadd_ps(even, inverse, _mm512_fmadd_ps(x, half, zero));
}

// `store(row, vector, y)` for ROWS tokens and 16 VECTORS columns: as many sums as hide the latency of a multiplication.
template <size_t ROWS, size_t VECTORS, typename Store>
SWIN_QUANT_INLINE inline void multiply(const Packed& linear, size_t column, const uint8_t* x, const Store& store) {
    const int8_t* weights = linear.panel(column);
    __m512i sums[ROWS * VECTORS];
    unrolled<ROWS * VECTORS>([&](auto i) SWIN_QUANT_INLINE {
        sums[i] = _mm512_loadu_si512(&linear.starts[column + i % VECTORS * 16]);
    });
    for (size_t k = 0; k < linear.in; k += 4, weights += 64 * VECTORS) {
        __m512i w[VECTORS];
        unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { w[v] = _mm512_load_si512(weights + 64 * v); });
        unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE {
            const __m512i values = four_of(x + r * linear.in + k);
            unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { add_products(sums[r * VECTORS + v], values, w[v]); });
        });
    }
    __m512 scale[VECTORS], bias[VECTORS];
    unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
        scale[v] = _mm512_loadu_ps(&linear.scales[column + 16 * v]);
        bias[v] = _mm512_loadu_ps(&linear.bias[column + 16 * v]);
    });
    unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE {
        __m512 y[VECTORS];
        unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
            y[v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r * VECTORS + v]), scale[v], bias[v]);
        });
        store(r, y);
    });
}

// Hidden levels: channel 16 q + 4 l + i of a panel lies at 16 l + 4 q + i.
template <size_t ROWS>
SWIN_QUANT_VNNI void gelu_levels(const Packed& first, const Levels& levels, size_t tokens, const uint8_t* x, uint8_t* hidden) {
    static const Gelu table;
    const __m512 inverse = _mm512_set1_ps(1 / levels.scale), half = _mm512_set1_ps(0.5f / levels.scale);
    const __m512 zero = _mm512_set1_ps(float(levels.zero));
    for (size_t column = 0; column < first.out; column += PANEL)
        for (size_t next = 0; next < tokens; next += ROWS) {
            const size_t row = std::min(next, tokens - ROWS);  // the last ones once more, and not one by one
            auto* result = hidden + row * first.out + column;
            multiply<ROWS, 4>(first, column, x + row * first.in, [&](auto r, const __m512(&y)[4]) SWIN_QUANT_INLINE {
                __m512i level[4];
                unrolled<4>([&](auto v) SWIN_QUANT_INLINE { level[v] = _mm512_cvtps_epi32(gelu_level(table, y[v], inverse, half, zero)); });
                const __m512i low = _mm512_packs_epi32(level[0], level[1]), high = _mm512_packs_epi32(level[2], level[3]);
                _mm512_storeu_si512(result + r * first.out, _mm512_packus_epi16(low, high));  // both saturate
            });
        }
}

// The rows of a loop over panels of 64 columns: as many as leave fewer of them to be computed twice.
inline size_t rows_of(size_t tokens) {
    return (tokens + 4) / 5 * 5 < (tokens + 5) / 6 * 6 ? 5 : 6;
}

// 16 values of a stream in float32 or, half to even, in bfloat16.
SWIN_QUANT_INLINE inline __m512 load(const float* x) {
    return _mm512_loadu_ps(x);
}

SWIN_QUANT_INLINE inline __m512 load(const uint16_t* x) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

SWIN_QUANT_INLINE inline void put(float* place, __m512 x) {
    _mm512_storeu_ps(place, x);
}

SWIN_QUANT_INLINE inline void put(uint16_t* place, __m512 x) {
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), half);
}

// fc2, plus `added`.
template <size_t ROWS, size_t VECTORS, typename T>
SWIN_QUANT_VNNI void outputs(const Packed& second, size_t column, size_t tokens, const uint8_t* hidden, const T* added, T* result) {
    if (ROWS > 1 && tokens < ROWS)
        return outputs<1, VECTORS>(second, column, tokens, hidden, added, result);
    for (size_t next = 0; next < tokens; next += ROWS) {
        const size_t row = std::min(next, tokens - ROWS), at = row * second.out + column;
        multiply<ROWS, VECTORS>(
            second, column, hidden + row * second.in, [&](auto r, const __m512(&y)[VECTORS]) SWIN_QUANT_INLINE {
                unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
                    const size_t place = at + r * second.out + 16 * v;
                    put(result + place, added ? _mm512_add_ps(y[v], load(added + place)) : y[v]);
                });
            });
    }
}

template <typename T>
SWIN_QUANT_VNNI void all_outputs(const Packed& second, size_t tokens, const uint8_t* hidden, const T* added, T* result) {
    for (size_t column = 0; column < second.out; column += PANEL) {
        const auto left = second.out - column;
        const auto loop = left >= PANEL ? (rows_of(tokens) == 5 ? outputs<5, 4, T> : outputs<6, 4, T>)
                          : left == 48  ? outputs<8, 3, T>
                          : left == 32  ? outputs<12, 2, T>
                                        : outputs<12, 1, T>;
        loop(second, column, tokens, hidden, added, result);
    }
}

// store(row, place, 16 values) of ROWS normalised rows: their sums do not wait for each other.
template <size_t ROWS, typename T, typename Store>
SWIN_QUANT_INLINE inline void normalise(const Norm& norm, size_t width, const T* x, const Store& store) {
    __m512 mean[ROWS], factor[ROWS];
    unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE { mean[r] = factor[r] = _mm512_setzero_ps(); });
    for (size_t i = 0; i < width; i += 16)
        unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE { mean[r] = _mm512_add_ps(mean[r], load(x + r * width + i)); });
    const float share = 1 / float(width);
    unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE { mean[r] = _mm512_set1_ps(_mm512_reduce_add_ps(mean[r]) * share); });
    for (size_t i = 0; i < width; i += 16)
        unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE {
            const __m512 distance = _mm512_sub_ps(load(x + r * width + i), mean[r]);
            factor[r] = _mm512_fmadd_ps(distance, distance, factor[r]);
        });
    unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE {
        factor[r] = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(factor[r]) * share + norm.epsilon));
    });
    for (size_t i = 0; i < width; i += 16) {
        const __m512 gain = load(norm.gain + i), bias = load(norm.bias + i);
        unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE {
            const __m512 y = _mm512_mul_ps(_mm512_sub_ps(load(x + r * width + i), mean[r]), factor[r]);
            store(r, i, _mm512_fmadd_ps(y, gain, bias));
        });
    }
}

template <typename T, typename Store>
SWIN_QUANT_INLINE inline void normalise_all(const Norm& norm, size_t width, size_t tokens, const T* x, const Store& store) {
    size_t row = 0;
    for (; row + 4 <= tokens; row += 4)
        normalise<4>(norm, width, x + row * width,
                     [&](auto r, size_t i, __m512 y) SWIN_QUANT_INLINE { store((row + r) * width + i, y); });
    for (; row < tokens; ++row)
        normalise<1>(norm, width, x + row * width,
                     [&](auto, size_t i, __m512 y) SWIN_QUANT_INLINE { store(row * width + i, y); });
}

// Levels of a stream, normalised if `norm` is not null.
template <typename T>
SWIN_QUANT_VNNI void levels_of(const Norm* norm, const Levels& levels, size_t width, size_t tokens, const T* x, uint8_t* result) {
    const __m512 inverse = _mm512_set1_ps(1 / levels.scale);
    const __m512i zero = _mm512_set1_epi32(levels.zero);
    const auto store = [&](size_t place, __m512 y) SWIN_QUANT_INLINE {
        const __m512i level = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(y, inverse)), zero);
        const __m128i bytes = _mm512_cvtusepi32_epi8(_mm512_max_epi32(level, _mm512_setzero_si512()));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(result + place), bytes);
    };
    if (norm)
        return normalise_all(*norm, width, tokens, x, store);
    for (size_t place = 0; place < tokens * width; place += 16)
        store(place, load(x + place));
}

// Both linears of a branch in the order of their loops.
struct PackedBranch {
    explicit PackedBranch(const Branch& branch) : first(branch.first, false), second(branch.second, true) {}

    Packed first, second;
};

// x [tokens, C], at most TOKENS -> result, which is not x. Room: levels [tokens, C], hidden [tokens, H], y [tokens, C].
template <typename T>
SWIN_QUANT_VNNI void branch_vnni(const Branch& branch, const PackedBranch& packed, size_t tokens, const T* x, uint8_t* levels,
                                 uint8_t* hidden, float* y, T* result) {
    const size_t width = branch.first.in;
    levels_of(branch.norm_last ? nullptr : &branch.norm, branch.first.x, width, tokens, x, levels);
    const auto loop = tokens < 6 ? gelu_levels<1> : rows_of(tokens) == 5 ? gelu_levels<5> : gelu_levels<6>;
    loop(packed.first, branch.second.x, tokens, levels, hidden);
    if (!branch.norm_last)
        return all_outputs(packed.second, tokens, hidden, x, result);
    all_outputs(packed.second, tokens, hidden, static_cast<const float*>(nullptr), y);
    normalise_all(branch.norm, width, tokens, y, [&](size_t place, __m512 normal) SWIN_QUANT_INLINE {
        put(result + place, _mm512_add_ps(normal, load(x + place)));
    });
}

#endif

}  // namespace swin_quant

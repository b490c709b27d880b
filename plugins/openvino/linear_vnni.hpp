// An int8 linear and a norm on CPUs with AVX-512 VNNI, for a stream in float32 or bfloat16.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>

#include "linear.hpp"
#include "vnni.hpp"

namespace swin_quant {

constexpr size_t PANEL = 64;   // columns of W whose sums stay in registers; a last panel may have 16, 32 or 48
constexpr size_t TOKENS = 96;  // of a tile of linears at most

using Order = std::vector<size_t>;  // which column of W stands at a place

inline Order in_order(size_t columns) {
    Order order(columns);
    std::iota(order.begin(), order.end(), 0);
    return order;
}

// The order whose sums come out as bytes in order: instructions that narrow four vectors mix parts of them.
inline Order for_bytes(size_t columns) {
    Order order(columns);
    for (size_t i = 0; i < columns; ++i)
        order[i] = i / PANEL * PANEL + i % 16 / 4 * 16 + i % PANEL / 16 * 4 + i % 4;
    return order;
}

#if defined(__x86_64__) && defined(__GNUC__)

// A linear in the order of its loops: panel by panel, four rows of W side by side, which one instruction multiplies.
class Packed {
public:
    Packed(const Linear& linear, const Order& order)
        : in(linear.in), out(linear.out), scales(out), bias(out), starts(out),
          m_memory(static_cast<int8_t*>(std::aligned_alloc(64, (in * out + 63) / 64 * 64)), &std::free) {
        if (!m_memory)
            throw std::bad_alloc();
        for (size_t place = 0; place < out; ++place) {
            scales[place] = linear.scales[order[place]] * linear.x.scale;
            bias[place] = linear.bias[order[place]];
        }
        auto* byte = m_memory.get();
        for (size_t first = 0; first < out; first += PANEL)
            for (size_t group = 0; group < in; group += 4)
                for (size_t place = first; place < std::min(first + PANEL, out); ++place)
                    for (size_t row = group; row < group + 4; ++row)
                        starts[place] -= linear.x.zero * (*byte++ = linear.weights[row * out + order[place]]);
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

// `store(row, vectors of y)` for ROWS tokens and 16 VECTORS columns: as many sums as hide the latency of a multiplication.
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
        store(size_t(r), y);
    });
}

// The rows of a loop over panels of 64 columns: as many as leave fewer of them to be computed twice.
inline size_t rows_of(size_t tokens) {
    return (tokens + 4) / 5 * 5 < (tokens + 5) / 6 * 6 ? 5 : 6;
}

// `store(row, column, vectors of y)` for all tokens and the 16 VECTORS columns from `column` on.
template <size_t ROWS, size_t VECTORS, typename Store>
SWIN_QUANT_VNNI void multiply_panel(const Packed& linear, size_t column, size_t tokens, const uint8_t* x, const Store& store) {
    if (ROWS > 1 && tokens < ROWS)
        return multiply_panel<1, VECTORS>(linear, column, tokens, x, store);
    for (size_t next = 0; next < tokens; next += ROWS) {
        const size_t row = std::min(next, tokens - ROWS);  // the last ones once more, and not one by one
        multiply<ROWS, VECTORS>(linear, column, x + row * linear.in, [&](size_t r, const __m512(&y)[VECTORS]) SWIN_QUANT_INLINE {
            store(row + r, column, y);
        });
    }
}

// The same for the columns from `first` on to `last`; `first` is a multiple of PANEL. x: [tokens, in].
template <typename Store>
SWIN_QUANT_VNNI void multiply_all(const Packed& linear, size_t first, size_t last, size_t tokens, const uint8_t* x,
                                  const Store& store) {
    for (size_t column = first; column < last; column += PANEL) {
        const auto left = last - column;
        const auto loop = left >= PANEL ? (rows_of(tokens) == 5 ? multiply_panel<5, 4, Store> : multiply_panel<6, 4, Store>)
                          : left == 48  ? multiply_panel<8, 3, Store>
                          : left == 32  ? (rows_of(tokens) == 5 ? multiply_panel<10, 2, Store> : multiply_panel<12, 2, Store>)
                                        : multiply_panel<12, 1, Store>;
        loop(linear, column, tokens, x, store);
    }
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

// store(row, place, 16 values) of ROWS normalised rows x[0], x[1] ...: their sums do not wait for each other.
template <size_t ROWS, typename T, typename Store>
SWIN_QUANT_INLINE inline void normalise(const Norm& norm, size_t width, const T* const* x, const Store& store) {
    __m512 mean[ROWS], factor[ROWS];
    unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE { mean[r] = factor[r] = _mm512_setzero_ps(); });
    for (size_t i = 0; i < width; i += 16)
        unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE { mean[r] = _mm512_add_ps(mean[r], load(x[r] + i)); });
    const float share = 1 / float(width);
    unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE { mean[r] = _mm512_set1_ps(_mm512_reduce_add_ps(mean[r]) * share); });
    for (size_t i = 0; i < width; i += 16)
        unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE {
            const __m512 distance = _mm512_sub_ps(load(x[r] + i), mean[r]);
            factor[r] = _mm512_fmadd_ps(distance, distance, factor[r]);
        });
    unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE {
        factor[r] = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(factor[r]) * share + norm.epsilon));
    });
    for (size_t i = 0; i < width; i += 16) {
        const __m512 gain = load(norm.gain + i), bias = load(norm.bias + i);
        unrolled<ROWS>([&](auto r) SWIN_QUANT_INLINE {
            const __m512 y = _mm512_mul_ps(_mm512_sub_ps(load(x[r] + i), mean[r]), factor[r]);
            store(size_t(r), i, _mm512_fmadd_ps(y, gain, bias));
        });
    }
}

// store(row, place, 16 values) of all rows, normalised if `norm` is not null. row(i): where row i begins.
template <typename Row, typename Store>
SWIN_QUANT_INLINE inline void each_row(const Norm* norm, size_t width, size_t rows, const Row& row, const Store& store) {
    using T = decltype(row(0));
    size_t next = 0;
    for (; norm && next + 4 <= rows; next += 4) {
        const T x[4] = {row(next), row(next + 1), row(next + 2), row(next + 3)};
        normalise<4>(*norm, width, x, [&](size_t r, size_t i, __m512 y) SWIN_QUANT_INLINE { store(next + r, i, y); });
    }
    for (; next < rows; ++next) {
        const T x = row(next);
        if (norm)
            normalise<1>(*norm, width, &x, [&](size_t, size_t i, __m512 y) SWIN_QUANT_INLINE { store(next, i, y); });
        else
            for (size_t i = 0; i < width; i += 16)
                store(next, i, load(x + i));
    }
}

// Levels [rows, width] of rows of a stream, normalised if `norm` is not null.
template <typename Row>
SWIN_QUANT_VNNI void levels_of(const Norm* norm, const Levels& levels, size_t width, size_t rows, const Row& row, uint8_t* result) {
    const __m512 inverse = _mm512_set1_ps(1 / levels.scale);
    const __m512i zero = _mm512_set1_epi32(levels.zero);
    each_row(norm, width, rows, row, [&](size_t token, size_t i, __m512 y) SWIN_QUANT_INLINE {
        const __m512i level = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(y, inverse)), zero);
        const __m128i bytes = _mm512_cvtusepi32_epi8(_mm512_max_epi32(level, _mm512_setzero_si512()));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(result + token * width + i), bytes);
    });
}

// The linear of all tokens, normalised if `norm` is not null, plus rows of the stream -> result [tokens, out]. Room: y, as
// the result, for the norm.
template <typename Row, typename T>
SWIN_QUANT_VNNI void add_outputs(const Packed& linear, const Norm* norm, size_t tokens, const uint8_t* x, const Row& row,
                                 float* y, T* result) {
    const size_t width = linear.out;
    if (!norm)
        return multiply_all(linear, 0, width, tokens, x, [&](size_t token, size_t column, const auto& sums) SWIN_QUANT_INLINE {
            unrolled<sizeof(sums) / 64>([&](auto v) SWIN_QUANT_INLINE {
                const size_t place = column + 16 * v;
                put(result + token * width + place, _mm512_add_ps(sums[v], load(row(token) + place)));
            });
        });
    multiply_all(linear, 0, width, tokens, x, [&](size_t token, size_t column, const auto& sums) SWIN_QUANT_INLINE {
        unrolled<sizeof(sums) / 64>([&](auto v) SWIN_QUANT_INLINE { put(y + token * width + column + 16 * v, sums[v]); });
    });
    const auto own = [&](size_t token) { return static_cast<const float*>(y + token * width); };
    each_row(norm, width, tokens, own, [&](size_t token, size_t i, __m512 normal) SWIN_QUANT_INLINE {
        put(result + token * width + i, _mm512_add_ps(normal, load(row(token) + i)));
    });
}

#endif

}  // namespace swin_quant

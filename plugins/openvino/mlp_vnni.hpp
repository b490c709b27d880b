// Two linears with GELU between them, and a norm, on CPUs with AVX-512 VNNI: the hidden values of a few tokens stay in L2.
#pragma once

#include "linear_vnni.hpp"

namespace swin_quant {

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

// Hidden levels, for `first` in the order `for_bytes`.
template <size_t ROWS>
SWIN_QUANT_VNNI void gelu_levels(const Packed& first, const Levels& levels, size_t tokens, const uint8_t* x, uint8_t* hidden) {
    static const Gelu table;
    const __m512 inverse = _mm512_set1_ps(1 / levels.scale), half = _mm512_set1_ps(0.5f / levels.scale);
    const __m512 zero = _mm512_set1_ps(float(levels.zero));
    for (size_t column = 0; column < first.out; column += PANEL)
        for (size_t next = 0; next < tokens; next += ROWS) {
            const size_t row = std::min(next, tokens - ROWS);  // the last ones once more, and not one by one
            auto* result = hidden + row * first.out + column;
            multiply<ROWS, 4>(first, column, x + row * first.in, [&](size_t r, const __m512(&y)[4]) SWIN_QUANT_INLINE {
                __m512i level[4];
                unrolled<4>([&](auto v) SWIN_QUANT_INLINE { level[v] = _mm512_cvtps_epi32(gelu_level(table, y[v], inverse, half, zero)); });
                _mm512_storeu_si512(result + r * first.out, narrowed(level));
            });
        }
}

// Both linears of a branch in the order of their loops.
struct PackedBranch {
    explicit PackedBranch(const Branch& branch)
        : first(branch.first, for_bytes(branch.first.out)), second(branch.second, in_order(branch.second.out)) {}

    Packed first, second;
};

// x [tokens, C], at most TOKENS -> result, which is not x. Room: levels [tokens, C], hidden [tokens, H], y [tokens, C].
template <typename T>
SWIN_QUANT_VNNI void branch_vnni(const Branch& branch, const PackedBranch& packed, size_t tokens, const T* x, uint8_t* levels,
                                 uint8_t* hidden, float* y, T* result) {
    const size_t width = branch.first.in;
    const auto row = [&](size_t token) { return x + token * width; };
    levels_of(branch.norm_last ? nullptr : &branch.norm, branch.first.x, width, tokens, row, levels);
    const auto loop = tokens < 6 ? gelu_levels<1> : rows_of(tokens) == 5 ? gelu_levels<5> : gelu_levels<6>;
    loop(packed.first, branch.second.x, tokens, levels, hidden);
    add_outputs(packed.second, branch.norm_last ? &branch.norm : nullptr, tokens, hidden, row, y, result);
}

#endif

}  // namespace swin_quant

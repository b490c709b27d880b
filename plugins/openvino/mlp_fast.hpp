// Two linears with an activation between them, and a norm, on vectors: the hidden values of a few tokens stay in L2.
#pragma once

#include "activation.hpp"
#include "linear_fast.hpp"

namespace swin_quant {

// x + fc2(f(fc1(norm(x)))), or x + norm(fc2(f(fc1(x)))): what quantizes stands with each linear.
struct Branch {
    Linear first, second;
    Norm norm;
    bool norm_last;
    const Activation* f;

    // Whether f of the first half of the first linear's values is multiplied by the other half.
    bool is_gated() const {
        return first.out != second.in;
    }
};

constexpr size_t HIDDEN = 64;  // what divides the hidden width: whole panels

inline bool is_fast(const Branch& branch) {
    return branch.first.in % WIDTHS == 0 && branch.second.in % HIDDEN == 0;
}

#if defined(SWIN_QUANT_TARGET)

// Levels of f(x) = x / 2 + even(|x|), before they are rounded, of x / scale. The second part is a polynomial in each segment:
// within 4e-5 of GELU.
struct Curve {
    static constexpr size_t TERMS = SEGMENTS == 32 ? 3 : 5;

    // The polynomial meets the curve at the roots of Chebyshev's. The last segment is |x| / 2, and the first one half as
    // wide; the middle of a segment is a multiple of its width.
    Curve(const Activation& f, const Levels& levels) {
        const double width = f.reach / (SEGMENTS - 1.5);
        last = float((SEGMENTS - 1) * width / levels.scale), inverse = float(levels.scale / width);
        for (size_t i = 0; i + 1 < SEGMENTS; ++i) {
            const double low = i ? (i - 0.5) * width : 0, high = (i + 0.5) * width;
            double at[TERMS], slope[TERMS], sum[TERMS] = {};  // Newton's divided differences
            for (size_t k = 0; k < TERMS; ++k) {
                at[k] = (low + high) / 2 + (high - low) / 2 * std::cos(M_PI * (k + 0.5) / TERMS);
                slope[k] = f.even(at[k]);
            }
            for (size_t order = 1; order < TERMS; ++order)
                for (size_t k = TERMS - 1; k >= order; --k)
                    slope[k] = (slope[k] - slope[k - 1]) / (at[k] - at[k - order]);
            for (size_t k = TERMS; k-- > 0;) {  // sum = sum (x - at[k]) + slope[k]
                for (size_t power = TERMS - 1; power > 0; --power)
                    sum[power] = sum[power - 1] - at[k] * sum[power];
                sum[0] = slope[k] - at[k] * sum[0];
            }
            for (size_t k = 0; k < TERMS; ++k)
                terms[k][i] = float(sum[k] * std::pow(double(levels.scale), double(k) - 1));
        }
        terms[1][SEGMENTS - 1] = 0.5f;
        for (auto& term : terms[0])
            term += float(levels.zero);
    }

    alignas(64) float terms[TERMS][SEGMENTS] = {};
    float last, inverse;  // the middle of the last segment, and segments in 1
};

SWIN_QUANT_INLINE inline Floats level_on(const Curve& curve, Floats x) {
    const Floats size = size_of(x), inside = smaller(size, floats_of(curve.last));
    const Ints index = bits_of(fma(inside, floats_of(curve.inverse), floats_of(8388608)));  // its last bits
    Floats even = looked_up(curve.terms[Curve::TERMS - 1], index);
    unrolled<Curve::TERMS - 1>([&](auto i) SWIN_QUANT_INLINE {
        even = fma(even, size, looked_up(curve.terms[Curve::TERMS - 2 - i], index));
    });
    return fma(x, floats_of(0.5f), even);
}

// Both linears of a branch in the order of their loops. The first one gives values by the scale of hidden levels.
struct PackedBranch {
    explicit PackedBranch(const Branch& branch)
        : first(branch.first, branch.is_gated() ? for_gates(branch.first.out) : for_bytes(branch.first.out)),
          second(branch.second, in_order(branch.second.out)),
          to_levels(branch.norm_last ? nullptr : &branch.norm, branch.first.x, branch.first.in),
          curve(*branch.f, branch.is_gated() ? Levels{1, 0} : branch.second.x), zero(float(branch.second.x.zero - 128)) {
        for (size_t i = 0; i < first.out; ++i) {
            const bool is_gate = branch.is_gated() && i / LANES % 2 == 0;
            first.scales[i] /= is_gate ? 1 : branch.second.x.scale;
            first.bias[i] /= is_gate ? 1 : branch.second.x.scale;
        }
    }

    Packed first, second;
    ToLevels to_levels;
    Curve curve;
    float zero;  // of gated levels as int8

private:
    // Gates and what they multiply vector by vector in turn.
    static Order for_gates(size_t columns) {
        Order order(columns);
        for (size_t i = 0; i < columns; ++i)
            order[i] = i / LANES % 2 * (columns / 2) + i / (2 * LANES) * LANES + i % LANES;
        return order;
    }
};

// x [tokens, C], at most TOKENS -> result, which is not x. Room: levels [tokens, C], hidden [tokens, H], y [tokens, C].
template <typename T>
SWIN_QUANT_TARGET void branch_fast(const Branch& branch, const PackedBranch& packed, size_t tokens, const T* x, uint8_t* levels,
                                 uint8_t* hidden, float* y, T* result) {
    const size_t width = branch.first.in;
    const auto row = [&](size_t token) { return x + token * width; };
    packed.to_levels(tokens, row, levels);
    const auto& first = packed.first;
    if (branch.is_gated())
        multiply_all(first, 0, first.out, tokens, levels, [&](size_t token, size_t column, const auto& y) SWIN_QUANT_INLINE {
            auto* to = hidden + token * branch.second.in + column / 2;
            unrolled<sizeof(y) / sizeof(Floats[2])>([&](auto v) SWIN_QUANT_INLINE {
                put_int8(to + LANES * v, fma(level_on(packed.curve, y[2 * v]), y[2 * v + 1], floats_of(packed.zero)), 0x80);
            });
        });
    else
        multiply_all(first, 0, first.out, tokens, levels, [&](size_t token, size_t column, const auto& y) SWIN_QUANT_INLINE {
            if constexpr (sizeof(y) == sizeof(Floats[4])) {  // HIDDEN leaves no panel of two vectors
                Ints level[4];
                unrolled<4>([&](auto v) SWIN_QUANT_INLINE { level[v] = rounded(level_on(packed.curve, y[v])); });
                put(hidden + token * first.out + column, narrowed(level));
            }
        });
    add_outputs(packed.second, branch.norm_last ? &branch.norm : nullptr, tokens, hidden, row, y,
                [&](size_t token) { return result + token * width; });
}

#endif

}  // namespace swin_quant

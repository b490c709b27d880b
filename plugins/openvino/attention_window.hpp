// Attention of one head in one window on int8 values: what it takes, and plain loops that compute it on any CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace swin_quant {

constexpr float MASKED = -100;             // what a logit of two tokens of different regions has added
constexpr float SMALLEST_LENGTH = 1e-12f;  // the divisor for a vector of zeros

// q, k and v of a head, int8 [length, depth] each; from row to row `stride` bytes.
struct Rows {
    const int8_t *q, *k, *v;
    size_t stride, length, depth;
};

// Factors of integers: of q k^T for logits, the softmax for its levels (0: it has none of its own), levels
// times v for those of the result.
struct Scales {
    float logits, shares, result;
};

// What logits have added: rows [length] of a head, `stride` apart; with stride 0 all have the same.
struct Added {
    const float* rows;
    size_t stride;
};

inline int8_t level(float value) {
    return int8_t(std::nearbyint(std::min(std::max(-128.0f, value), 127.0f)));  // NaN: -128
}

// Heads and windows of any size. constant: a row for each token; result: int8 rows, `stride` bytes apart.
inline void attend(const Rows& x, const Added& constant, int8_t* result, size_t stride, const Scales& scales) {
    std::vector<float> shares(x.length), sums(x.depth);  // of integers exact: below 2^24 up to 1024 tokens
    for (size_t i = 0; i < x.length; ++i) {
        float top = -INFINITY, total = 0;
        for (size_t j = 0; j < x.length; ++j) {
            int product = 0;
            for (size_t d = 0; d < x.depth; ++d)
                product += x.q[i * x.stride + d] * x.k[j * x.stride + d];
            shares[j] = product * scales.logits + constant.rows[i * constant.stride + j];
            top = std::max(top, shares[j]);
        }
        for (auto& share : shares)
            total += share = std::exp(share - top);
        std::fill(sums.begin(), sums.end(), 0);
        for (size_t j = 0; j < x.length; ++j) {
            const float exact = shares[j] / total, share = scales.shares ? level(exact * scales.shares) : exact;
            for (size_t d = 0; d < x.depth; ++d)
                sums[d] += share * x.v[j * x.stride + d];
        }
        for (size_t d = 0; d < x.depth; ++d)
            result[i * stride + d] = level(sums[d] * scales.result);
    }
}

}  // namespace swin_quant

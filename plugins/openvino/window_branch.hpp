// The branch of a block with its window attention: what it is, and plain loops that compute it on any CPU.
#pragma once

#include <numeric>

#include "attention_window.hpp"
#include "linear.hpp"

namespace swin_quant {

// x + proj(attention(qkv(norm(x)))), or x + norm(proj(attention(qkv(x)))) with `norm_last`, window by window.
struct WindowBranch {
    Linear qkv, proj;
    Norm norm;
    bool norm_last;
    size_t heads, length, tokens;  // of a window, of a picture
    const int32_t* places;         // [tokens]: where in x those of the first window are, of the second ...
    const float* bias;             // [heads, length, length]
    const uint8_t* regions;        // [rounds, length]: tokens of one region see each other; window i has row i % rounds
    size_t rounds;
    float of_q, of_k, of_v, of_shares;  // scales of levels; of_shares: 0 if the softmax is not rounded
    const float* lengths;               // [heads] that q has in V2, and k has 1; null in V1

    Scales scales() const {
        return {of_q * of_k, of_shares > 0 ? 1 / of_shares : 0, (of_shares > 0 ? of_shares : 1) * of_v / proj.x.scale};
    }
};

// One window, the same on any CPU. x: the picture, float32 [tokens, C]. result: [length, C].
inline void compute(const WindowBranch& branch, size_t window, const float* x, float* result) {
    const size_t length = branch.length, width = branch.proj.in, depth = width / branch.heads;
    const auto* regions = branch.regions + window % branch.rounds * length;
    const auto* places = branch.places + window * length;
    const float scales[] = {branch.of_q, branch.of_k, branch.of_v};
    std::vector<int8_t> levels(length * 3 * width), attended(length * width);
    for (size_t token = 0; token < length; ++token) {
        std::vector<float> y(x + places[token] * width, x + (places[token] + 1) * width);
        if (!branch.norm_last)
            normalise(branch.norm, y);
        y = multiplied(branch.qkv, y);
        for (size_t i = 0; i < 2 * branch.heads && branch.lengths; ++i) {
            auto* part = &y[i * depth];
            const float size = std::sqrt(std::inner_product(part, part + depth, part, 0.0f));
            for (size_t d = 0; d < depth; ++d)
                part[d] *= (i < branch.heads ? branch.lengths[i] : 1) / std::max(size, SMALLEST_LENGTH);
        }
        for (size_t i = 0; i < y.size(); ++i)
            levels[token * y.size() + i] = level(y[i] / scales[i / width]);
    }
    std::vector<float> constant(length * length);
    for (size_t head = 0; head < branch.heads; ++head) {
        for (size_t i = 0; i < length * length; ++i)
            constant[i] = branch.bias[head * length * length + i] +
                          (regions[i / length] == regions[i % length] ? 0 : MASKED);
        const auto* q = &levels[head * depth];
        const Rows rows{q, q + width, q + 2 * width, 3 * width, length, depth};
        attend(rows, constant.data(), &attended[head * depth], width, branch.scales());
    }
    for (size_t token = 0; token < length; ++token) {
        std::vector<float> y(&attended[token * width], &attended[token * width] + width);
        for (auto& value : y)
            value *= branch.proj.x.scale;
        y = multiplied(branch.proj, y);
        if (branch.norm_last)
            normalise(branch.norm, y);
        for (size_t i = 0; i < width; ++i)
            result[token * width + i] = x[places[token] * width + i] + y[i];
    }
}

}  // namespace swin_quant

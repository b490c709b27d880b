// The branch of a block with its window attention: what it is, and plain loops that compute it on any CPU.
#pragma once

#include <numeric>

#include "attention_window.hpp"
#include "linear.hpp"

namespace swin_quant {

// The windows of a picture: the places in it of their tokens, window by window. A token NOWHERE is zeros behind the norm,
// and has no result.
class Windows {
public:
    static constexpr int32_t NOWHERE = -1;

    // tokens: of a picture. stay: whether results stand where their tokens do, and not window by window. regions: uint8
    // [rounds, length]: tokens of one region see each other; window i has row i % rounds.
    Windows(std::vector<int32_t> all, size_t tokens, size_t length, bool stay, const uint8_t* regions, size_t rounds)
        : places(std::move(all)), tokens(tokens), length(length), stay(stay), m_room((length + 63) / 64 * 64),
          m_regions(rounds * m_room), m_is_divided(rounds) {
        for (size_t i = 0; i < rounds; ++i) {
            const auto* own = regions + i * length;
            std::copy(own, own + length, &m_regions[i * m_room]);
            m_is_divided[i] = std::any_of(own, own + length, [&](uint8_t region) { return region != *own; });
        }
    }

    // Of a window's tokens, with room for whole vectors behind them; null if they are all one.
    const uint8_t* regions_of(size_t window) const {
        const size_t round = window % m_is_divided.size();
        return m_is_divided[round] ? &m_regions[round * m_room] : nullptr;
    }

    std::vector<int32_t> places;
    size_t tokens, length;
    bool stay;

private:
    size_t m_room;
    std::vector<uint8_t> m_regions;
    std::vector<bool> m_is_divided;
};

// What q and k of a head become before they are rounded: normalised, then turned by the place of their token.
struct Turn {
    const float* norms;  // gain and offset of q's norm, then of k's, [4, depth]; null: none
    float epsilon;
    const float* table;  // factors of a channel, and of the one half a head away, [2, length, depth]; null: none

    explicit operator bool() const {
        return norms || table;
    }
};

// q (`part` 0) or k (1) of a head, in place.
inline void apply(const Turn& turn, size_t part, size_t token, size_t length, float* y, size_t depth) {
    if (turn.norms) {
        double mean = 0, variance = 0;
        for (size_t d = 0; d < depth; ++d)
            mean += y[d] / double(depth);
        for (size_t d = 0; d < depth; ++d)
            variance += (y[d] - mean) * (y[d] - mean) / double(depth);
        const auto *gain = turn.norms + 2 * part * depth, *offset = gain + depth;
        for (size_t d = 0; d < depth; ++d)
            y[d] = float((y[d] - mean) / std::sqrt(variance + turn.epsilon)) * gain[d] + offset[d];
    }
    if (turn.table) {
        const std::vector<float> own(y, y + depth);
        const auto *factors = turn.table + token * depth, *others = factors + length * depth;
        for (size_t d = 0; d < depth; ++d)
            y[d] = own[d] * factors[d] + own[(d + depth / 2) % depth] * others[d];
    }
}

// x + proj(attention(qkv(norm(x)))), or x + norm(proj(attention(qkv(x)))) with `norm_last`, window by window.
struct WindowBranch {
    Linear qkv, proj;
    Norm norm;
    bool norm_last;
    size_t heads, length;               // of a window
    const float* bias;                  // [heads, length, length]; null: none
    float of_q, of_k, of_v, of_shares;  // scales of levels; of_shares: 0 if the softmax is not rounded
    const float* lengths;               // [heads] that q has in V2, and k has 1; null in V1
    Turn turn;                          // none in a window of Swin

    Scales scales() const {
        return {of_q * of_k, of_shares > 0 ? 1 / of_shares : 0, (of_shares > 0 ? of_shares : 1) * of_v / proj.x.scale};
    }
};

// One window, the same on any CPU. x: the picture, float32 [tokens, C], as the result where they `stay`; else it is
// [windows, length, C].
inline void compute(const WindowBranch& branch, const Windows& windows, size_t window, const float* x, float* result) {
    const size_t length = branch.length, width = branch.proj.in, depth = width / branch.heads;
    const auto* regions = windows.regions_of(window);
    const auto* places = &windows.places[window * length];
    const float scales[] = {branch.of_q, branch.of_k, branch.of_v};
    std::vector<int8_t> levels(length * 3 * width), attended(length * width);
    for (size_t token = 0; token < length; ++token) {
        std::vector<float> y(width);
        if (places[token] != Windows::NOWHERE) {
            y.assign(x + places[token] * width, x + (places[token] + 1) * width);
            if (!branch.norm_last)
                normalise(branch.norm, y);
        }
        y = multiplied(branch.qkv, y);
        for (size_t i = 0; i < 2 * branch.heads && branch.lengths; ++i) {
            auto* part = &y[i * depth];
            const float size = std::sqrt(std::inner_product(part, part + depth, part, 0.0f));
            for (size_t d = 0; d < depth; ++d)
                part[d] *= (i < branch.heads ? branch.lengths[i] : 1) / std::max(size, SMALLEST_LENGTH);
        }
        for (size_t i = 0; i < 2 * branch.heads && branch.turn; ++i)
            apply(branch.turn, i / branch.heads, token, length, &y[i * depth], depth);
        for (size_t i = 0; i < y.size(); ++i)
            levels[token * y.size() + i] = level(y[i] / scales[i / width]);
    }
    std::vector<float> constant(length * length);
    for (size_t head = 0; head < branch.heads; ++head) {
        for (size_t i = 0; i < length * length; ++i)
            constant[i] = (branch.bias ? branch.bias[head * length * length + i] : 0) +
                          (!regions || regions[i / length] == regions[i % length] ? 0 : MASKED);
        const auto* q = &levels[head * depth];
        const Rows rows{q, q + width, q + 2 * width, 3 * width, length, depth};
        attend(rows, {constant.data(), length}, &attended[head * depth], width, branch.scales());
    }
    for (size_t token = 0; token < length; ++token) {
        if (places[token] == Windows::NOWHERE)
            continue;
        std::vector<float> y(&attended[token * width], &attended[token * width] + width);
        for (auto& value : y)
            value *= branch.proj.x.scale;
        y = multiplied(branch.proj, y);
        if (branch.norm_last)
            normalise(branch.norm, y);
        auto* to = result + (windows.stay ? size_t(places[token]) : window * length + token) * width;
        for (size_t i = 0; i < width; ++i)
            to[i] = x[places[token] * width + i] + y[i];
    }
}

}  // namespace swin_quant

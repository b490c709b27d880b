// The branch of a block with its window attention, on vectors: a window's q, k and v stay in L1.
#pragma once

#include "attention_fast.hpp"
#include "linear_fast.hpp"
#include "window_branch.hpp"

namespace swin_quant {

template <typename Kind>
bool fits(const WindowBranch& branch) {
    return branch.proj.in % branch.heads == 0 && fits<Kind>(branch.proj.in / branch.heads, branch.length);
}

inline bool is_fast(const WindowBranch& branch) {
    return branch.proj.in % WIDTHS == 0 && (fits<Narrow>(branch) || (fits<Wide>(branch) && !branch.lengths));
}

#if defined(SWIN_QUANT_TARGET)

constexpr size_t COLUMNS = 3 * 64;  // of q, k and v of heads that are computed at a time, side by side: whole panels

template <typename Kind>
constexpr size_t HEADS = COLUMNS / (3 * Kind::DEPTH);  // that are

alignas(64) constexpr float NO_BIAS[Wide::LENGTH] = {};

// Weights in the order of loops.
struct PackedWindowBranch {
    explicit PackedWindowBranch(const WindowBranch& branch)
        : qkv(branch.qkv, by_head(branch)), proj(branch.proj, in_order(branch.proj.out)),
          to_levels(branch.norm_last ? nullptr : &branch.norm, branch.qkv.x, branch.qkv.in),
          gains(3 * branch.heads) {
        const float scales[] = {branch.of_q, branch.of_k, branch.of_v};
        for (size_t i = 0; i < gains.size(); ++i)
            gains[i] = (branch.lengths && i % 3 == 0 ? branch.lengths[i / 3] : 1) / scales[i % 3];
        for (size_t place = 0; place < qkv.out && !branch.lengths && !branch.turn; ++place) {
            qkv.scales[place] *= gains[place / depth_of(branch)];
            qkv.bias[place] *= gains[place / depth_of(branch)];
        }
    }

    Packed qkv, proj;
    ToLevels to_levels;
    std::vector<float> gains;  // of q, k and v of each head: V2's length of a vector, by the scale of levels

private:
    static Order by_head(const WindowBranch& branch) {
        Order order(branch.qkv.out);
        const size_t depth = depth_of(branch), head = 3 * depth;
        for (size_t i = 0; i < order.size(); ++i)
            order[i] = i % head / depth * branch.proj.in + i / head * depth + i % depth;
        return order;
    }

    static size_t depth_of(const WindowBranch& branch) {
        return branch.proj.in / branch.heads;
    }
};

// Levels of q, k and v [tokens, COLUMNS] of the heads from `first` on, from `x` [tokens, C].
template <typename Kind, bool IS_COSINE>
SWIN_QUANT_TARGET void qkv_levels(const PackedWindowBranch& packed, size_t first, size_t last, size_t tokens, const uint8_t* x,
                                int8_t* result) {
    constexpr size_t DEPTH = Kind::DEPTH, HEAD = 3 * DEPTH;
    const size_t from = first * HEAD;
    multiply_all(packed.qkv, from, last * HEAD, tokens, x, [&](size_t token, size_t column, const auto& y) SWIN_QUANT_INLINE {
        auto* row = result + token * COLUMNS + column - from;
        if constexpr (IS_COSINE) {
            constexpr size_t VECTORS = DEPTH / LANES, PARTS = sizeof(y) / sizeof(Floats) / VECTORS;  // of a head: q, k or v
            unrolled<PARTS>([&](auto p) SWIN_QUANT_INLINE {
                const size_t part = column / DEPTH + p;
                Floats squares = floats_of(0);
                unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { squares = fma(y[VECTORS * p + v], y[VECTORS * p + v], squares); });
                const float size = part % 3 == 2 ? 1 : std::max(std::sqrt(sum_of(squares)), SMALLEST_LENGTH);
                const Floats gain = floats_of(packed.gains[part] / size);
                unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { put_int8(row + DEPTH * p + LANES * v, y[VECTORS * p + v] * gain, 0); });
            });
        } else {
            unrolled<sizeof(y) / sizeof(Floats)>([&](auto v) SWIN_QUANT_INLINE { put_int8(row + LANES * v, y[v], 0); });
        }
    });
}

// The same with a turn. Room: y [tokens, COLUMNS].
template <typename Kind>
SWIN_QUANT_TARGET void turned_levels(const PackedWindowBranch& packed, const Turn& turn, size_t first, size_t last, size_t tokens,
                                     const uint8_t* x, float* y, int8_t* result) {
    constexpr size_t DEPTH = Kind::DEPTH, VECTORS = DEPTH / LANES;
    const size_t from = first * 3 * DEPTH;
    multiply_all(packed.qkv, from, last * 3 * DEPTH, tokens, x, [&](size_t token, size_t column, const auto& sums) SWIN_QUANT_INLINE {
        auto* row = y + token * COLUMNS + column - from;
        unrolled<sizeof(sums) / sizeof(Floats)>([&](auto v) SWIN_QUANT_INLINE { put(row + LANES * v, sums[v]); });
    });
    const auto each = [](const auto& work) SWIN_QUANT_INLINE { unrolled<VECTORS>(work); };
    for (size_t i = 0; i < tokens * 3 * (last - first); ++i) {
        const size_t token = i / (3 * (last - first)), part = i % (3 * (last - first)), place = token * COLUMNS + part * DEPTH;
        Floats own[VECTORS];
        each([&](auto v) SWIN_QUANT_INLINE { own[v] = load(y + place + LANES * v); });
        if (turn.norms && part % 3 < 2) {
            const auto *gain = turn.norms + 2 * (part % 3) * DEPTH, *offset = gain + DEPTH;
            Floats sum = floats_of(0), squares = sum;
            each([&](auto v) SWIN_QUANT_INLINE { sum = sum + own[v]; });
            const Floats mean = floats_of(sum_of(sum) / DEPTH);
            each([&](auto v) SWIN_QUANT_INLINE {
                own[v] = own[v] - mean;
                squares = fma(own[v], own[v], squares);
            });
            const Floats factor = floats_of(1 / std::sqrt(sum_of(squares) / DEPTH + turn.epsilon));
            each([&](auto v) SWIN_QUANT_INLINE { own[v] = fma(own[v] * factor, load(gain + LANES * v), load(offset + LANES * v)); });
        }
        if (turn.table && part % 3 < 2) {
            const auto *factors = turn.table + token * DEPTH, *others = factors + tokens * DEPTH;
            Floats turned[VECTORS];
            each([&](auto v) SWIN_QUANT_INLINE {
                const Floats other = own[(v + VECTORS / 2) % VECTORS] * load(others + LANES * v);
                turned[v] = fma(own[v], load(factors + LANES * v), other);
            });
            each([&](auto v) SWIN_QUANT_INLINE { own[v] = turned[v]; });
        }
        const Floats gain = floats_of(packed.gains[3 * first + part]);
        each([&](auto v) SWIN_QUANT_INLINE { put_int8(result + place + LANES * v, own[v] * gain, 0); });
    }
}

// The heads from `first` on to `last` of a window: levels of their results, into `attended` [length, C]. x: the picture.
// Room: levels [length, C], qkv [length, COLUMNS], and behind it for a turn floats [length, COLUMNS].
template <typename Kind, typename T>
SWIN_QUANT_TARGET void attend_heads(const WindowBranch& branch, const PackedWindowBranch& packed, const Windows& windows,
                                  size_t window, size_t first, size_t last, const T* x, uint8_t* levels, int8_t* qkv,
                                  uint8_t* attended) {
    constexpr size_t DEPTH = Kind::DEPTH;
    const size_t length = branch.length, width = branch.proj.in;
    const auto* places = &windows.places[window * length];
    const auto row = [&](size_t token) { return x + size_t(std::max(places[token], 0)) * width; };
    packed.to_levels(length, row, levels);
    for (size_t token = 0; token < length; ++token)
        if (places[token] == Windows::NOWHERE)
            std::memset(levels + token * width, branch.qkv.x.zero, width);
    auto of_heads = qkv_levels<Kind, false>;
    if constexpr (DEPTH == Narrow::DEPTH)
        of_heads = branch.lengths ? qkv_levels<Kind, true> : of_heads;
    for (size_t head = first; head < last; head += HEADS<Kind>) {
        const size_t next = std::min(head + HEADS<Kind>, last);
        if (branch.turn)
            turned_levels<Kind>(packed, branch.turn, head, next, length, levels, reinterpret_cast<float*>(qkv + length * COLUMNS), qkv);
        else
            of_heads(packed, head, next, length, levels, qkv);
        for (size_t i = head; i < next; ++i) {
            const auto* q = qkv + (i - head) * 3 * DEPTH;
            const Rows rows{q, q + DEPTH, q + 2 * DEPTH, COLUMNS, length, DEPTH};
            const Added added = branch.bias ? Added{branch.bias + i * length * length, length} : Added{NO_BIAS, 0};
            attend_fast<Kind>(rows, added, windows.regions_of(window), attended + i * DEPTH, width, 0x80, branch.scales());
        }
    }
}

#endif

}  // namespace swin_quant

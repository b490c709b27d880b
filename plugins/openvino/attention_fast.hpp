// Attention of one head in one window on vectors: heads of 32 channels in windows of at most 576 tokens, and heads of 64
// channels in windows of at most 1024.
#pragma once

#include "attention_window.hpp"
#include "vectors.hpp"

namespace swin_quant {

constexpr float POWERS = 255;  // levels of exp(logit - largest) where the softmax has none

// A head that has fast loops: its channels, the most tokens of a window, and the room for these, which leaves rows in
// different sets of a cache.
template <size_t CHANNELS, size_t MOST, size_t ROOM>
struct Head {
    static constexpr size_t DEPTH = CHANNELS, LENGTH = MOST, TOKENS = ROOM;
};
using Narrow = Head<32, 576, 576>;
using Wide = Head<64, 1024, 1088>;

template <typename Kind>
bool fits(size_t depth, size_t length) {
    return depth == Kind::DEPTH && length <= Kind::LENGTH;
}

#if defined(SWIN_QUANT_TARGET)

constexpr size_t KEYS = 4 * LANES;            // at a time
constexpr size_t ACROSS = LANES == 16 ? 4 : 2;  // vectors of keys of a product with four rows: as registers allow
constexpr size_t DOWN = LANES == 16 ? 8 : 4;    // rows of a product with two vectors of values

// Half of `value` to each place.
SWIN_QUANT_INLINE inline void store_halves(void* first, void* second, __m256i value) {
    _mm_store_si128(static_cast<__m128i*>(first), _mm256_castsi256_si128(value));
    _mm_store_si128(static_cast<__m128i*>(second), _mm256_extracti128_si256(value, 1));
}

// store(r, v, products) of COUNT rows and LANES VECTORS columns. A step multiplies the four bytes at row(k, r) by the vectors
// at columns(k); one of both is uint8.
template <size_t COUNT, size_t VECTORS, bool IS_ROW_SIGNED, typename Row, typename Columns, typename Store>
SWIN_QUANT_INLINE inline void multiply_bytes(size_t steps, const Row& row, const Columns& columns, const Store& store) {
    Ints sums[COUNT * VECTORS];
    unrolled<COUNT * VECTORS>([&](auto i) SWIN_QUANT_INLINE { sums[i] = ints_of(0); });
#    pragma GCC unroll 8  // in a loop g++ keeps copies of the sums
    for (size_t k = 0; k < steps; ++k) {
        Ints found[VECTORS];
        unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { found[v] = reinterpret_cast<const Ints*>(columns(k))[v]; });
        unrolled<COUNT>([&](auto r) SWIN_QUANT_INLINE {
            const Ints x = four_of(row(k, r));
            unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
                if constexpr (IS_ROW_SIGNED)
                    add_products(sums[r * VECTORS + v], of_uint8(found[v]), of_int8(x));
                else
                    add_products(sums[r * VECTORS + v], of_uint8(x), of_int8(found[v]));
            });
        });
    }
    unrolled<COUNT>([&](auto r) SWIN_QUANT_INLINE {
        unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { store(r, v, sums[r * VECTORS + v]); });
    });
}

constexpr size_t QUERIES = 16;  // at a time, by fours, so that a load serves four products

// A head of a window between its three steps, each a function of its own: together they need more registers than there are.
template <typename Kind>
struct Room {
    alignas(64) uint8_t keys[Kind::DEPTH / 4][Kind::TOKENS][4];
    alignas(64) int8_t values[Kind::TOKENS / 4][Kind::DEPTH][4];
    alignas(64) float logits[QUERIES][Kind::TOKENS];
    alignas(64) uint8_t shares[QUERIES][Kind::TOKENS];
    Floats tops[QUERIES / 4], factors[QUERIES / 4];  // of four queries, as `joined` has them
    size_t vectors;                                  // that hold a value for each key
};

// k as uint8 and v of a head, as one instruction multiplies them: four channels, and four tokens, side by side.
template <typename Kind>
SWIN_QUANT_INLINE inline void interleave(const Rows& x, Room<Kind>& room) {
    constexpr size_t HALF = 32;                           // channels at a time
    const __m256i flip = _mm256_set1_epi8(char(0x80));  // k + 128 is uint8; a row's logits all move by 128 sum(q): no matter
    for (size_t from = 0; from < Kind::DEPTH; from += HALF)
        for (size_t j = 0; j < x.length; j += 4) {
            __m256i k[4], v[4];
            unrolled<4>([&](auto i) SWIN_QUANT_INLINE {
                const size_t row = std::min(j + i, x.length - 1) * x.stride + from;  // shares of tokens behind the last are 0
                k[i] = _mm256_xor_si256(flip, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x.k + row)));
                v[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x.v + row));
            });
            __m256i ab = _mm256_unpacklo_epi32(k[0], k[1]), AB = _mm256_unpackhi_epi32(k[0], k[1]);
            __m256i cd = _mm256_unpacklo_epi32(k[2], k[3]), CD = _mm256_unpackhi_epi32(k[2], k[3]);
            auto* keys = room.keys + from / 4;
            store_halves(keys[0][j], keys[4][j], _mm256_unpacklo_epi64(ab, cd));
            store_halves(keys[1][j], keys[5][j], _mm256_unpackhi_epi64(ab, cd));
            store_halves(keys[2][j], keys[6][j], _mm256_unpacklo_epi64(AB, CD));
            store_halves(keys[3][j], keys[7][j], _mm256_unpackhi_epi64(AB, CD));
            ab = _mm256_unpacklo_epi8(v[0], v[1]), AB = _mm256_unpackhi_epi8(v[0], v[1]);
            cd = _mm256_unpacklo_epi8(v[2], v[3]), CD = _mm256_unpackhi_epi8(v[2], v[3]);
            auto* rows = room.values[j / 4] + from;
            store_halves(rows[0], rows[16], _mm256_unpacklo_epi16(ab, cd));
            store_halves(rows[4], rows[20], _mm256_unpackhi_epi16(ab, cd));
            store_halves(rows[8], rows[24], _mm256_unpacklo_epi16(AB, CD));
            store_halves(rows[12], rows[28], _mm256_unpackhi_epi16(AB, CD));
        }
}

// Logits of the queries from `first` on. regions, added: as of `attend_fast`.
template <bool HAS_REGIONS, typename Kind>
[[gnu::noinline]] SWIN_QUANT_TARGET void logits_of(const Rows& x, size_t first, size_t queries, const Added& constant,
                                                        const uint8_t* regions, float factor, Room<Kind>& room) {
    const Floats never = floats_of(-1e30f), masked = floats_of(MASKED), scale = floats_of(factor);
    for (size_t i = 0; i < queries; i += 4) {
        const int8_t* q[4];
        size_t query[4];
        Floats top[4];
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            query[r] = std::min(first + i + r, x.length - 1);
            q[r] = x.q + query[r] * x.stride;
            top[r] = never;
        });
        size_t j = 0;
        const auto some_keys = [&](auto across) SWIN_QUANT_INLINE {
            First of_keys_there[across];
            unrolled<across>([&](auto v) SWIN_QUANT_INLINE {
                const size_t key = j + LANES * v;
                of_keys_there[v] = first_of(std::max(key, x.length) - key);
            });
            const auto four_channels = [&](size_t k, size_t r) SWIN_QUANT_INLINE { return q[r] + 4 * k; };
            const auto of_keys = [&](size_t k) SWIN_QUANT_INLINE { return room.keys[k][j]; };
            const auto finish = [&](auto r, auto v, Ints product) SWIN_QUANT_INLINE {
                const size_t key = j + LANES * v;
                Floats added = load_first(constant.rows + query[r] * constant.stride + key, of_keys_there[v], never);
                if constexpr (HAS_REGIONS)
                    added = added_apart(added, masked, regions + key, regions[query[r]]);
                const Floats logit = fma(to_floats(product), scale, added);
                put(room.logits[i + r] + key, logit);
                top[r] = larger(top[r], logit);
            };
            multiply_bytes<4, across, true>(Kind::DEPTH / 4, four_channels, of_keys, finish);
            j += across * LANES;
        };
        while (j + ACROSS * LANES <= room.vectors * LANES)
            some_keys(std::integral_constant<size_t, ACROSS>());
        while (j < room.vectors * LANES)
            some_keys(std::integral_constant<size_t, 1>());
        room.tops[i / 4] = joined<false>(top);
    }
}

// Levels of the softmax, or without its own scale those of exp(logit - top), in the order of `narrowed`; and the factors
// that make results of their products.
template <bool HAS_SHARES, typename Kind>
[[gnu::noinline]] SWIN_QUANT_TARGET void shares_of(size_t queries, const Scales& scales, Room<Kind>& room) {
    const Floats log2e = floats_of(1.44269504f), raised = floats_of(HAS_SHARES ? 0 : std::log2(POWERS));
    for (size_t i = 0; i < queries; i += 4) {
        const Floats shifts = log2e * room.tops[i / 4] - raised;
        Floats total[4];
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            const Floats shift = one_of<r>(shifts);
            total[r] = floats_of(0);
            for (size_t first = 0; first < room.vectors; first += 4) {
                Ints power[4];
                unrolled<4>([&](auto c) SWIN_QUANT_INLINE {
                    power[c] = ints_of(0);
                    if (first + c >= room.vectors)
                        return;
                    auto* place = room.logits[i + r] + (first + c) * LANES;
                    const Floats e = exp2(load(place) * log2e - shift);
                    total[r] = total[r] + e;
                    if (HAS_SHARES)
                        put(place, e);
                    else
                        power[c] = rounded(e);
                });
                if (!HAS_SHARES)
                    put(room.shares[i + r] + first * LANES, narrowed(power));
            }
        });
        const Floats totals = joined<true>(total), of_results = floats_of(scales.result);
        room.factors[i / 4] = HAS_SHARES ? of_results : of_results / totals;
        if (!HAS_SHARES)
            continue;
        const Floats factors = floats_of(scales.shares) / totals;
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            for (size_t first = 0; first < room.vectors; first += 4) {
                Ints share[4];
                unrolled<4>([&](auto c) SWIN_QUANT_INLINE {
                    share[c] = ints_of(0);
                    if (first + c < room.vectors)
                        share[c] = rounded(load(room.logits[i + r] + (first + c) * LANES) * one_of<r>(factors));
                });
                put(room.shares[i + r] + first * LANES, at_most(narrowed(share), 127));
            }
        });
    }
}

// Levels of the results of as many queries. result: the row of the first one.
template <typename Kind>
[[gnu::noinline]] SWIN_QUANT_TARGET void results_of(size_t length, size_t queries, uint8_t* result, size_t stride,
                                                  uint8_t middle, const Room<Kind>& room) {
    size_t i = 0;
    const auto some_queries = [&](auto count) SWIN_QUANT_INLINE {
        const auto four_shares = [&](size_t k, size_t r) SWIN_QUANT_INLINE {
            return room.shares[i + r] + k / LANES * KEYS + k % (LANES / 4) * 16 + k % LANES / (LANES / 4) * 4;  // as narrowed
        };
        for (size_t channel = 0; channel < Kind::DEPTH; channel += 2 * LANES) {
            const auto of_values = [&](size_t k) SWIN_QUANT_INLINE { return room.values[k][channel]; };
            const auto finish = [&](auto r, auto v, Ints x) SWIN_QUANT_INLINE {
                if (i + r < queries)
                    put_int8(result + (i + r) * stride + channel + LANES * v, to_floats(x) * one_of<r % 4>(room.factors[(i + r) / 4]), middle);
            };
            multiply_bytes<count, 2, false>((length + 3) / 4, four_shares, of_values, finish);
        }
        i += count;
    };
    while (i + 4 < queries)
        some_queries(std::integral_constant<size_t, DOWN>());
    while (i < queries)
        some_queries(std::integral_constant<size_t, 4>());
}

// regions: [KEYS n] of the tokens, which add MASKED where they differ; null if they do not. result: rows of levels,
// `stride` bytes apart, int8 with `middle` 0 and uint8 around 128 with 0x80.
template <typename Kind>
SWIN_QUANT_TARGET void attend_fast(const Rows& x, const Added& constant, const uint8_t* regions, void* result, size_t stride,
                                   uint8_t middle, const Scales& scales) {
    Room<Kind> room;
    room.vectors = (x.length + LANES - 1) / LANES;
    for (auto& channels : room.keys)  // of which the last vector may have no key
        put(channels[(room.vectors - 1) * LANES], ints_of(0));
    interleave(x, room);
    for (size_t first = 0; first < x.length; first += QUERIES) {
        const size_t queries = std::min(QUERIES, x.length - first);
        (regions ? logits_of<true, Kind> : logits_of<false, Kind>)(x, first, queries, constant, regions, scales.logits, room);
        (scales.shares ? shares_of<true, Kind> : shares_of<false, Kind>)(queries, scales, room);
        results_of(x.length, queries, static_cast<uint8_t*>(result) + first * stride, stride, middle, room);
    }
}

#endif

}  // namespace swin_quant

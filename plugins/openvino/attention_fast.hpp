// Attention of one head in one window on vectors: heads of 32 channels, windows of at most 256 tokens.
#pragma once

#include "attention_window.hpp"
#include "vectors.hpp"

namespace swin_quant {

constexpr float POWERS = 255;  // levels of exp(logit - largest) where the softmax has none
constexpr size_t DEPTH = 32, LENGTH = 256;

#if defined(SWIN_QUANT_TARGET)

constexpr size_t KEYS = 4 * LANES;            // at a time
constexpr size_t ACROSS = LANES == 16 ? 4 : 2;  // vectors of keys of a product with four rows: as registers allow

// The 4 tokens from `token` on; behind the last one there are zeros. half: of their 32 channels.
SWIN_QUANT_INLINE inline void load_four(const Rows& x, const int8_t* rows, size_t token, size_t half, __m128i* found) {
    for (size_t i = 0; i < 4; ++i)
        found[i] = token + i >= x.length ? _mm_setzero_si128()
                                         : _mm_loadu_si128(reinterpret_cast<const __m128i*>(
                                               rows + (token + i) * x.stride + 16 * half));
}

SWIN_QUANT_INLINE inline void store(void* place, __m128i value) {
    _mm_store_si128(static_cast<__m128i*>(place), value);
}

// The sum, or the largest, of all values of four vectors: of the first in the places 0, 4, 8 ... of the result, of the
// second in 1, 5, 9 ...
template <bool IS_SUM>
SWIN_QUANT_INLINE inline Floats joined(const Floats (&x)[4]) {
    const auto join = [](Floats& a, Floats b) SWIN_QUANT_INLINE { a = IS_SUM ? a + b : larger(a, b); };
    Floats front = unpacked_low(x[0], x[1]), back = unpacked_low(x[2], x[3]);
    join(front, unpacked_high(x[0], x[1]));
    join(back, unpacked_high(x[2], x[3]));
    Floats all = shuffled<0x44>(front, back);
    join(all, shuffled<0xee>(front, back));
    return joined_parts(all, join);
}

// One of the four results of `joined`, in all places.
template <size_t I>
SWIN_QUANT_INLINE inline Floats one_of(Floats x) {
    return shuffled<I * 0x55>(x, x);
}

// k as uint8 and v of a head, as one instruction multiplies them: four channels, and four tokens, side by side.
SWIN_QUANT_INLINE inline void interleave(const Rows& x, size_t tokens, uint8_t (*keys)[LENGTH][4],
                                         int8_t (*values)[DEPTH][4]) {
    const __m128i flip = _mm_set1_epi8(char(0x80));  // k + 128 is uint8; a row's logits all move by 128 sum(q): no matter
    for (size_t j = 0; j < tokens; j += 4)
        for (size_t half = 0; half < 2; ++half) {
            __m128i r[4];
            load_four(x, x.k, j, half, r);
            __m128i ab = _mm_unpacklo_epi32(r[0], r[1]), AB = _mm_unpackhi_epi32(r[0], r[1]);
            __m128i cd = _mm_unpacklo_epi32(r[2], r[3]), CD = _mm_unpackhi_epi32(r[2], r[3]);
            store(keys[4 * half][j], _mm_xor_si128(flip, _mm_unpacklo_epi64(ab, cd)));
            store(keys[4 * half + 1][j], _mm_xor_si128(flip, _mm_unpackhi_epi64(ab, cd)));
            store(keys[4 * half + 2][j], _mm_xor_si128(flip, _mm_unpacklo_epi64(AB, CD)));
            store(keys[4 * half + 3][j], _mm_xor_si128(flip, _mm_unpackhi_epi64(AB, CD)));
            load_four(x, x.v, j, half, r);
            ab = _mm_unpacklo_epi8(r[0], r[1]), AB = _mm_unpackhi_epi8(r[0], r[1]);
            cd = _mm_unpacklo_epi8(r[2], r[3]), CD = _mm_unpackhi_epi8(r[2], r[3]);
            store(values[j / 4][16 * half], _mm_unpacklo_epi16(ab, cd));
            store(values[j / 4][16 * half + 4], _mm_unpackhi_epi16(ab, cd));
            store(values[j / 4][16 * half + 8], _mm_unpacklo_epi16(AB, CD));
            store(values[j / 4][16 * half + 12], _mm_unpackhi_epi16(AB, CD));
        }
}

// store(r, v, products) of four rows and LANES VECTORS columns. A step multiplies the four bytes at row(k, r) by the vectors
// at columns(k); one of both is uint8.
template <size_t VECTORS, bool IS_ROW_SIGNED, typename Row, typename Columns, typename Store>
SWIN_QUANT_INLINE inline void multiply_four(size_t steps, const Row& row, const Columns& columns, const Store& store) {
    Ints sums[4 * VECTORS];
    unrolled<4 * VECTORS>([&](auto i) SWIN_QUANT_INLINE { sums[i] = ints_of(0); });
#    pragma GCC unroll 8  // in a loop g++ keeps copies of the sums
    for (size_t k = 0; k < steps; ++k) {
        Ints found[VECTORS];
        unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { found[v] = reinterpret_cast<const Ints*>(columns(k))[v]; });
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            const Ints x = four_of(row(k, r));
            unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
                if constexpr (IS_ROW_SIGNED)
                    add_products(sums[r * VECTORS + v], of_uint8(found[v]), of_int8(x));
                else
                    add_products(sums[r * VECTORS + v], of_uint8(x), of_int8(found[v]));
            });
        });
    }
    unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
        unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { store(r, v, sums[r * VECTORS + v]); });
    });
}

constexpr size_t QUERIES = 16;  // at a time, by fours, so that a load serves four products

// A head of a window between its three steps, each a function of its own: together they need more registers than there are.
struct Room {
    alignas(64) uint8_t keys[DEPTH / 4][LENGTH][4];
    alignas(64) int8_t values[LENGTH / 4][DEPTH][4];
    alignas(64) float logits[QUERIES][LENGTH];
    alignas(64) uint8_t shares[QUERIES][LENGTH];
    Floats tops[QUERIES / 4], factors[QUERIES / 4];  // of four queries, as `joined` has them
    size_t keys_with_room;                           // a multiple of KEYS
};

// Logits of the queries from `first` on. regions, constant: as of `attend_fast`.
[[gnu::noinline]] SWIN_QUANT_TARGET inline void logits_of(const Rows& x, size_t first, size_t queries, const float* constant,
                                                        const uint8_t* regions, float factor, Room& room) {
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
        for (size_t j = 0; j < room.keys_with_room; j += ACROSS * LANES) {
            const auto four_channels = [&](size_t k, size_t r) SWIN_QUANT_INLINE { return q[r] + 4 * k; };
            const auto of_keys = [&](size_t k) SWIN_QUANT_INLINE { return room.keys[k][j]; };
            const auto finish = [&](auto r, auto v, Ints product) SWIN_QUANT_INLINE {
                const size_t key = j + LANES * v;
                Floats added = load_first(constant + query[r] * x.length + key, std::max(key, x.length) - key, never);
                if (regions)
                    added = added_apart(added, masked, regions + key, regions[query[r]]);
                const Floats logit = fma(to_floats(product), scale, added);
                put(room.logits[i + r] + key, logit);
                top[r] = larger(top[r], logit);
            };
            multiply_four<ACROSS, true>(DEPTH / 4, four_channels, of_keys, finish);
        }
        room.tops[i / 4] = joined<false>(top);
    }
}

// Levels of the softmax, or without its own scale those of exp(logit - top), in the order of `narrowed`; and the factors
// that make results of their products.
template <bool HAS_SHARES>
[[gnu::noinline]] SWIN_QUANT_TARGET void shares_of(size_t queries, const Scales& scales, Room& room) {
    const Floats log2e = floats_of(1.44269504f), raised = floats_of(HAS_SHARES ? 0 : std::log2(POWERS));
    for (size_t i = 0; i < queries; i += 4) {
        const Floats shifts = log2e * room.tops[i / 4] - raised;
        Floats total[4];
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            const Floats shift = one_of<r>(shifts);
            total[r] = floats_of(0);
            for (size_t j = 0; j < room.keys_with_room; j += KEYS) {
                Ints power[4];
                unrolled<4>([&](auto c) SWIN_QUANT_INLINE {
                    auto* place = room.logits[i + r] + j + LANES * c;
                    const Floats e = exp2(load(place) * log2e - shift);
                    total[r] = total[r] + e;
                    if (HAS_SHARES)
                        put(place, e);
                    else
                        power[c] = rounded(e);
                });
                if (!HAS_SHARES)
                    put(room.shares[i + r] + j, narrowed(power));
            }
        });
        const Floats totals = joined<true>(total), of_results = floats_of(scales.result);
        room.factors[i / 4] = HAS_SHARES ? of_results : of_results / totals;
        if (!HAS_SHARES)
            continue;
        const Floats factors = floats_of(scales.shares) / totals;
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            for (size_t j = 0; j < room.keys_with_room; j += KEYS) {
                Ints share[4];
                unrolled<4>([&](auto c) SWIN_QUANT_INLINE {
                    const Floats e = load(room.logits[i + r] + j + LANES * c);
                    share[c] = rounded(e * one_of<r>(factors));
                });
                put(room.shares[i + r] + j, at_most(narrowed(share), 127));
            }
        });
    }
}

// Levels of the results of as many queries. result: the row of the first one.
[[gnu::noinline]] SWIN_QUANT_TARGET inline void results_of(size_t length, size_t queries, uint8_t* result, size_t stride,
                                                         uint8_t middle, const Room& room) {
    for (size_t i = 0; i < queries; i += 4) {
        const auto four_shares = [&](size_t k, size_t r) SWIN_QUANT_INLINE {
            return room.shares[i + r] + k / LANES * KEYS + k % (LANES / 4) * 16 + k % LANES / (LANES / 4) * 4;  // as narrowed
        };
        const Floats factors = room.factors[i / 4];
        for (size_t channel = 0; channel < DEPTH; channel += 2 * LANES) {
            const auto of_values = [&](size_t k) SWIN_QUANT_INLINE { return room.values[k][channel]; };
            multiply_four<2, false>((length + 3) / 4, four_shares, of_values, [&](auto r, auto v, Ints x) SWIN_QUANT_INLINE {
                if (i + r < queries)
                    put_int8(result + (i + r) * stride + channel + LANES * v, to_floats(x) * one_of<r>(factors), middle);
            });
        }
    }
}

// regions: [KEYS n] of the tokens, which add MASKED where they differ; null if they do not. result: rows of levels,
// `stride` bytes apart, int8 with `middle` 0 and uint8 around 128 with 0x80.
SWIN_QUANT_TARGET inline void attend_fast(const Rows& x, const float* constant, const uint8_t* regions, void* result,
                                        size_t stride, uint8_t middle, const Scales& scales) {
    Room room;
    room.keys_with_room = (x.length + KEYS - 1) / KEYS * KEYS;
    interleave(x, room.keys_with_room, room.keys, room.values);
    for (size_t first = 0; first < x.length; first += QUERIES) {
        const size_t queries = std::min(QUERIES, x.length - first);
        logits_of(x, first, queries, constant, regions, scales.logits, room);
        (scales.shares ? shares_of<true> : shares_of<false>)(queries, scales, room);
        results_of(x.length, queries, static_cast<uint8_t*>(result) + first * stride, stride, middle, room);
    }
}

#endif

}  // namespace swin_quant

// Attention of one head in one window on CPUs with AVX-512 VNNI: heads of 32 channels, windows of at most 256 tokens.
#pragma once

#include "attention_window.hpp"
#include "vnni.hpp"

namespace swin_quant {

constexpr float POWERS = 255;  // levels of exp(logit - largest) where the softmax has none
constexpr size_t VNNI_DEPTH = 32, VNNI_LENGTH = 256;
constexpr size_t KEYS = 64;  // at a time

#if defined(__x86_64__) && defined(__GNUC__)

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

SWIN_QUANT_INLINE inline __m128i levels(__m512 x) {
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));  // saturates
}

// 2^x within 3e-6 of itself, for x <= 0.
SWIN_QUANT_INLINE inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));  // below there are denormals
    const __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 sum = _mm512_fmadd_ps(_mm512_set1_ps(0.0135206f), rest, _mm512_set1_ps(0.05203743f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.24142749f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.69300662f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.00000252f));
    return _mm512_scalef_ps(sum, x);
}

// The sum, or the largest, of all values of four vectors: of the first in the places 0, 4, 8 ... of the result, of the
// second in 1, 5, 9 ...
template <bool IS_SUM>
SWIN_QUANT_INLINE inline __m512 joined(const __m512 (&x)[4]) {
    const auto join = [](__m512& a, __m512 b) SWIN_QUANT_INLINE { a = IS_SUM ? _mm512_add_ps(a, b) : _mm512_max_ps(a, b); };
    __m512 front = _mm512_unpacklo_ps(x[0], x[1]), back = _mm512_unpacklo_ps(x[2], x[3]);
    join(front, _mm512_unpackhi_ps(x[0], x[1]));
    join(back, _mm512_unpackhi_ps(x[2], x[3]));
    __m512 all = _mm512_shuffle_ps(front, back, 0x44);
    join(all, _mm512_shuffle_ps(front, back, 0xee));
    join(all, _mm512_shuffle_f32x4(all, all, 0x4e));
    join(all, _mm512_shuffle_f32x4(all, all, 0xb1));
    return all;
}

// One of the four results of `joined`, in all places.
template <size_t I>
SWIN_QUANT_INLINE inline __m512 one_of(__m512 x) {
    return _mm512_permute_ps(x, I * 0x55);
}

// k as uint8 and v of a head, as one instruction multiplies them: four channels, and four tokens, side by side.
SWIN_QUANT_INLINE inline void interleave(const Rows& x, size_t tokens, uint8_t (*keys)[VNNI_LENGTH][4],
                                         int8_t (*values)[VNNI_DEPTH][4]) {
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

// store(r, v, products) of four rows and 16 VECTORS columns. A step multiplies the four bytes at row(k, r) by the vectors
// at columns(k); one of both is uint8.
template <size_t VECTORS, bool IS_ROW_SIGNED, typename Row, typename Columns, typename Store>
SWIN_QUANT_INLINE inline void multiply_four(size_t steps, const Row& row, const Columns& columns, const Store& store) {
    __m512i sums[4 * VECTORS];
    unrolled<4 * VECTORS>([&](auto i) SWIN_QUANT_INLINE { sums[i] = _mm512_setzero_si512(); });
#    pragma GCC unroll 8  // in a loop g++ keeps copies of the sums
    for (size_t k = 0; k < steps; ++k) {
        __m512i found[VECTORS];
        unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { found[v] = _mm512_load_si512(columns(k) + 64 * v); });
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            const __m512i x = four_of(row(k, r));
            unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
                if (IS_ROW_SIGNED)
                    add_products(sums[r * VECTORS + v], found[v], x);
                else
                    add_products(sums[r * VECTORS + v], x, found[v]);
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
    alignas(64) uint8_t keys[VNNI_DEPTH / 4][VNNI_LENGTH][4];
    alignas(64) int8_t values[VNNI_LENGTH / 4][VNNI_DEPTH][4];
    alignas(64) float logits[QUERIES][VNNI_LENGTH];
    alignas(64) uint8_t shares[QUERIES][VNNI_LENGTH];
    __m512 tops[QUERIES / 4], factors[QUERIES / 4];  // of four queries, as `joined` has them
    size_t keys_with_room;                           // a multiple of KEYS
};

// Logits of the queries from `first` on. regions, constant: as of `attend_vnni`.
[[gnu::noinline]] SWIN_QUANT_VNNI inline void logits_of(const Rows& x, size_t first, size_t queries, const float* constant,
                                                        const uint8_t* regions, float factor, Room& room) {
    const __m512 never = _mm512_set1_ps(-1e30f), masked = _mm512_set1_ps(MASKED), scale = _mm512_set1_ps(factor);
    for (size_t i = 0; i < queries; i += 4) {
        const int8_t* q[4];
        size_t query[4];
        __m512 top[4];
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            query[r] = std::min(first + i + r, x.length - 1);
            q[r] = x.q + query[r] * x.stride;
            top[r] = never;
        });
        for (size_t j = 0; j < room.keys_with_room; j += KEYS) {
            const uint64_t present = x.length - j >= KEYS ? ~uint64_t(0) : (uint64_t(1) << (x.length - j)) - 1;
            uint64_t apart[4] = {};
            for (size_t r = 0; regions && r < 4; ++r) {
                const __m512i own = _mm512_set1_epi8(char(regions[query[r]]));
                apart[r] = _mm512_cmpneq_epi8_mask(own, _mm512_loadu_si512(regions + j));
            }
            const auto four_channels = [&](size_t k, size_t r) SWIN_QUANT_INLINE { return q[r] + 4 * k; };
            const auto of_keys = [&](size_t k) SWIN_QUANT_INLINE { return room.keys[k][j]; };
            const auto finish = [&](auto r, auto v, __m512i product) SWIN_QUANT_INLINE {
                const float* place = constant + query[r] * x.length + j + 16 * v;
                __m512 added = _mm512_mask_loadu_ps(never, __mmask16(present >> 16 * v), place);
                if (regions)
                    added = _mm512_mask_add_ps(added, __mmask16(apart[r] >> 16 * v), added, masked);
                const __m512 logit = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), scale, added);
                _mm512_store_ps(room.logits[i + r] + j + 16 * v, logit);
                top[r] = _mm512_max_ps(top[r], logit);
            };
            multiply_four<4, true>(VNNI_DEPTH / 4, four_channels, of_keys, finish);
        }
        room.tops[i / 4] = joined<false>(top);
    }
}

// Levels of the softmax, or without its own scale those of exp(logit - top), in the order of `narrowed`; and the factors
// that make results of their products.
template <bool HAS_SHARES>
[[gnu::noinline]] SWIN_QUANT_VNNI void shares_of(size_t queries, const Scales& scales, Room& room) {
    const __m512 log2e = _mm512_set1_ps(1.44269504f), raised = _mm512_set1_ps(HAS_SHARES ? 0 : std::log2(POWERS));
    for (size_t i = 0; i < queries; i += 4) {
        const __m512 shifts = _mm512_fmsub_ps(log2e, room.tops[i / 4], raised);
        __m512 total[4];
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            const __m512 shift = one_of<r>(shifts);
            total[r] = _mm512_setzero_ps();
            for (size_t j = 0; j < room.keys_with_room; j += KEYS) {
                __m512i power[4];
                unrolled<4>([&](auto c) SWIN_QUANT_INLINE {
                    auto* place = room.logits[i + r] + j + 16 * c;
                    const __m512 e = exp2(_mm512_fmsub_ps(_mm512_load_ps(place), log2e, shift));
                    total[r] = _mm512_add_ps(total[r], e);
                    if (HAS_SHARES)
                        _mm512_store_ps(place, e);
                    else
                        power[c] = _mm512_cvtps_epi32(e);
                });
                if (!HAS_SHARES)
                    _mm512_store_si512(room.shares[i + r] + j, narrowed(power));
            }
        });
        const __m512 totals = joined<true>(total), of_results = _mm512_set1_ps(scales.result);
        room.factors[i / 4] = HAS_SHARES ? of_results : _mm512_div_ps(of_results, totals);
        if (!HAS_SHARES)
            continue;
        const __m512 factors = _mm512_div_ps(_mm512_set1_ps(scales.shares), totals);
        unrolled<4>([&](auto r) SWIN_QUANT_INLINE {
            for (size_t j = 0; j < room.keys_with_room; j += KEYS) {
                __m512i share[4];
                unrolled<4>([&](auto c) SWIN_QUANT_INLINE {
                    const __m512 e = _mm512_load_ps(room.logits[i + r] + j + 16 * c);
                    share[c] = _mm512_cvtps_epi32(_mm512_mul_ps(e, one_of<r>(factors)));
                });
                _mm512_store_si512(room.shares[i + r] + j, _mm512_min_epu8(narrowed(share), _mm512_set1_epi8(127)));
            }
        });
    }
}

// Levels of the results of as many queries. result: the row of the first one.
[[gnu::noinline]] SWIN_QUANT_VNNI inline void results_of(size_t length, size_t queries, uint8_t* result, size_t stride,
                                                         uint8_t middle, const Room& room) {
    const __m128i flip = _mm_set1_epi8(char(middle));
    for (size_t i = 0; i < queries; i += 4) {
        const auto four_shares = [&](size_t k, size_t r) SWIN_QUANT_INLINE {
            return room.shares[i + r] + k / 16 * KEYS + k % 4 * 16 + k % 16 / 4 * 4;  // as they were narrowed
        };
        const auto of_values = [&](size_t k) SWIN_QUANT_INLINE { return room.values[k][0]; };
        const __m512 factors = room.factors[i / 4];
        multiply_four<2, false>((length + 3) / 4, four_shares, of_values, [&](auto r, auto v, __m512i x) SWIN_QUANT_INLINE {
            const __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(x), one_of<r>(factors));
            auto* place = reinterpret_cast<__m128i*>(result + (i + r) * stride + 16 * v);
            if (i + r < queries)
                _mm_storeu_si128(place, _mm_xor_si128(levels(y), flip));
        });
    }
}

// regions: [KEYS n] of the tokens, which add MASKED where they differ; null if they do not. result: rows of levels,
// `stride` bytes apart, int8 with `middle` 0 and uint8 around 128 with 0x80.
SWIN_QUANT_VNNI inline void attend_vnni(const Rows& x, const float* constant, const uint8_t* regions, void* result,
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

#else

inline void attend_vnni(const Rows&, const float*, const uint8_t*, void*, size_t, uint8_t, const Scales&) {}

#endif

}  // namespace swin_quant

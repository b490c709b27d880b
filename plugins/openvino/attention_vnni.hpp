// Window attention of one head on CPUs with AVX-512 VNNI: heads of 32 channels, windows of at most 64 tokens.
#pragma once

#include "vnni.hpp"

namespace swin_quant {

// q, k and v of a head, int8 [length, depth] each; from row to row `stride` bytes.
struct Rows {
    const int8_t *q, *k, *v;
    size_t stride, length, depth;
};

// What integers are multiplied with: q k^T for logits, the softmax for its levels (0: it has none of its own), levels
// times v for those of the result.
struct Scales {
    float logits, shares, result;
};

constexpr float POWERS = 255;  // levels of exp(logit - largest) where the softmax has none
constexpr size_t VNNI_DEPTH = 32, VNNI_LENGTH = 64;

#if defined(__x86_64__) && defined(__GNUC__)

#    define SWIN_QUANT_UNROLL _Pragma("GCC unroll 8")

// The 4 tokens from `token` on; behind the last one there are zeros. half: of their 32 channels.
SWIN_QUANT_VNNI inline void load_four(const Rows& x, const int8_t* rows, size_t token, size_t half, __m128i* found) {
    for (size_t i = 0; i < 4; ++i)
        found[i] = token + i >= x.length ? _mm_setzero_si128()
                                         : _mm_loadu_si128(reinterpret_cast<const __m128i*>(
                                               rows + (token + i) * x.stride + 16 * half));
}

SWIN_QUANT_VNNI inline void store(void* place, __m128i value) {
    _mm_store_si128(static_cast<__m128i*>(place), value);
}

SWIN_QUANT_VNNI inline __m128i levels(__m512 x) {
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));  // saturates
}

SWIN_QUANT_VNNI inline __m128i unsigned_levels(__m512 x) {
    return _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x));
}

// 2^x to float32's last bits but one, for -126 <= x <= 0.
SWIN_QUANT_VNNI inline __m512 exp2(__m512 x) {
    const float series[] = {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f};
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.33335581e-3f);
    SWIN_QUANT_UNROLL
    for (float term : series)
        sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term));
    return _mm512_scalef_ps(sum, whole);
}

// `result`: int8 rows, `stride` bytes apart. Four queries at a time, so that a load serves four products.
SWIN_QUANT_VNNI inline void attend_vnni(const Rows& x, const float* constant, int8_t* result, size_t stride,
                                        const Scales& scales) {
    alignas(64) uint8_t keys[8][VNNI_LENGTH][4];   // of 4 channels each: what one instruction multiplies and adds
    alignas(64) int8_t values[16][VNNI_DEPTH][4];  // of 4 tokens each
    alignas(64) uint8_t shares[4][VNNI_LENGTH];
    static const int8_t zeros[VNNI_DEPTH] = {};
    const __m128i flip = _mm_set1_epi8(char(0x80));  // k + 128 is uint8; a row's logits all move by 128 sum(q): no matter
    for (size_t j = 0; j < VNNI_LENGTH; j += 4) {
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
    const __m512 never = _mm512_set1_ps(-1e30f), log2e = _mm512_set1_ps(1.44269504f);
    const __m512 lowest = _mm512_set1_ps(-126.0f), scale = _mm512_set1_ps(scales.logits);
    const __m512 most = _mm512_set1_ps(scales.shares ? 127 : POWERS);
    __mmask16 present[4];
    for (size_t c = 0; c < 4; ++c) {
        const size_t left = x.length > 16 * c ? x.length - 16 * c : 0;
        present[c] = left >= 16 ? 0xffff : __mmask16((1u << left) - 1);
    }
    for (size_t i = 0; i < x.length; i += 4) {
        const size_t rows = x.length - i < 4 ? x.length - i : 4;
        const int8_t* q[4];
        float factors[4];
        __m512i products[4][4], sums[4][2];
        SWIN_QUANT_UNROLL
        for (size_t r = 0; r < 4; ++r) {
            q[r] = r < rows ? x.q + (i + r) * x.stride : zeros;
            products[r][0] = products[r][1] = products[r][2] = products[r][3] = _mm512_setzero_si512();
            sums[r][0] = sums[r][1] = _mm512_setzero_si512();
        }
        SWIN_QUANT_UNROLL
        for (size_t g = 0; g < 8; ++g) {
            __m512i query[4];
            SWIN_QUANT_UNROLL
            for (size_t r = 0; r < 4; ++r) {
                int32_t four;
                std::memcpy(&four, q[r] + 4 * g, 4);
                query[r] = _mm512_set1_epi32(four);
            }
            SWIN_QUANT_UNROLL
            for (size_t c = 0; c < 4; ++c) {
                const __m512i key = _mm512_load_si512(keys[g][16 * c]);
                SWIN_QUANT_UNROLL
                for (size_t r = 0; r < 4; ++r)
                    products[r][c] = _mm512_dpbusd_epi32(products[r][c], key, query[r]);
            }
        }
        SWIN_QUANT_UNROLL
        for (size_t r = 0; r < 4; ++r) {
            const float* addend = constant + (r < rows ? i + r : i) * x.length;
            __m512 e[4];
            SWIN_QUANT_UNROLL
            for (size_t c = 0; c < 4; ++c) {
                const __m512 added = _mm512_maskz_loadu_ps(present[c], addend + 16 * c);
                const __m512 logits = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[r][c]), scale, added);
                e[c] = _mm512_mask_mov_ps(never, present[c], logits);
            }
            const __m512 top = _mm512_max_ps(_mm512_max_ps(e[0], e[1]), _mm512_max_ps(e[2], e[3]));
            const __m512 shift = _mm512_mul_ps(log2e, _mm512_set1_ps(_mm512_reduce_max_ps(top)));
            SWIN_QUANT_UNROLL
            for (size_t c = 0; c < 4; ++c)
                e[c] = exp2(_mm512_max_ps(_mm512_fmsub_ps(e[c], log2e, shift), lowest));
            const __m512 total = _mm512_add_ps(_mm512_add_ps(e[0], e[1]), _mm512_add_ps(e[2], e[3]));
            const float sum = _mm512_reduce_add_ps(total);
            const __m512 share = _mm512_set1_ps(scales.shares ? scales.shares / sum : POWERS);
            factors[r] = scales.shares ? scales.result : scales.result / (POWERS * sum);
            SWIN_QUANT_UNROLL
            for (size_t c = 0; c < 4; ++c)
                store(shares[r] + 16 * c, unsigned_levels(_mm512_min_ps(_mm512_mul_ps(e[c], share), most)));
        }
        for (size_t g = 0; 4 * g < x.length; ++g) {
            const __m512i low = _mm512_load_si512(values[g][0]), high = _mm512_load_si512(values[g][16]);
            SWIN_QUANT_UNROLL
            for (size_t r = 0; r < 4; ++r) {
                int32_t four;
                std::memcpy(&four, shares[r] + 4 * g, 4);
                const __m512i share = _mm512_set1_epi32(four);
                sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], share, low);
                sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], share, high);
            }
        }
        for (size_t r = 0; r < rows; ++r)
            for (size_t half = 0; half < 2; ++half) {
                const __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][half]), _mm512_set1_ps(factors[r]));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(result + (i + r) * stride + 16 * half), levels(sum));
            }
    }
}

#    undef SWIN_QUANT_UNROLL

#else

inline void attend_vnni(const Rows&, const float*, int8_t*, size_t, const Scales&) {}

#endif

}  // namespace swin_quant

// Vectors of 512 bits.
#pragma once

namespace swin_quant {

using Floats = __m512;
using Ints = __m512i;
constexpr size_t LANES = 16;

SWIN_QUANT_INLINE inline Floats floats_of(float x) {
    return _mm512_set1_ps(x);
}

SWIN_QUANT_INLINE inline Ints ints_of(int32_t x) {
    return _mm512_set1_epi32(x);
}

SWIN_QUANT_INLINE inline Floats load(const float* x) {
    return _mm512_loadu_ps(x);
}

// Values in bfloat16.
SWIN_QUANT_INLINE inline Floats load(const uint16_t* x) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

SWIN_QUANT_INLINE inline Ints load(const int32_t* x) {
    return _mm512_loadu_si512(x);
}

// The places below `count`, to load those alone and have `other` behind them.
using First = __mmask16;

SWIN_QUANT_INLINE inline First first_of(size_t count) {
    return First(count >= LANES ? 0xffff : (1u << count) - 1);
}

SWIN_QUANT_INLINE inline Floats load_first(const float* x, First first, Floats other) {
    return _mm512_mask_loadu_ps(other, first, x);
}

SWIN_QUANT_INLINE inline void put(uint8_t* place, Ints x) {
    std::memcpy(place, &x, sizeof(x));
}

SWIN_QUANT_INLINE inline void put(float* place, Floats x) {
    _mm512_storeu_ps(place, x);
}

// As bfloat16, half to even.
SWIN_QUANT_INLINE inline void put(uint16_t* place, Floats x) {
    const Ints bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), ints_of(1));
    const __mmask16 is_number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);  // NaN stays as it is: quiet, by its upper half
    const Ints rounded = _mm512_mask_add_epi32(bits, is_number, bits, _mm512_add_epi32(odd, ints_of(0x7fff)));
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), half);
}

// 32 values as uint8, saturated.
SWIN_QUANT_INLINE inline void put_uint8(uint8_t* place, const Ints (&x)[2]) {
    const Ints words = _mm512_packs_epi32(x[0], x[1]), bytes = _mm512_packus_epi16(words, words);
    const Ints order = _mm512_castsi256_si512(_mm256_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13));
    const Ints in_order = _mm512_permutexvar_epi32(order, bytes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), _mm512_castsi512_si256(in_order));
}

// Rounded to int8, saturated; `flip` 0x80 adds 128 and makes uint8 of it.
SWIN_QUANT_INLINE inline void put_int8(void* place, Floats x, uint8_t flip) {
    const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
    _mm_storeu_si128(static_cast<__m128i*>(place), _mm_xor_si128(bytes, _mm_set1_epi8(char(flip))));
}

SWIN_QUANT_INLINE inline Ints added(Ints x, Ints y) {
    return _mm512_add_epi32(x, y);
}

SWIN_QUANT_INLINE inline Floats fma(Floats x, Floats y, Floats z) {
    return _mm512_fmadd_ps(x, y, z);
}

SWIN_QUANT_INLINE inline Floats larger(Floats x, Floats y) {
    return _mm512_max_ps(x, y);
}

SWIN_QUANT_INLINE inline Floats smaller(Floats x, Floats y) {
    return _mm512_min_ps(x, y);
}

SWIN_QUANT_INLINE inline Floats root_of(Floats x) {
    return _mm512_sqrt_ps(x);
}

SWIN_QUANT_INLINE inline Floats size_of(Floats x) {
    return _mm512_abs_ps(x);
}

SWIN_QUANT_INLINE inline Floats to_floats(Ints x) {
    return _mm512_cvtepi32_ps(x);
}

SWIN_QUANT_INLINE inline Ints rounded(Floats x) {
    return _mm512_cvtps_epi32(x);
}

SWIN_QUANT_INLINE inline Ints bits_of(Floats x) {
    return _mm512_castps_si512(x);
}

SWIN_QUANT_INLINE inline float sum_of(Floats x) {
    return _mm512_reduce_add_ps(x);
}

SWIN_QUANT_INLINE inline Ints at_most(Ints bytes, uint8_t most) {
    return _mm512_min_epu8(bytes, _mm512_set1_epi8(char(most)));
}

// x - floor(x), and y 2^floor(x).
SWIN_QUANT_INLINE inline Floats above_whole(Floats x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
}

SWIN_QUANT_INLINE inline Floats times_power(Floats y, Floats x, Floats) {
    return _mm512_scalef_ps(y, x);
}

// Four vectors as uint8, saturated: value 16 q + 4 l + i at place 16 l + 4 q + i.
SWIN_QUANT_INLINE inline Ints narrowed(const Ints (&x)[4]) {
    return _mm512_packus_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
}

// x, plus y where a byte is not `own`.
SWIN_QUANT_INLINE inline Floats added_apart(Floats x, Floats y, const uint8_t* bytes, uint8_t own) {
    const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    return _mm512_mask_add_ps(x, _mm_cmpneq_epi8_mask(found, _mm_set1_epi8(char(own))), x, y);
}

SWIN_QUANT_INLINE inline Floats unpacked_low(Floats x, Floats y) {
    return _mm512_unpacklo_ps(x, y);
}

SWIN_QUANT_INLINE inline Floats unpacked_high(Floats x, Floats y) {
    return _mm512_unpackhi_ps(x, y);
}

template <int ORDER>
SWIN_QUANT_INLINE inline Floats shuffled(Floats x, Floats y) {
    return _mm512_shuffle_ps(x, y, ORDER);
}

// join(x, y) of all four quarters of x, in each of them.
template <typename Join>
SWIN_QUANT_INLINE inline Floats joined_parts(Floats x, const Join& join) {
    join(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    join(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    return x;
}

// table[index % SEGMENTS] for 16 indices.
constexpr size_t SEGMENTS = 32;

SWIN_QUANT_INLINE inline Floats looked_up(const float* table, Ints index) {
    return _mm512_permutex2var_ps(_mm512_load_ps(table), index, _mm512_load_ps(table + 16));
}

}  // namespace swin_quant

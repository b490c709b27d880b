// Vectors of 256 bits; the functions of vectors_512.hpp.
#pragma once

namespace swin_quant {

using Floats = __m256;
using Ints = __m256i;
constexpr size_t LANES = 8;

SWIN_QUANT_INLINE inline Floats floats_of(float x) {
    return _mm256_set1_ps(x);
}

SWIN_QUANT_INLINE inline Ints ints_of(int32_t x) {
    return _mm256_set1_epi32(x);
}

SWIN_QUANT_INLINE inline Floats load(const float* x) {
    return _mm256_loadu_ps(x);
}

SWIN_QUANT_INLINE inline Floats load(const uint16_t* x) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

SWIN_QUANT_INLINE inline Ints load(const int32_t* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
}

struct First {
    bool are_all;
    Ints mask;
};

SWIN_QUANT_INLINE inline First first_of(size_t count) {
    return {count >= LANES, _mm256_cmpgt_epi32(ints_of(int32_t(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))};
}

SWIN_QUANT_INLINE inline Floats load_first(const float* x, const First& first, Floats other) {
    if (first.are_all)
        return load(x);
    return _mm256_blendv_ps(other, _mm256_maskload_ps(x, first.mask), _mm256_castsi256_ps(first.mask));
}

SWIN_QUANT_INLINE inline void put(uint8_t* place, Ints x) {
    std::memcpy(place, &x, sizeof(x));
}

SWIN_QUANT_INLINE inline void put(float* place, Floats x) {
    _mm256_storeu_ps(place, x);
}

SWIN_QUANT_INLINE inline void put(uint16_t* place, Floats x) {
    const Ints bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), ints_of(1));
    const Ints rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, ints_of(0x7fff)));
    const Floats nan = _mm256_castsi256_ps(ints_of(0x7fc00000)), is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const Ints kept = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan, is_nan));
    const Ints high = _mm256_srli_epi32(kept, 16), both = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(place), _mm256_castsi256_si128(both));
}

SWIN_QUANT_INLINE inline void put_uint8(uint8_t* place, const Ints (&x)[4]) {
    const Ints bytes = _mm256_packus_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    put(place, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

SWIN_QUANT_INLINE inline void put_int8(void* place, Floats x, uint8_t flip) {
    const Ints whole = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    const __m128i bytes = _mm_xor_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(char(flip)));
    _mm_storel_epi64(static_cast<__m128i*>(place), bytes);
}

SWIN_QUANT_INLINE inline Ints added(Ints x, Ints y) {
    return _mm256_add_epi32(x, y);
}

SWIN_QUANT_INLINE inline Floats fma(Floats x, Floats y, Floats z) {
    return _mm256_fmadd_ps(x, y, z);
}

SWIN_QUANT_INLINE inline Floats larger(Floats x, Floats y) {
    return _mm256_max_ps(x, y);
}

SWIN_QUANT_INLINE inline Floats smaller(Floats x, Floats y) {
    return _mm256_min_ps(x, y);
}

SWIN_QUANT_INLINE inline Floats root_of(Floats x) {
    return _mm256_sqrt_ps(x);
}

SWIN_QUANT_INLINE inline Floats size_of(Floats x) {
    return _mm256_andnot_ps(floats_of(-0.0f), x);
}

SWIN_QUANT_INLINE inline Floats to_floats(Ints x) {
    return _mm256_cvtepi32_ps(x);
}

SWIN_QUANT_INLINE inline Ints rounded(Floats x) {
    return _mm256_cvtps_epi32(x);
}

SWIN_QUANT_INLINE inline Ints bits_of(Floats x) {
    return _mm256_castps_si256(x);
}

SWIN_QUANT_INLINE inline float sum_of(Floats x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

SWIN_QUANT_INLINE inline Ints at_most(Ints bytes, uint8_t most) {
    return _mm256_min_epu8(bytes, _mm256_set1_epi8(char(most)));
}

SWIN_QUANT_INLINE inline Floats above_whole(Floats x) {
    return x - _mm256_floor_ps(x);
}

SWIN_QUANT_INLINE inline Floats times_power(Floats y, Floats x, Floats rest) {
    const Ints whole = _mm256_cvtps_epi32(x - rest);
    return _mm256_castsi256_ps(added(_mm256_castps_si256(y), _mm256_slli_epi32(whole, 23)));
}

// Four vectors as uint8, saturated: value 8 q + 4 l + i at place 16 l + 4 q + i.
SWIN_QUANT_INLINE inline Ints narrowed(const Ints (&x)[4]) {
    return _mm256_packus_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
}

SWIN_QUANT_INLINE inline Floats added_apart(Floats x, Floats y, const uint8_t* bytes, uint8_t own) {
    const Ints found = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    return x + _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(found, ints_of(own))), y);
}

SWIN_QUANT_INLINE inline Floats unpacked_low(Floats x, Floats y) {
    return _mm256_unpacklo_ps(x, y);
}

SWIN_QUANT_INLINE inline Floats unpacked_high(Floats x, Floats y) {
    return _mm256_unpackhi_ps(x, y);
}

template <int ORDER>
SWIN_QUANT_INLINE inline Floats shuffled(Floats x, Floats y) {
    return _mm256_shuffle_ps(x, y, ORDER);
}

// join(x, y) of both halves of x, in each of them.
template <typename Join>
SWIN_QUANT_INLINE inline Floats joined_parts(Floats x, const Join& join) {
    join(x, _mm256_permute2f128_ps(x, x, 0x01));
    return x;
}

// table[index % SEGMENTS] for 8 indices.
constexpr size_t SEGMENTS = 8;

SWIN_QUANT_INLINE inline Floats looked_up(const float* table, Ints index) {
    return _mm256_permutevar8x32_ps(_mm256_load_ps(table), index);
}

}  // namespace swin_quant

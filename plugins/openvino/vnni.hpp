// Parts of the kernels for CPUs with AVX-512 VNNI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__) && defined(__GNUC__)

#    include <immintrin.h>

#    define SWIN_QUANT_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#    define SWIN_QUANT_INLINE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"), always_inline))

namespace swin_quant {

inline bool has_vnni() {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

template <typename Work, size_t... I>
SWIN_QUANT_INLINE inline void unrolled(const Work& work, std::index_sequence<I...>) {
    (work(std::integral_constant<size_t, I>()), ...);
}

// work(0), work(1) ... as constants: an array that they index lies in registers.
template <size_t COUNT, typename Work>
SWIN_QUANT_INLINE inline void unrolled(const Work& work) {
    unrolled(work, std::make_index_sequence<COUNT>());
}

// Add the products of four uint8 and four int8 to each sum, in place: of the intrinsic g++ keeps copies on the stack.
SWIN_QUANT_INLINE inline void add_products(__m512i& sums, __m512i of_uint8, __m512i of_int8) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(of_uint8), "v"(of_int8));
}

// Four bytes in all places.
SWIN_QUANT_INLINE inline __m512i four_of(const void* bytes) {
    int32_t four;
    std::memcpy(&four, bytes, 4);
    return _mm512_set1_epi32(four);
}

// Four vectors as uint8, saturated: value 16 q + 4 l + i at place 16 l + 4 q + i.
SWIN_QUANT_INLINE inline __m512i narrowed(const __m512i (&x)[4]) {
    return _mm512_packus_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
}

}  // namespace swin_quant

#else

namespace swin_quant {

inline bool has_vnni() {
    return false;
}

}  // namespace swin_quant

#endif

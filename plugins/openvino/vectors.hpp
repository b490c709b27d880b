// Vectors of the instruction set that the library is built for, which is the same for every kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(SWIN_QUANT_AMX)
#    define SWIN_QUANT_AVX512_VNNI  // which every CPU with AMX has
#endif

#if defined(SWIN_QUANT_AVX512_VNNI)
#    define SWIN_QUANT_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#    define SWIN_QUANT_INLINE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"), always_inline))
#elif defined(SWIN_QUANT_AVX_VNNI) || defined(SWIN_QUANT_AVX2)
#    define SWIN_QUANT_TARGET __attribute__((target("avx2,fma")))
#    define SWIN_QUANT_INLINE __attribute__((target("avx2,fma"), always_inline))
#endif

#if defined(SWIN_QUANT_TARGET)

#    include <cpuid.h>
#    include <immintrin.h>

namespace swin_quant {

// Whether this CPU has the instructions.
inline bool runs_here() {
#    if defined(SWIN_QUANT_AVX512_VNNI)
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#    else
    unsigned with_vnni = 1, b, c, d;
#        if defined(SWIN_QUANT_AVX_VNNI)
    with_vnni = __get_cpuid_count(7, 1, &with_vnni, &b, &c, &d) ? with_vnni >> 4 & 1 : 0;
#        endif
    return with_vnni && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#    endif
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

}  // namespace swin_quant

#    if defined(SWIN_QUANT_AVX512_VNNI)
#        include "vectors_512.hpp"
#    else
#        include "vectors_256.hpp"
#    endif

namespace swin_quant {

#    if defined(SWIN_QUANT_AVX2)

// Bytes as 16-bit integers: those in places 0, 2, 4 ... and the others.
struct Split {
    Ints even, odd;
};

using Signed = Split;
using Unsigned = Split;

SWIN_QUANT_INLINE inline Signed of_int8(Ints bytes) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}

SWIN_QUANT_INLINE inline Unsigned of_uint8(Ints bytes) {
    return {_mm256_and_si256(bytes, _mm256_set1_epi16(255)), _mm256_srli_epi16(bytes, 8)};
}

// As they were stored; field by field, since g++ copies a struct by way of the stack.
SWIN_QUANT_INLINE inline Signed load_int8(const void* place) {
    const auto* both = static_cast<const Ints*>(place);
    return {both[0], both[1]};
}

// Add the products of four uint8 and four int8 to each sum, in place. Exact: products of bytes, added as 16 bits, saturate.
SWIN_QUANT_INLINE inline void add_products(Ints& sums, const Unsigned& x, const Signed& y) {
    const Ints both = added(_mm256_madd_epi16(x.even, y.even), _mm256_madd_epi16(x.odd, y.odd));
    sums = added(sums, both);
}

#    else

using Signed = Ints;
using Unsigned = Ints;

SWIN_QUANT_INLINE inline Signed of_int8(Ints bytes) {
    return bytes;
}

SWIN_QUANT_INLINE inline Unsigned of_uint8(Ints bytes) {
    return bytes;
}

SWIN_QUANT_INLINE inline Signed load_int8(const void* place) {
    return *static_cast<const Ints*>(place);
}

// Add the products of four uint8 and four int8 to each sum, in place: of the intrinsic g++ keeps copies on the stack.
SWIN_QUANT_INLINE inline void add_products(Ints& sums, Unsigned x, Signed y) {
#        if defined(SWIN_QUANT_AVX512_VNNI)
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(y));
#        else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(x), "x"(y));
#        endif
}

#    endif

// Four bytes in all places.
SWIN_QUANT_INLINE inline Ints four_of(const void* bytes) {
    int32_t four;
    std::memcpy(&four, bytes, 4);
    return ints_of(four);
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

// 2^x within 3e-6 of itself, for x <= 0.
SWIN_QUANT_INLINE inline Floats exp2(Floats x) {
    x = larger(x, floats_of(-126.0f));  // below there are denormals
    const Floats rest = above_whole(x);
    Floats sum = fma(floats_of(0.0135206f), rest, floats_of(0.05203743f));
    sum = fma(sum, rest, floats_of(0.24142749f));
    sum = fma(sum, rest, floats_of(0.69300662f));
    sum = fma(sum, rest, floats_of(1.00000252f));
    return times_power(sum, x, rest);
}

}  // namespace swin_quant

#else

namespace swin_quant {

inline bool runs_here() {
    return true;  // plain loops
}

}  // namespace swin_quant

#endif

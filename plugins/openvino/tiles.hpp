// Tiles of AMX: 16 rows of 64 bytes in a register, of which one instruction multiplies two.
#pragma once

#include "vectors.hpp"

#if defined(SWIN_QUANT_AMX)

namespace swin_quant {

constexpr size_t TILE = 16, DEEP = 64;  // rows of a tile, and bytes of a row

#    if !defined(SWIN_QUANT_EMULATED_TILES)  // a test has plain loops in place of these, for CPUs without tiles

}  // namespace swin_quant

#        include <sys/syscall.h>
#        include <unistd.h>

namespace swin_quant {

// Whether this CPU has them, and the kernel lets the process use them.
inline bool has_tiles() {
    constexpr unsigned BOTH = 3u << 24;  // AMX-TILE and AMX-INT8
    constexpr long REQUEST = 0x1023, DATA = 18;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BOTH) == BOTH && syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
}

// All eight tiles are whole while this lives. OpenVINO's kernels, which believe that theirs stay, then find their own.
class WholeTiles {
public:
    WholeTiles() {
        asm volatile("sttilecfg %0" : "=m"(m_before));
        Shapes shapes{};
        shapes.palette = 1;
        for (size_t i = 0; i < 8; ++i)
            shapes.bytes[i] = DEEP, shapes.rows[i] = TILE;
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }

    ~WholeTiles() {
        asm volatile("ldtilecfg %0" ::"m"(m_before));
    }

    WholeTiles(const WholeTiles&) = delete;
    WholeTiles& operator=(const WholeTiles&) = delete;

private:
    struct alignas(64) Shapes {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    };

    Shapes m_before;
};

// `stride`: bytes from a row to the next.
template <int I>
SWIN_QUANT_INLINE inline void load_tile(const void* rows, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(I) : "memory");
}

template <int I>
SWIN_QUANT_INLINE inline void put_tile(void* rows, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(I) : "memory");
}

template <int I>
SWIN_QUANT_INLINE inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(I));
}

// Add products to the 16 x 16 sums in tile SUMS: rows of uint8 in X, and in Y rows of 16 times four int8.
template <int SUMS, int X, int Y>
SWIN_QUANT_INLINE inline void add_tile_products() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(Y));
}

#    endif

}  // namespace swin_quant

#endif

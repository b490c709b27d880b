// AMX's tiles as plain loops, as Intel's manual defines them: `-include` this to run its kernels on a CPU without tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define SWIN_QUANT_EMULATED_TILES

namespace swin_quant {

struct Tile {
    uint8_t bytes[16][64];
};

inline thread_local Tile tiles[8];
inline thread_local bool are_whole = false;

struct WholeTiles {
    WholeTiles() {
        std::memset(tiles, 0, sizeof(tiles));
        are_whole = true;
    }

    ~WholeTiles() {
        are_whole = false;
    }
};

inline Tile& tile_of_number(int number) {
    if (!are_whole)
        __builtin_trap();  // as a CPU does
    return tiles[number];
}

template <int I>
void load_tile(const void* rows, size_t stride) {
    for (size_t i = 0; i < 16; ++i)
        std::memcpy(tile_of_number(I).bytes[i], static_cast<const uint8_t*>(rows) + i * stride, 64);
}

template <int I>
void put_tile(void* rows, size_t stride) {
    for (size_t i = 0; i < 16; ++i)
        std::memcpy(static_cast<uint8_t*>(rows) + i * stride, tile_of_number(I).bytes[i], 64);
}

template <int I>
void clear_tile() {
    std::memset(&tile_of_number(I), 0, sizeof(Tile));
}

template <int SUMS, int X, int Y>
void add_tile_products() {
    for (size_t row = 0; row < 16; ++row)
        for (size_t column = 0; column < 16; ++column) {
            int32_t sum;
            auto* place = &tile_of_number(SUMS).bytes[row][4 * column];
            std::memcpy(&sum, place, 4);
            for (size_t k = 0; k < 64; ++k)
                sum += tile_of_number(X).bytes[row][k] * int8_t(tile_of_number(Y).bytes[k / 4][4 * column + k % 4]);
            std::memcpy(place, &sum, 4);
        }
}

}  // namespace swin_quant

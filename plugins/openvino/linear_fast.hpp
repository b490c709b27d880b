// An int8 linear and a norm on vectors, for a stream in float32 or bfloat16.
#pragma once

#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>

#include "linear.hpp"
#include "tiles.hpp"
#include "vectors.hpp"

namespace swin_quant {

constexpr size_t WIDTHS = 32;  // what divides the widths of the stream
constexpr size_t TOKENS = 96;  // of a tile of linears at most
constexpr size_t BEHIND = 32;  // bytes behind the rows of x that a loop may read

#if defined(SWIN_QUANT_TARGET)

constexpr size_t PANEL = 4 * LANES;  // columns of W whose sums stay in registers; of 64, a last panel may have 32

// Rows of a loop over a panel: as many sums as hide the latency of a multiplication, in as many registers as there are.
#    if defined(SWIN_QUANT_AVX512_VNNI)
constexpr size_t ROWS = 6, LESS_ROWS = 5;
#    elif defined(SWIN_QUANT_AVX_VNNI)
constexpr size_t ROWS = 3, LESS_ROWS = 3;
#    else
constexpr size_t ROWS = 2, LESS_ROWS = 2;
#    endif

using Order = std::vector<size_t>;  // which column of W stands at a place

inline Order in_order(size_t columns) {
    Order order(columns);
    std::iota(order.begin(), order.end(), 0);
    return order;
}

// The order whose sums come out as bytes in order: `narrowed` mixes them.
inline Order for_bytes(size_t columns) {
    Order order(columns);
    for (size_t i = 0; i < columns; ++i)
        order[i] = i / PANEL * PANEL + i % LANES / 4 * 16 + i % PANEL / LANES * 4 + i % 4;
    return order;
}

inline bool tiles_pay();

// A linear in the order of its loops: panel by panel, four rows of W side by side, which one instruction multiplies. For
// tiles there are rows of zeros behind W, to a whole tile.
class Packed {
public:
    Packed(const Linear& linear, const Order& order) : Packed(linear, order, tiles_pay()) {}

    Packed(const Linear& linear, const Order& order, bool for_tiles)
        : in(linear.in), out(linear.out), depth(for_tiles ? (in + 63) / 64 * 64 : in), for_tiles(for_tiles), scales(out),
          bias(out), starts(out),
          m_memory(static_cast<int8_t*>(std::aligned_alloc(64, (depth * out * BYTES + 63) / 64 * 64)), &std::free) {
        if (!m_memory)
            throw std::bad_alloc();
        for (size_t place = 0; place < out; ++place) {
            scales[place] = linear.scales[order[place]] * linear.x.scale;
            bias[place] = linear.bias[order[place]];
        }
        auto* packed = m_memory.get();
        int8_t bytes[4 * LANES];
        for (size_t first = 0; first < out; first += PANEL)
            for (size_t group = 0; group < depth; group += 4)
                for (size_t place = first; place < std::min(first + PANEL, out); place += LANES, packed += sizeof(Signed)) {
                    for (size_t i = 0; i < sizeof(bytes); ++i) {
                        const size_t column = place + i / 4;
                        bytes[i] = group < in ? linear.weights[(group + i % 4) * out + order[column]] : int8_t(0);
                        starts[column] -= linear.x.zero * bytes[i];
                    }
                    pack(bytes, packed);
                }
    }

    const int8_t* panel(size_t column) const {
        return m_memory.get() + column * depth * BYTES;
    }

    size_t in, out, depth;  // depth: rows of W as they are kept
    bool for_tiles;
    std::vector<float> scales, bias;
    std::vector<int32_t> starts;  // of the sums: what the zero point adds

private:
    static constexpr size_t BYTES = sizeof(Signed) / sizeof(Ints);  // of a packed weight

    SWIN_QUANT_TARGET static void pack(const int8_t* bytes, int8_t* place) {
        Ints vector;
        std::memcpy(&vector, bytes, sizeof(vector));
        *reinterpret_cast<Signed*>(place) = of_int8(vector);
    }

    std::unique_ptr<int8_t, decltype(&std::free)> m_memory;
};

// `store(row, vectors of y)` for so many rows and LANES VECTORS columns.
template <size_t COUNT, size_t VECTORS, typename Store>
SWIN_QUANT_INLINE inline void multiply(const Packed& linear, size_t column, const uint8_t* x, const Store& store) {
    const int8_t* weights = linear.panel(column);
    Ints sums[COUNT * VECTORS];
    unrolled<COUNT * VECTORS>([&](auto i) SWIN_QUANT_INLINE { sums[i] = load(&linear.starts[column + i % VECTORS * LANES]); });
    for (size_t k = 0; k < linear.in; k += 4, weights += sizeof(Signed) * VECTORS) {
        Unsigned values[COUNT];
        unrolled<COUNT>([&](auto r) SWIN_QUANT_INLINE { values[r] = of_uint8(four_of(x + r * linear.in + k)); });
        unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
            const Signed w = load_int8(weights + sizeof(Signed) * v);
            unrolled<COUNT>([&](auto r) SWIN_QUANT_INLINE { add_products(sums[r * VECTORS + v], values[r], w); });
        });
    }
    Floats scale[VECTORS], bias[VECTORS];
    unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
        scale[v] = load(&linear.scales[column + LANES * v]);
        bias[v] = load(&linear.bias[column + LANES * v]);
    });
    unrolled<COUNT>([&](auto r) SWIN_QUANT_INLINE {
        Floats y[VECTORS];
        unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE { y[v] = fma(to_floats(sums[r * VECTORS + v]), scale[v], bias[v]); });
        store(size_t(r), y);
    });
}

// The rows of a loop over panels: as many as leave fewer of them to be computed twice.
inline size_t rows_of(size_t tokens) {
    return (tokens + LESS_ROWS - 1) / LESS_ROWS * LESS_ROWS < (tokens + ROWS - 1) / ROWS * ROWS ? LESS_ROWS : ROWS;
}

// `store(row, column, vectors of y)` for all tokens and the LANES VECTORS columns from `column` on.
template <size_t COUNT, size_t VECTORS, typename Store>
SWIN_QUANT_TARGET void multiply_panel(const Packed& linear, size_t column, size_t tokens, const uint8_t* x, const Store& store) {
    if (COUNT > 1 && tokens < COUNT)
        return multiply_panel<1, VECTORS>(linear, column, tokens, x, store);
    for (size_t next = 0; next < tokens; next += COUNT) {
        const size_t row = std::min(next, tokens - COUNT);  // the last ones once more, and not one by one
        multiply<COUNT, VECTORS>(linear, column, x + row * linear.in, [&](size_t r, const Floats(&y)[VECTORS]) SWIN_QUANT_INLINE {
            store(row + r, column, y);
        });
    }
}

#    if defined(SWIN_QUANT_AMX)

using SumsOfTiles = int32_t[2 * TILE][PANEL];

// Sums of 16 rows of x, or of 16 of x and 16 of `others`, and a panel's columns, in tiles of 16 x 16.
template <size_t ROWS_OF_TILES>
SWIN_QUANT_INLINE inline void sum_tiles(const Packed& linear, size_t columns, const int8_t* weights, const uint8_t* x,
                                        const uint8_t* others, SumsOfTiles& sums) {
    for (size_t column = 0; column < columns; column += 2 * TILE) {
        unrolled<2 * ROWS_OF_TILES>([](auto i) SWIN_QUANT_INLINE { clear_tile<i>(); });
        for (size_t k = 0; k < linear.depth; k += DEEP) {
            const int8_t* w = weights + k * columns + 4 * column;
            load_tile<6>(w, 4 * columns), load_tile<7>(w + DEEP, 4 * columns);
            load_tile<4>(x + k, linear.in);
            add_tile_products<0, 4, 6>(), add_tile_products<1, 4, 7>();
            if constexpr (ROWS_OF_TILES == 2) {
                load_tile<5>(others + k, linear.in);
                add_tile_products<2, 5, 6>(), add_tile_products<3, 5, 7>();
            }
        }
        put_tile<0>(&sums[0][column], sizeof(sums[0])), put_tile<1>(&sums[0][column + TILE], sizeof(sums[0]));
        if constexpr (ROWS_OF_TILES == 2)
            put_tile<2>(&sums[TILE][column], sizeof(sums[0])), put_tile<3>(&sums[TILE][column + TILE], sizeof(sums[0]));
    }
}

template <size_t VECTORS, typename Store>
SWIN_QUANT_TARGET void multiply_panel_by_tiles(const Packed& linear, size_t column, size_t tokens, const uint8_t* x,
                                               const Store& store) {
    constexpr size_t COLUMNS = VECTORS * LANES;
    const int8_t* weights = linear.panel(column);
    Ints starts[VECTORS];
    Floats scale[VECTORS], bias[VECTORS];
    unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
        starts[v] = load(&linear.starts[column + LANES * v]);
        scale[v] = load(&linear.scales[column + LANES * v]);
        bias[v] = load(&linear.bias[column + LANES * v]);
    });
    alignas(64) SumsOfTiles sums;
    for (size_t next = 0; next < tokens; next += 2 * TILE) {
        const size_t rows[] = {std::min(next, tokens - TILE), std::min(next + TILE, tokens - TILE)};  // some once more
        const bool is_pair = rows[0] < rows[1];
        const auto *first = x + rows[0] * linear.in, *second = x + rows[1] * linear.in;
        is_pair ? sum_tiles<2>(linear, COLUMNS, weights, first, second, sums)
                : sum_tiles<1>(linear, COLUMNS, weights, first, second, sums);
        for (size_t r = 0; r < (is_pair ? 2 : 1) * TILE; ++r) {
            Floats y[VECTORS];
            unrolled<VECTORS>([&](auto v) SWIN_QUANT_INLINE {
                y[v] = fma(to_floats(added(load(&sums[r][LANES * v]), starts[v])), scale[v], bias[v]);
            });
            store(rows[r / TILE] + r % TILE, column, y);
        }
    }
}

#    endif

// The same for the columns from `first` on to `last`; `first` is a multiple of PANEL. x: [tokens, in].
template <typename Store>
SWIN_QUANT_TARGET void multiply_all(const Packed& linear, size_t first, size_t last, size_t tokens, const uint8_t* x,
                                    const Store& store) {
#    if defined(SWIN_QUANT_AMX)
    if (linear.for_tiles && tokens >= TILE) {
        const WholeTiles whole;
        for (size_t column = first; column < last; column += PANEL)
            (last - column < PANEL ? multiply_panel_by_tiles<2, Store> : multiply_panel_by_tiles<4, Store>)(linear, column, tokens,
                                                                                                        x, store);
        return;
    }
#    endif
    const bool most = rows_of(tokens) == ROWS;
    for (size_t column = first; column < last; column += PANEL) {
        auto loop = most ? multiply_panel<ROWS, 4, Store> : multiply_panel<LESS_ROWS, 4, Store>;
        if constexpr (PANEL > WIDTHS)
            if (last - column < PANEL)
                loop = most ? multiply_panel<2 * ROWS, 2, Store> : multiply_panel<2 * LESS_ROWS, 2, Store>;
        loop(linear, column, tokens, x, store);
    }
}

// Whether products take less time by tiles on this CPU: both are timed, once.
inline bool tiles_pay() {
#    if defined(SWIN_QUANT_EMULATED_TILES)
    return true;
#    elif defined(SWIN_QUANT_AMX)
    static const bool they_do = has_tiles() && [] {
        constexpr size_t SIZE = 384, ROWS_TIMED = 64;
        const std::vector<int8_t> weights(SIZE * SIZE, 1);
        const std::vector<float> ones(SIZE, 1);
        const std::vector<uint8_t> x(ROWS_TIMED * SIZE, 1);
        std::vector<float> y(ROWS_TIMED * SIZE);
        const Linear linear{SIZE, SIZE, weights.data(), ones.data(), ones.data(), {1, 0}};
        double best[2];
        for (bool by_tiles : {false, true}) {
            const Packed packed(linear, in_order(SIZE), by_tiles);
            best[by_tiles] = 1;
            for (int i = 0; i < 9; ++i) {
                const auto start = std::chrono::steady_clock::now();
                multiply_all(packed, 0, SIZE, ROWS_TIMED, x.data(), [&](size_t row, size_t column, const auto& sums) SWIN_QUANT_INLINE {
                    unrolled<sizeof(sums) / sizeof(Floats)>([&](auto v) SWIN_QUANT_INLINE { put(&y[row * SIZE + column + LANES * v], sums[v]); });
                });
                const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
                best[by_tiles] = std::min(best[by_tiles], time.count());
            }
        }
        return best[true] < best[false];
    }();
    return they_do;
#    else
    return false;
#    endif
}

constexpr size_t PARTS = WIDTHS / LANES;  // vectors of a row that are stored together

// store(row, place, PARTS vectors) of 4 QUADS normalised rows x[0], x[1] ..., side by side: their sums do not wait for each
// other.
template <size_t QUADS, typename T, typename Store>
SWIN_QUANT_INLINE inline void normalise(const Norm& norm, size_t width, const T* const (&x)[4 * QUADS], const Store& store) {
    const Floats share = floats_of(1 / float(width));
    Floats sums[QUADS][4], squares[QUADS][4], means[QUADS], factors[QUADS], shifts[QUADS];
    const auto each = [&](const auto& work) SWIN_QUANT_INLINE {
        unrolled<4 * QUADS>([&](auto r) SWIN_QUANT_INLINE { work(std::integral_constant<size_t, r / 4>(), std::integral_constant<size_t, r % 4>(), x[r]); });
    };
    each([&](auto q, auto r, const T*) SWIN_QUANT_INLINE { sums[q][r] = squares[q][r] = floats_of(0); });
    for (size_t i = 0; i < width; i += LANES)
        each([&](auto q, auto r, const T* row) SWIN_QUANT_INLINE { sums[q][r] = sums[q][r] + load(row + i); });
    unrolled<QUADS>([&](auto q) SWIN_QUANT_INLINE { means[q] = joined<true>(sums[q]) * share; });
    for (size_t i = 0; i < width; i += LANES)
        each([&](auto q, auto r, const T* row) SWIN_QUANT_INLINE {
            const Floats distance = load(row + i) - one_of<r>(means[q]);
            squares[q][r] = fma(distance, distance, squares[q][r]);
        });
    unrolled<QUADS>([&](auto q) SWIN_QUANT_INLINE {
        factors[q] = floats_of(1) / root_of(fma(joined<true>(squares[q]), share, floats_of(norm.epsilon)));
        shifts[q] = floats_of(0) - means[q] * factors[q];
    });
    for (size_t i = 0; i < width; i += WIDTHS)
        each([&](auto q, auto r, const T* row) SWIN_QUANT_INLINE {
            Floats y[PARTS];
            unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE {
                const size_t place = i + LANES * v;
                y[v] = fma(load(row + place), one_of<r>(factors[q]), one_of<r>(shifts[q]));
                y[v] = fma(y[v], load(norm.gain + place), load(norm.bias + place));
            });
            store(4 * q + r, i, y);
        });
}

// store(row, place, PARTS vectors) of all rows, normalised if `norm` is not null. row(i): where row i begins.
template <typename Row, typename Store>
SWIN_QUANT_INLINE inline void each_row(const Norm* norm, size_t width, size_t rows, const Row& row, const Store& store) {
    if (!norm) {
        for (size_t next = 0; next < rows; ++next)
            for (size_t i = 0; i < width; i += WIDTHS) {
                Floats x[PARTS];
                unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE { x[v] = load(row(next) + i + LANES * v); });
                store(next, i, x);
            }
        return;
    }
    size_t next = 0;
    const auto some = [&](auto quads) SWIN_QUANT_INLINE {
        const auto at = [&](size_t r) { return std::min(next + r, rows - 1); };  // the last one again and again
        decltype(row(0)) x[4 * quads];
        unrolled<4 * quads>([&](auto r) SWIN_QUANT_INLINE { x[r] = row(at(r)); });
        normalise<quads>(*norm, width, x, [&](size_t r, size_t i, const auto& y) SWIN_QUANT_INLINE { store(at(r), i, y); });
        next += 4 * quads;
    };
    while (next + 4 < rows)
        some(std::integral_constant<size_t, 2>());
    while (next < rows)
        some(std::integral_constant<size_t, 1>());
}

// Makes levels of rows of a stream, normalised if `norm` is not null; scale and zero point stand in the norm.
class ToLevels {
public:
    ToLevels(const Norm* norm, const Levels& levels, size_t width)
        : m_factor(1 / levels.scale), m_zero(levels.zero), m_width(width), m_epsilon(norm ? norm->epsilon : 0) {
        for (size_t i = 0; i < width && norm; ++i) {
            m_gain.push_back(norm->gain[i] * m_factor);
            m_bias.push_back(norm->bias[i] * m_factor + float(m_zero));
        }
    }

    // result: [rows, width].
    template <typename Row>
    SWIN_QUANT_TARGET void operator()(size_t rows, const Row& row, uint8_t* result) const {
        const Norm norm{m_gain.data(), m_bias.data(), m_epsilon};
        const Floats factor = floats_of(m_factor);
        const Ints zero = ints_of(m_zero);  // added behind rounding: values of bfloat16 often lie next to a tie
        const bool is_normal = !m_gain.empty();
        each_row(is_normal ? &norm : nullptr, m_width, rows, row, [&](size_t token, size_t i, const Floats(&y)[PARTS]) SWIN_QUANT_INLINE {
            Ints levels[PARTS];
            unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE { levels[v] = is_normal ? rounded(y[v]) : added(rounded(y[v] * factor), zero); });
            put_uint8(result + token * m_width + i, levels);
        });
    }

private:
    float m_factor;
    int32_t m_zero;
    size_t m_width;
    float m_epsilon;
    std::vector<float> m_gain, m_bias;
};

// The linear of all tokens, normalised if `norm` is not null, plus rows of the stream, into the rows result(0), result(1)
// ... Room for the norm: y [tokens, out].
template <typename Row, typename Result>
SWIN_QUANT_TARGET void add_outputs(const Packed& linear, const Norm* norm, size_t tokens, const uint8_t* x, const Row& row,
                                 float* y, const Result& result) {
    const size_t width = linear.out;
    if (!norm)
        return multiply_all(linear, 0, width, tokens, x, [&](size_t token, size_t column, const auto& sums) SWIN_QUANT_INLINE {
            auto* to = result(token) + column;  // found once: a store may change what they are found by
            const auto* from = row(token) + column;
            unrolled<sizeof(sums) / sizeof(Floats)>([&](auto v) SWIN_QUANT_INLINE { put(to + LANES * v, sums[v] + load(from + LANES * v)); });
        });
    multiply_all(linear, 0, width, tokens, x, [&](size_t token, size_t column, const auto& sums) SWIN_QUANT_INLINE {
        unrolled<sizeof(sums) / sizeof(Floats)>([&](auto v) SWIN_QUANT_INLINE { put(y + token * width + column + LANES * v, sums[v]); });
    });
    const auto own = [&](size_t token) { return static_cast<const float*>(y + token * width); };
    each_row(norm, width, tokens, own, [&](size_t token, size_t i, const auto& normal) SWIN_QUANT_INLINE {
        auto* to = result(token) + i;
        const auto* from = row(token) + i;
        unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE { put(to + LANES * v, normal[v] + load(from + LANES * v)); });
    });
}

#endif

}  // namespace swin_quant

// The compiled branches beside the int8 peak of a core, which a loop of int8 products measures in the same run; one thread.
//
//     g++ -O2 -std=c++17 -DSWIN_QUANT_AVX512_VNNI -Iplugins/openvino benchmarks/branch_peak.cpp -o out/branch_peak
//     out/branch_peak [peak | linears]
//
// With -DSWIN_QUANT_AVX_VNNI or -DSWIN_QUANT_AVX2 it measures vectors of 256 bits, with -DSWIN_QUANT_AMX tiles.
// Time is that of the CPU, so that other programs count little; the best of nine. Branches of Swin-T's four stages, with
// windows of 7 x 7 tokens, not shifted; products of attention count, too.
#include <cstdio>
#include <ctime>
#include <random>
#include <string_view>

#include "mlp_fast.hpp"
#include "window_branch_fast.hpp"

using namespace swin_quant;

static double seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

template <typename Work>
static double best_of(const Work& work) {
    double best = 1e9;
    for (int i = 0; i < 9; ++i) {
        const double start = seconds();
        work();
        best = std::min(best, seconds() - start);
    }
    return best;
}

constexpr int TURNS = 200000;

// Keep the compiler from knowing a value.
SWIN_QUANT_INLINE inline void hide(Ints& x) {
    asm volatile("" : "+v"(x));
}

#if defined(SWIN_QUANT_AVX2)

SWIN_QUANT_INLINE inline void hide(Split& x) {
    hide(x.even), hide(x.odd);
}

#endif

template <size_t SUMS>
SWIN_QUANT_TARGET static int multiply_only() {
    Ints sums[SUMS], bytes = ints_of(0x01020304), all = bytes;
    unrolled<SUMS>([&](auto i) SWIN_QUANT_INLINE { sums[i] = bytes; });
    Signed y = of_int8(bytes);
    Unsigned x = of_uint8(bytes);
    for (int k = 0; k < TURNS; ++k)
        unrolled<SUMS>([&](auto i) SWIN_QUANT_INLINE {
            hide(y);
            add_products(sums[i], x, y);
            hide(sums[i]);
        });
    unrolled<SUMS>([&](auto i) SWIN_QUANT_INLINE { all = added(all, sums[i]); });
    return int(sum_of(to_floats(all)));
}

// Products a second with so many sums in flight: it is the peak if more of them change nothing.
template <size_t SUMS>
static double peak() {
    volatile int kept;
    return 4.0 * LANES * SUMS * TURNS / best_of([&] { kept = multiply_only<SUMS>(); });
}

#if defined(SWIN_QUANT_AMX)

// The same with so many tiles of sums.
template <size_t SUMS>
SWIN_QUANT_TARGET static double peak_of_tiles() {
    constexpr int TURNS_OF_TILES = TURNS / 16;
    const WholeTiles whole;
    unrolled<8>([](auto i) SWIN_QUANT_INLINE { clear_tile<i>(); });
    const double time = best_of([] SWIN_QUANT_TARGET {
        for (int k = 0; k < TURNS_OF_TILES; ++k)
            unrolled<SUMS>([](auto i) SWIN_QUANT_INLINE { add_tile_products<i, 6, 7>(); });
    });
    return double(TILE * TILE * DEEP * SUMS) * TURNS_OF_TILES / time;
}

#endif

// Inputs of both kinds of branch: weights, a stream of bfloat16 from 1 to 2, and vectors of ones and zeros.
struct Given {
    Given(size_t width, size_t count) : weights(4 * width * width), ones(4 * width, 1), zeros(4 * width), x(count * width), y(count * width) {
        std::mt19937 random(0);
        for (auto& value : weights)
            value = int8_t(random());
        for (auto& value : x)
            value = uint16_t(0x3f80 + random() % 128);
    }

    Linear linear(size_t in, size_t out, Levels levels) const {
        return {in, out, weights.data(), ones.data(), zeros.data(), levels};
    }

    std::vector<int8_t> weights;
    std::vector<float> ones, zeros;
    std::vector<uint16_t> x, y;
};

// Products a second of a linear alone, 96 tokens at a time, whose result is float32.
SWIN_QUANT_TARGET static double of_linear(size_t in, size_t out) {
    Given given(std::max(in, out), TOKENS);
    const Packed packed(given.linear(in, out, {0.001f, 128}), in_order(out));
    const std::vector<uint8_t> x(TOKENS * in + BEHIND, 1);
    std::vector<float> y(TOKENS * out);
    constexpr int TURNS_OF_LINEAR = 20;
    const auto store = [&](size_t row, size_t column, const auto& sums) SWIN_QUANT_INLINE {
        unrolled<sizeof(sums) / sizeof(Floats)>([&](auto v) SWIN_QUANT_INLINE { put(&y[row * out + column + LANES * v], sums[v]); });
    };
    const double time = best_of([&] {
        for (int i = 0; i < TURNS_OF_LINEAR; ++i)
            multiply_all(packed, 0, out, TOKENS, x.data(), store);
    });
    return double(TURNS_OF_LINEAR * TOKENS * in * out) / time;
}

// Products a second of a branch with an MLP.
static double of_mlp(size_t width) {
    const size_t hidden = 4 * width, tokens = 20 * TOKENS;
    Given given(width, tokens);
    const Branch branch{given.linear(width, hidden, {0.001f, 128}), given.linear(hidden, width, {0.03f, 5}),
                        {given.ones.data(), given.zeros.data(), 1e-5f}, false};
    const PackedBranch packed(branch);
    std::vector<uint8_t> levels(TOKENS * width + BEHIND), inside(TOKENS * hidden);
    const double time = best_of([&] {
        for (size_t i = 0; i < tokens * width; i += TOKENS * width)
            branch_fast(branch, packed, TOKENS, &given.x[i], levels.data(), inside.data(), nullptr, &given.y[i]);
    });
    return 2.0 * double(tokens * width * hidden) / time;
}

// The same of a branch with attention.
static double of_attention(size_t width) {
    const size_t length = 49, windows = 40, tokens = windows * length, heads = width / DEPTH;
    Given given(width, tokens);
    std::vector<int32_t> places(tokens);
    std::iota(places.begin(), places.end(), 0);
    const std::vector<float> bias(heads * length * length);
    const std::vector<uint8_t> regions(length);
    WindowBranch branch{};
    branch.qkv = given.linear(width, 3 * width, {0.001f, 128}), branch.proj = given.linear(width, width, {0.03f, 128});
    branch.norm = {given.ones.data(), given.zeros.data(), 1e-5f}, branch.heads = heads, branch.length = length;
    branch.bias = bias.data(), branch.of_q = branch.of_k = branch.of_v = 1000;
    const Windows all(places, tokens, length, false, regions.data(), 1);
    const PackedWindowBranch packed(branch);
    std::vector<uint8_t> levels(length * width + BEHIND), attended(length * width + BEHIND);
    std::vector<int8_t> qkv(length * HEADS * HEAD);
    const double time = best_of([&] {
        for (size_t window = 0; window < windows; ++window) {
            const auto row = [&](size_t token) { return &given.x[(window * length + token) * width]; };
            const auto result = [&](size_t token) { return &given.y[(window * length + token) * width]; };
            attend_heads(branch, packed, all, window, 0, heads, given.x.data(), levels.data(), qkv.data(), attended.data());
            add_outputs(packed.proj, nullptr, length, attended.data(), row, nullptr, result);
        }
    });
    return double(tokens * (4 * width * width + 2 * length * width)) / time;
}

int main(int count, char** arguments) {
    if (!runs_here())
        return std::puts("this CPU does not have these instructions"), 1;
    constexpr size_t MANY = LANES == 16 ? 24 : 10, FEWER = LANES == 16 ? 16 : 8;
    const double vectors = peak<MANY>() / 1e9;
    double top = vectors;
#if defined(SWIN_QUANT_AMX)
    if (has_tiles())
        top = std::max(top, peak_of_tiles<6>() / 1e9);
#endif
    if (count > 1 && arguments[1] == std::string_view("peak"))
        return std::printf("%.1f\n", top), 0;
    if (count > 1) {  // of Swin-T's linears: in, out, GMAC/s, and percent of the peak
        for (size_t width : {96, 192, 384, 768})
            for (auto [in, out] : {std::pair(width, 3 * width), std::pair(width, width), std::pair(width, 4 * width), std::pair(4 * width, width)}) {
                const double found = of_linear(in, out) / 1e9;
                std::printf("%zu %zu %.0f %.0f\n", in, out, found, 100 * found / top);
            }
        return 0;
    }
    std::printf("products: %.0f GMAC/s with %zu sums in flight, %.0f with %zu\n", peak<FEWER>() / 1e9, FEWER, vectors, MANY);
#if defined(SWIN_QUANT_AMX)
    if (has_tiles())
        std::printf("products in tiles: %.0f GMAC/s with 4 of sums, %.0f with 6; the branches %s them\n",
                    peak_of_tiles<4>() / 1e9, top, tiles_pay() ? "use" : "are faster without");
#endif
    for (size_t width : {96, 192, 384, 768}) {
        const double mlp = of_mlp(width) / 1e9, attention = of_attention(width) / 1e9;
        std::printf("%zu channels: MLP %.0f GMAC/s, %.0f %% of it; attention %.0f GMAC/s, %.0f %%\n", width, mlp, 100 * mlp / top,
                    attention, 100 * attention / top);
    }
}

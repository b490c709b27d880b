// The compiled MLP beside the int8 peak of a core, which a loop of vpdpbusd measures in the same run; one thread.
//
//     g++ -O2 -std=c++17 -Iplugins/openvino benchmarks/mlp_peak.cpp -o out/mlp_peak && out/mlp_peak
//
// Time is that of the CPU, so that other programs count little; the best of nine. Branches of Swin-T's four stages.
#include <cstdio>
#include <ctime>
#include <random>

#include "mlp_vnni.hpp"

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

template <size_t SUMS>
SWIN_QUANT_VNNI static int multiply_only() {
    __m512i sums[SUMS], x = _mm512_set1_epi32(0x01020304), all = x;
    unrolled<SUMS>([&](auto i) SWIN_QUANT_INLINE { sums[i] = x; });
    for (int k = 0; k < TURNS; ++k)
        unrolled<SUMS>([&](auto i) SWIN_QUANT_INLINE { asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums[i]) : "v"(x)); });
    unrolled<SUMS>([&](auto i) SWIN_QUANT_INLINE { all = _mm512_xor_si512(all, sums[i]); });
    return _mm512_reduce_add_epi32(all);
}

// Products a second with so many sums in flight: it is the peak if more of them change nothing.
template <size_t SUMS>
static double peak() {
    volatile int kept;
    return 64.0 * SUMS * TURNS / best_of([&] { kept = multiply_only<SUMS>(); });
}

int main() {
    if (!has_vnni())
        return std::puts("this CPU has no AVX-512 VNNI"), 1;
    const double top = peak<24>();
    std::printf("vpdpbusd: %.0f GMAC/s with 16 sums in flight, %.0f with 24\n", peak<16>() / 1e9, top / 1e9);
    std::mt19937 random(0);
    for (size_t width : {96, 192, 384, 768}) {
        const size_t hidden = 4 * width, tokens = 20 * TOKENS;
        std::vector<int8_t> weights(width * hidden);
        for (auto& value : weights)
            value = int8_t(random());
        const std::vector<float> ones(hidden, 1), zeros(hidden);
        std::vector<uint16_t> stream(tokens * width), result(tokens * width);  // bfloat16 of 1 to 2
        for (auto& value : stream)
            value = uint16_t(0x3f80 + random() % 128);
        const Branch branch{{width, hidden, weights.data(), ones.data(), zeros.data(), {0.001f, 128}},
                            {hidden, width, weights.data(), ones.data(), zeros.data(), {0.03f, 5}},
                            {ones.data(), zeros.data(), 1e-5f},
                            false};
        const PackedBranch packed(branch);
        std::vector<uint8_t> levels(TOKENS * width), inside(TOKENS * hidden);
        const double time = best_of([&] {
            for (size_t i = 0; i < tokens * width; i += TOKENS * width)
                branch_vnni(branch, packed, TOKENS, &stream[i], levels.data(), inside.data(), nullptr, &result[i]);
        });
        const double products = 2.0 * double(tokens * width * hidden) / time;
        std::printf("%zu channels: %.0f GMAC/s, %.0f %% of it\n", width, products / 1e9, 100 * products / top);
    }
}

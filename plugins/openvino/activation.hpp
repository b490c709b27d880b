// The functions between the two linears of an MLP: f(x) = x / 2 + even(|x|).
#pragma once

#include <cmath>
#include <string>

namespace swin_quant {

struct Activation {
    const char* name;
    double (*even)(double);  // for x >= 0
    double reach;            // from there on it is x / 2 within 3e-5
};

inline double tanh_of_half(double x, double slope) {
    return x / 2 * std::tanh(slope * x);
}

// By name; null if there is none.
inline const Activation* activation_named(const std::string& name) {
    static const Activation all[] = {
        {"gelu", [](double x) { return x / 2 * std::erf(x * std::sqrt(0.5)); }, 4.27},
        {"gelu_tanh", [](double x) { return tanh_of_half(x, std::sqrt(2 / M_PI) * (1 + 0.044715 * x * x)); }, 4.27},
        {"quick_gelu", [](double x) { return tanh_of_half(x, 0.851); }, 7.5},  // x sigmoid(1.702 x)
        {"silu", [](double x) { return tanh_of_half(x, 0.5); }, 13},
        {"relu", [](double x) { return x / 2; }, 1},
    };
    for (const auto& one : all)
        if (name == one.name)
            return &one;
    return nullptr;
}

}  // namespace swin_quant

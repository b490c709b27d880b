// An int8 linear and a norm: what they are, and plain loops that compute them on any CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace swin_quant {

// uint8 levels of `scale` around `zero`.
struct Levels {
    float scale;
    int zero;
};

// y = x W scales + bias, for x uint8 [tokens, in], W int8 [in, out], scales and bias [out].
struct Linear {
    size_t in, out;
    const int8_t* weights;
    const float *scales, *bias;
    Levels x;
};

// Layer normalisation of [width].
struct Norm {
    const float *gain, *bias;
    float epsilon;
};

// One token.
inline std::vector<float> multiplied(const Linear& layer, const std::vector<float>& values) {
    std::vector<int> levels;
    for (float value : values) {
        const float level = std::nearbyint(value / layer.x.scale) + float(layer.x.zero);
        levels.push_back(int(std::min(std::max(0.0f, level), 255.0f)) - layer.x.zero);  // NaN: 0
    }
    std::vector<float> y(layer.out);
    for (size_t column = 0; column < layer.out; ++column) {
        int64_t sum = 0;
        for (size_t row = 0; row < layer.in; ++row)
            sum += levels[row] * layer.weights[row * layer.out + column];
        y[column] = float(sum) * (layer.x.scale * layer.scales[column]) + layer.bias[column];
    }
    return y;
}

// One token, in place.
inline void normalise(const Norm& norm, std::vector<float>& y) {
    double mean = 0, variance = 0;
    for (float value : y)
        mean += value / double(y.size());
    for (float value : y)
        variance += (value - mean) * (value - mean) / double(y.size());
    for (size_t i = 0; i < y.size(); ++i)
        y[i] = float((y[i] - mean) / std::sqrt(variance + norm.epsilon)) * norm.gain[i] + norm.bias[i];
}

}  // namespace swin_quant

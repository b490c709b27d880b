// Step 1 and 2 of a plugin operator: the branch of a block with its MLP, on int8 values, is declared, and computed, on all threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <mutex>
#include <vector>

#include "mlp_vnni.hpp"
#include "openvino/op/constant.hpp"
#include "openvino/op/op.hpp"
#include "threads.hpp"

namespace swin_quant {

// The same on any CPU, for any width, one token.
inline void compute(const Branch& branch, const float* x, float* result) {
    const auto& [first, second, norm, norm_last] = branch;
    const auto normalise = [&norm = norm](std::vector<float>& y) {
        double mean = 0, variance = 0;
        for (float value : y)
            mean += value / double(y.size());
        for (float value : y)
            variance += (value - mean) * (value - mean) / double(y.size());
        for (size_t i = 0; i < y.size(); ++i)
            y[i] = float((y[i] - mean) / std::sqrt(variance + norm.epsilon)) * norm.gain[i] + norm.bias[i];
    };
    const auto linear = [](const Linear& layer, const std::vector<float>& values) {
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
    };
    std::vector<float> y(x, x + first.in);
    if (!norm_last)
        normalise(y);
    y = linear(first, y);
    for (auto& value : y)
        value *= 0.5f * std::erfc(-value * std::sqrt(0.5f));
    y = linear(second, y);
    if (norm_last)
        normalise(y);
    for (size_t i = 0; i < y.size(); ++i)
        result[i] = x[i] + y[i];
}

// x + fc2(GELU(fc1(norm(x)))), or x + norm(fc2(GELU(fc1(x)))) with `norm_last`: x [..., C], float32 or bfloat16, as the
// result. The other inputs are constants, as nodes of ONNX have them: gain and bias of the norm [C]; scale and zero point
// of the levels that fc1 takes, W int8 [C, H], its scales and bias [H]; the same for fc2, W int8 [H, C].
class Mlp : public ov::op::Op {
public:
    OPENVINO_OP("Mlp", "swin_quant");

    enum Input { X, GAIN, BIAS, FIRST, SECOND = FIRST + 5, INPUTS = SECOND + 5 };
    enum OfLinear { SCALE, ZERO, WEIGHTS, SCALES, BIASES };

    Mlp() = default;
    Mlp(const ov::OutputVector& inputs, bool norm_last, float epsilon)
        : Op(inputs), m_norm_last(norm_last), m_epsilon(epsilon) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        using namespace ov::element;
        OPENVINO_ASSERT(get_input_size() == INPUTS, "Mlp: wants ", int(INPUTS), " inputs");
        const auto x = get_input_element_type(X);
        OPENVINO_ASSERT(x.compatible(f32) || x == bf16, "Mlp: its input cannot be ", x);
        for (size_t i = GAIN; i < INPUTS; ++i) {
            const auto place = (i - FIRST) % 5;
            const auto type = get_input_element_type(i);
            const bool fits = i < FIRST || (place != ZERO && place != WEIGHTS) ? type == f32
                              : place == WEIGHTS                              ? type == i8
                                                                              : type == i8 || type == u8;
            OPENVINO_ASSERT(fits && ov::is_type<ov::op::v0::Constant>(get_input_node_ptr(i)), "Mlp: its input ", i,
                            " must be a constant, not ", type, " from a ", get_input_node_ptr(i)->get_type_name());
        }
        const auto& weights = get_input_shape(FIRST + WEIGHTS);
        OPENVINO_ASSERT(weights.size() == 2 && weights[0] > 0 && weights[1] > 0, "Mlp: its weights are ", weights);
        const size_t width = weights[0], hidden = weights[1];
        const size_t sizes[] = {width, width, 1, 1, width * hidden, hidden, hidden, 1, 1, width * hidden, width, width};
        for (size_t i = GAIN; i < INPUTS; ++i)
            OPENVINO_ASSERT(ov::shape_size(get_input_shape(i)) == sizes[i - GAIN], "Mlp: its input ", i, " is ",
                            get_input_shape(i), ", which does not fit weights ", weights);
        const auto& shape = get_input_partial_shape(X);
        OPENVINO_ASSERT(shape.rank().is_dynamic() || (shape.size() > 0 && shape[shape.size() - 1].compatible(width)),
                        "Mlp: ", shape, " does not end in ", width, " channels");
        set_output_type(0, x, shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<Mlp>(inputs, m_norm_last, m_epsilon);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("norm_last", m_norm_last);
        visitor.on_attribute("epsilon", m_epsilon);
        return true;
    }

    bool has_evaluate() const override {
        return true;
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const Norm norm{inputs[GAIN].data<const float>(), inputs[BIAS].data<const float>(), m_epsilon};
        const Branch branch{linear(&inputs[FIRST]), linear(&inputs[SECOND]), norm, m_norm_last};
        outputs[0].set_shape(inputs[X].get_shape());
        if (!has_vnni() || !is_fast(branch))
            run(branch, inputs[X], outputs[0]);
        else if (inputs[X].get_element_type() == ov::element::bf16)
            run_vnni<uint16_t>(branch, inputs[X], outputs[0]);
        else
            run_vnni<float>(branch, inputs[X], outputs[0]);
        return true;
    }

private:
    static Linear linear(const ov::Tensor* inputs) {
        const auto& zero = inputs[ZERO];
        const bool is_signed = zero.get_element_type() == ov::element::i8;  // as uint8 they lie 128 higher
        const int middle = is_signed ? *zero.data<const int8_t>() + 128 : *zero.data<const uint8_t>();
        const auto& shape = inputs[WEIGHTS].get_shape();
        return {shape[0], shape[1], inputs[WEIGHTS].data<const int8_t>(), inputs[SCALES].data<const float>(),
                inputs[BIASES].data<const float>(), {*inputs[SCALE].data<const float>(), middle}};
    }

    static void run(const Branch& branch, const ov::Tensor& x, ov::Tensor& y) {
        const size_t width = branch.first.in;
        for_each(x.get_size() / width, [&](size_t token) {
            if (x.get_element_type() == ov::element::f32)
                return compute(branch, x.data<const float>() + token * width, y.data<float>() + token * width);
            const auto* from = x.data<const ov::bfloat16>() + token * width;
            const std::vector<float> own(from, from + width);
            std::vector<float> result(width);
            compute(branch, own.data(), result.data());
            std::copy(result.begin(), result.end(), y.data<ov::bfloat16>() + token * width);
        });
    }

    template <typename T>
    void run_vnni(const Branch& branch, const ov::Tensor& x, ov::Tensor& y) const {
        std::call_once(m_once, [&] { m_packed = std::make_unique<PackedBranch>(branch); });
        const size_t width = branch.first.in, hidden = branch.first.out, tokens = x.get_size() / width;
        const size_t length = tile(tokens);
        for_each((tokens + length - 1) / length, [&](size_t index) {
            thread_local std::vector<float> floats;
            thread_local std::vector<uint8_t> bytes;
            floats.resize(std::max(floats.size(), branch.norm_last ? TOKENS * width : 0));
            bytes.resize(std::max(bytes.size(), TOKENS * (width + hidden)));
            const size_t from = index * length, count = std::min(length, tokens - from);
            branch_vnni(branch, *m_packed, count, static_cast<const T*>(x.data()) + from * width, bytes.data(),
                        bytes.data() + TOKENS * width, floats.data(), static_cast<T*>(y.data()) + from * width);
        });
    }

    // Tokens of a tile: as many tiles as give every thread as many.
    static size_t tile(size_t tokens) {
        const size_t tiles = std::max<size_t>((tokens + TOKENS - 1) / TOKENS, 1), rounds = (tiles + threads() - 1) / threads();
        return std::max<size_t>((tokens + rounds * threads() - 1) / (rounds * threads()), 6);
    }

    bool m_norm_last = false;
    float m_epsilon = 0;
    mutable std::once_flag m_once;
    mutable std::unique_ptr<PackedBranch> m_packed;
};

}  // namespace swin_quant

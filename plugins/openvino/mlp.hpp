// Step 1 and 2 of a plugin operator: the branch of a block with its MLP, on int8 values, is declared, and computed, on all threads.
#pragma once

#include <mutex>

#include "constants.hpp"
#include "mlp_fast.hpp"
#include "threads.hpp"

namespace swin_quant {

// The same on any CPU, for any width, one token.
inline void compute(const Branch& branch, const float* x, float* result) {
    std::vector<float> y(x, x + branch.first.in);
    if (!branch.norm_last)
        normalise(branch.norm, y);
    y = multiplied(branch.first, y);
    for (size_t i = 0; i < branch.second.in; ++i)
        y[i] = float(y[i] / 2 + branch.f->even(std::fabs(y[i]))) * (branch.is_gated() ? y[branch.second.in + i] : 1);
    y.resize(branch.second.in);
    y = multiplied(branch.second, y);
    if (branch.norm_last)
        normalise(branch.norm, y);
    for (size_t i = 0; i < y.size(); ++i)
        result[i] = x[i] + y[i];
}

// x + fc2(f(fc1(norm(x)))), or x + norm(fc2(f(fc1(x)))) with `norm_last`, for the activation f: x [..., C], float32 or
// bfloat16, as the result. The other inputs are constants, as nodes of ONNX have them: gain and bias of the norm [C]; scale and zero point
// of the levels that fc1 takes, W int8 [C, H], its scales and bias [H]; the same for fc2, W int8 [H, C]. With fc1 [C, 2 H]
// f of the first half is multiplied by the second one.
class Mlp : public ov::op::Op {
public:
    OPENVINO_OP("Mlp", "swin_quant");

    enum Input { X, GAIN, BIAS, FIRST, SECOND = FIRST + OF_LINEAR, INPUTS = SECOND + OF_LINEAR };

    Mlp() = default;
    Mlp(const ov::OutputVector& inputs, bool norm_last, float epsilon, std::string activation)
        : Op(inputs), m_norm_last(norm_last), m_epsilon(epsilon), m_activation(std::move(activation)) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() == INPUTS, "Mlp: wants ", int(INPUTS), " inputs");
        OPENVINO_ASSERT(activation_named(m_activation), "Mlp: has no activation ", m_activation);
        const auto weights = weights_of(*this, FIRST);
        const size_t width = weights[0], hidden = weights[1];
        want_stream(*this, width);
        want_constant(*this, GAIN, {ov::element::f32}, width);
        want_constant(*this, BIAS, {ov::element::f32}, width);
        want_linear(*this, FIRST, width, hidden);
        const bool is_gated = 2 * weights_of(*this, SECOND)[0] == hidden;
        want_linear(*this, SECOND, is_gated ? hidden / 2 : hidden, width);
        set_output_type(0, get_input_element_type(X), get_input_partial_shape(X));
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<Mlp>(inputs, m_norm_last, m_epsilon, m_activation);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("norm_last", m_norm_last);
        visitor.on_attribute("epsilon", m_epsilon);
        visitor.on_attribute("activation", m_activation);
        return true;
    }

    bool has_evaluate() const override {
        return true;
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const Norm norm{inputs[GAIN].data<const float>(), inputs[BIAS].data<const float>(), m_epsilon};
        const Branch branch{linear_of(&inputs[FIRST]), linear_of(&inputs[SECOND]), norm, m_norm_last,
                            activation_named(m_activation)};
        outputs[0].set_shape(inputs[X].get_shape());
#if defined(SWIN_QUANT_TARGET)
        if (is_fast(branch)) {
            const bool is_half = inputs[X].get_element_type() == ov::element::bf16;
            is_half ? run_fast<uint16_t>(branch, inputs[X], outputs[0]) : run_fast<float>(branch, inputs[X], outputs[0]);
            return true;
        }
#endif
        run(branch, inputs[X], outputs[0]);
        return true;
    }

private:
    static void run(const Branch& branch, const ov::Tensor& x, ov::Tensor& y) {
        const size_t width = branch.first.in;
        for_each(x.get_size() / width, [&](size_t token) {
            if (x.get_element_type() == ov::element::f32)
                return compute(branch, x.data<const float>() + token * width, y.data<float>() + token * width);
            const auto* from = x.data<const ov::bfloat16>() + token * width;
            const std::vector<float> own(from, from + width);
            std::vector<float> result(width);
            compute(branch, own.data(), result.data());
            store(result, y.data<ov::bfloat16>() + token * width);
        });
    }

#if defined(SWIN_QUANT_TARGET)

    template <typename T>
    void run_fast(const Branch& branch, const ov::Tensor& x, ov::Tensor& y) const {
        std::call_once(m_once, [&] { m_packed = std::make_unique<PackedBranch>(branch); });
        const size_t width = branch.first.in, hidden = branch.second.in, tokens = x.get_size() / width;
        const size_t length = tile_of(tokens, TOKENS);
        for_each((tokens + length - 1) / length, [&](size_t index) {
            thread_local std::vector<float> floats;
            thread_local std::vector<uint8_t> bytes;
            floats.resize(std::max(floats.size(), branch.norm_last ? TOKENS * width : 0));
            bytes.resize(std::max(bytes.size(), TOKENS * (width + hidden)));
            const size_t from = index * length, count = std::min(length, tokens - from);
            branch_fast(branch, *m_packed, count, static_cast<const T*>(x.data()) + from * width, bytes.data(),
                        bytes.data() + TOKENS * width, floats.data(), static_cast<T*>(y.data()) + from * width);
        });
    }

    mutable std::once_flag m_once;
    mutable std::unique_ptr<PackedBranch> m_packed;

#endif

    bool m_norm_last = false;
    float m_epsilon = 0;
    std::string m_activation = "gelu";
};

}  // namespace swin_quant

// Step 1 and 2 of a plugin operator: window attention on int8 values is declared, and computed, on all threads.
#pragma once

#include "attention_fast.hpp"
#include "attributes.hpp"
#include "openvino/op/op.hpp"
#include "threads.hpp"

namespace swin_quant {

// q, k, v [B, T, 3C] and a constant [nW * heads, L, L] -> softmax(q k^T + constant) v [B, T, C]. Scales: of q, k, v, of the
// softmax where it is rounded (earlier files have a 0 where it is not), and of the result. Tokens lie window by window, and
// windows come in rounds of nW.
class Attention : public ov::op::Op {
public:
    OPENVINO_OP("Attention", "swin_quant");

    Attention() = default;
    Attention(const ov::OutputVector& inputs, int64_t heads, std::vector<float> scales)
        : Op(inputs), m_heads(heads), m_scales(std::move(scales)) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        const auto x = get_input_element_type(0), constant = get_input_element_type(1);
        OPENVINO_ASSERT(x.compatible(ov::element::i8), "Attention: q, k and v must be int8, not ", x);
        OPENVINO_ASSERT(constant.compatible(ov::element::f32), "Attention: its constant must be f32, not ", constant);
        OPENVINO_ASSERT(m_heads > 0 && (m_scales.size() == 4 || m_scales.size() == 5),
                        "Attention: wants heads, and 4 or 5 scales");
        OPENVINO_ASSERT(std::all_of(m_scales.begin(), m_scales.end(), [](float scale) { return scale >= 0; }) &&
                            m_scales.back() > 0,
                        "Attention: its scales must be above 0");
        auto shape = get_input_partial_shape(0);
        if (shape.is_static() && get_input_partial_shape(1).is_static())
            want_rounds(shape.to_shape(), get_input_shape(1));
        if (shape.rank().is_static()) {
            auto& channels = shape[shape.rank().get_length() - 1];
            OPENVINO_ASSERT(channels.is_dynamic() || channels.get_length() % (3 * m_heads) == 0,
                            "Attention: ", channels, " channels are not q, k and v of ", m_heads, " heads");
            channels = channels.is_dynamic() ? ov::Dimension() : ov::Dimension(channels.get_length() / 3);
        }
        set_output_type(0, ov::element::i8, shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<Attention>(inputs, m_heads, m_scales);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("heads", m_heads);
        visit_bits(visitor, "scales", m_scales);
        return true;
    }

    bool has_evaluate() const override {
        return true;
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        auto shape = inputs[0].get_shape();
        const auto of_constant = inputs[1].get_shape();
        want_rounds(shape, of_constant);
        const size_t heads = m_heads, channels = shape.back() / 3, depth = channels / heads;
        const size_t length = inputs[1].get_shape().back(), square = length * length;
        const size_t rounds = inputs[1].get_size() / (heads * square);
        shape.back() = channels;
        outputs[0].set_shape(shape);
        const auto* x = inputs[0].data<const int8_t>();
        const auto* constants = inputs[1].data<const float>();
        auto* result = outputs[0].data<int8_t>();
        const float softmax = m_scales.size() == 5 ? m_scales[3] : 0, of_levels = softmax > 0 ? softmax : 1;
        const Scales scales{m_scales[0] * m_scales[1], softmax > 0 ? 1 / softmax : 0, of_levels * m_scales[2] / m_scales.back()};
        for_each(outputs[0].get_size() / (length * channels), [&](size_t window) {
            for (size_t head = 0; head < heads; ++head) {
                const auto* q = x + window * length * 3 * channels + head * depth;
                const Rows rows{q, q + channels, q + 2 * channels, 3 * channels, length, depth};
                const Added constant{constants + (window % rounds * heads + head) * square, length};
                auto* place = result + window * length * channels + head * depth;
#if defined(SWIN_QUANT_TARGET)
                if (fits<Narrow>(depth, length)) {
                    attend_fast<Narrow>(rows, constant, nullptr, place, channels, 0, scales);
                    continue;
                }
#endif
                attend(rows, constant, place, channels, scales);
            }
        });
        return true;
    }

private:
    // Tokens must be rounds of the windows that the constant is of.
    void want_rounds(const ov::Shape& x, const ov::Shape& constant) const {
        const size_t heads = m_heads;
        OPENVINO_ASSERT(constant.size() == 3 && constant[2] > 0 && constant[1] == constant[2] && constant[0] > 0 &&
                            constant[0] % heads == 0 && !x.empty() && x.back() > 0 && x.back() % (3 * heads) == 0 &&
                            ov::shape_size(x) / x.back() % (constant[0] / heads * constant[1]) == 0,
                        "Attention: ", x, " and a constant ", constant, " are not those of ", heads, " heads");
    }

    int64_t m_heads = 1;
    std::vector<float> m_scales;
};

}  // namespace swin_quant

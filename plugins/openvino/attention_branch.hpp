// Step 1 and 2 of a plugin operator: the branch of a block with its window attention, for pictures of one size.
#pragma once

#include "window_operator.hpp"

namespace swin_quant {

// x [B, T, C] in another order, plus proj(attention(qkv(norm(x)))), or norm(proj(attention(qkv(x)))) with `norm_last`,
// window by window; float32 or bfloat16. The other inputs are constants: places [T] in x of the tokens, window by window;
// those of `WindowOperator`, whose own is the region of each token, uint8 [nW, L].
class AttentionBranch : public WindowOperator {
public:
    OPENVINO_OP("AttentionBranch", "swin_quant");

    enum Input { X, PLACES, FIRST, REGIONS = FIRST + CONSTANTS, LENGTHS };

    AttentionBranch() = default;
    AttentionBranch(const ov::OutputVector& inputs, int64_t heads, std::vector<float> scales, bool norm_last, float epsilon)
        : WindowOperator(inputs, heads, std::move(scales), norm_last, epsilon) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        want_branch(FIRST, LENGTHS - REGIONS);
        const size_t length = length_of(FIRST), tokens = sized(PLACES), of_rounds = sized(REGIONS);
        OPENVINO_ASSERT(of_rounds % length == 0 && tokens % of_rounds == 0, "AttentionBranch: ", tokens, " tokens in regions ",
                        get_input_shape(REGIONS), " are not windows of ", length, " tokens");
        want_constant(*this, REGIONS, {ov::element::u8}, of_rounds);
        want_places(*this, PLACES, tokens, tokens);
        const auto& shape = get_input_partial_shape(X);
        OPENVINO_ASSERT(shape.rank().is_dynamic() || (shape.size() == 3 && shape[1].compatible(tokens)), "AttentionBranch: ",
                        shape, " are not pictures of ", tokens, " tokens");
        set_output_type(0, get_input_element_type(X), shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<AttentionBranch>(inputs, m_heads, m_scales, m_norm_last, m_epsilon);
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        std::call_once(m_once, [&] {
            const auto *places = inputs[PLACES].data<const int32_t>(), *end = places + inputs[PLACES].get_size();
            const size_t length = length_of(FIRST), tokens = inputs[PLACES].get_size();
            m_windows = std::make_unique<Windows>(std::vector<int32_t>(places, end), tokens, length, false,
                                                  inputs[REGIONS].data<const uint8_t>(), inputs[REGIONS].get_size() / length);
        });
        want_pictures(*this, inputs[X].get_shape(), m_windows->tokens, inputs[FIRST + GAIN].get_size());
        compute_all(inputs, FIRST, inputs.size() > LENGTHS ? &inputs[LENGTHS] : nullptr, *m_windows, outputs[0]);
        return true;
    }

private:
    mutable std::once_flag m_once;
    mutable std::unique_ptr<Windows> m_windows;
};

}  // namespace swin_quant

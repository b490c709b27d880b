// Step 1 and 2 of a plugin operator: the branch of a block with attention among all tokens of a picture.
#pragma once

#include "window_operator.hpp"

namespace swin_quant {

// x [B, T, C] plus proj(attention(qkv(norm(x)))), or norm(proj(attention(qkv(x)))) with `norm_last`, for any number of tokens;
// float32 or bfloat16. The other inputs are constants, those of `WindowOperator` without position biases.
class TokenBranch : public WindowOperator {
public:
    OPENVINO_OP("TokenBranch", "swin_quant");

    enum Input { X, FIRST };

    TokenBranch() = default;
    TokenBranch(const ov::OutputVector& inputs, int64_t heads, std::vector<float> scales, bool norm_last, float epsilon)
        : WindowOperator(inputs, heads, std::move(scales), norm_last, epsilon) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() == FIRST + TABLE, "TokenBranch: cannot have ", get_input_size(), " inputs");
        want_branch(FIRST, 0, false);
        const auto& shape = get_input_partial_shape(X);
        OPENVINO_ASSERT(shape.rank().compatible(3), "TokenBranch: ", shape, " are not tokens");
        set_output_type(0, get_input_element_type(X), shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<TokenBranch>(inputs, m_heads, m_scales, m_norm_last, m_epsilon);
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto& shape = inputs[X].get_shape();
        want_pictures(*this, shape, shape.size() == 3 ? shape[1] : 0, inputs[FIRST + GAIN].get_size());
        outputs[0].set_shape(shape);
        if (outputs[0].get_size() > 0)
            compute_all(inputs, FIRST, nullptr, *all_of(shape[1]), outputs[0], false);
        return true;
    }

private:
    // All tokens as one window, kept for the next picture of as many.
    std::shared_ptr<const Windows> all_of(size_t tokens) const {
        const std::lock_guard<std::mutex> lock(m_lock);
        if (!m_windows || m_windows->tokens != tokens) {
            std::vector<int32_t> places(tokens);
            std::iota(places.begin(), places.end(), 0);
            const std::vector<uint8_t> region(tokens);
            m_windows = std::make_shared<Windows>(std::move(places), tokens, tokens, false, region.data(), 1);
        }
        return m_windows;
    }

    mutable std::mutex m_lock;
    mutable std::shared_ptr<const Windows> m_windows;
};

}  // namespace swin_quant

// Step 1 and 2 of a plugin operator: the branch of a block with attention among all tokens of a picture.
#pragma once

#include "window_operator.hpp"

namespace swin_quant {

// x [B, T, C] plus proj(attention(qkv(norm(x)))), or norm(proj(attention(qkv(x)))) with `norm_last`; float32 or bfloat16. The
// other inputs are constants: those of `WindowOperator` to proj, and those of the words of `parts`, in this order: "bias", its
// position biases; "layer_norm" and "rotary", what `Turn` has. Biases and a table are for T tokens; without them there
// may be any number.
class TokenBranch : public WindowOperator {
public:
    OPENVINO_OP("TokenBranch", "swin_quant");

    enum Input { X, FIRST };

    TokenBranch() = default;
    TokenBranch(const ov::OutputVector& inputs, int64_t heads, std::vector<float> scales, bool norm_last, float epsilon,
                std::string parts)
        : WindowOperator(inputs, heads, std::move(scales), norm_last, epsilon), m_parts(std::move(parts)) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        std::string known;
        for (const auto* word : {"bias", "layer_norm", "rotary"})
            known += has(word) ? (known.empty() ? "" : " ") + std::string(word) : "";
        OPENVINO_ASSERT(m_parts == known, "TokenBranch: has no parts ", m_parts);
        OPENVINO_ASSERT(get_input_size() == table() + has("rotary"), "TokenBranch: cannot have ", get_input_size(), " inputs");
        want_branch(FIRST, get_input_size() - norms(), has("bias"));
        const size_t depth = depth_of();
        if (has("layer_norm"))
            want_constant(*this, norms(), {ov::element::f32}, 4 * depth);
        if (has("rotary")) {
            const size_t tokens = has("bias") ? length_of(FIRST) : sized(table()) / (2 * depth);
            OPENVINO_ASSERT(depth % 2 == 0, "TokenBranch: cannot turn ", depth, " channels");
            want_constant(*this, table(), {ov::element::f32}, 2 * tokens * depth);
        }
        const auto& shape = get_input_partial_shape(X);
        OPENVINO_ASSERT(shape.rank().compatible(3), "TokenBranch: ", shape, " are not tokens");
        set_output_type(0, get_input_element_type(X), shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<TokenBranch>(inputs, m_heads, m_scales, m_norm_last, m_epsilon, m_parts);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("parts", m_parts);
        return WindowOperator::visit_attributes(visitor);
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto floats = [&](size_t i) { return inputs[i].data<const float>(); };
        Turn turn{};
        if (has("layer_norm"))
            turn.norms = floats(norms()), turn.epsilon = m_epsilon;
        if (has("rotary"))
            turn.table = floats(table());
        const auto& shape = inputs[X].get_shape();
        size_t tokens = shape.size() == 3 ? shape[1] : 0;
        if (has("bias"))
            tokens = length_of(FIRST);
        else if (has("rotary"))
            tokens = inputs[table()].get_size() / (2 * depth_of());
        want_pictures(*this, shape, tokens, inputs[FIRST + GAIN].get_size());
        outputs[0].set_shape(shape);
        if (outputs[0].get_size() > 0)
            compute_all(inputs, FIRST, nullptr, *all_of(tokens), outputs[0], has("bias"), turn);
        return true;
    }

private:
    bool has(const char* word) const {
        return m_parts.find(word) != std::string::npos;
    }

    // Where the inputs of these parts stand.
    size_t norms() const {
        return FIRST + (has("bias") ? CONSTANTS : TABLE);
    }

    size_t table() const {
        return norms() + has("layer_norm");
    }

    // Channels of a head.
    size_t depth_of() const {
        return weights_of(*this, FIRST + QKV)[0] / size_t(m_heads);
    }

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

    std::string m_parts;
    mutable std::mutex m_lock;
    mutable std::shared_ptr<const Windows> m_windows;
};

}  // namespace swin_quant

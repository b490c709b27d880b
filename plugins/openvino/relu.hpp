// Step 1 and 2 of a plugin operator: it is declared, and computed.
#pragma once

#include "openvino/op/op.hpp"

namespace swin_quant {

// max(x, 0), of float32, float16 and bfloat16; NaN stays NaN.
class Relu : public ov::op::Op {
public:
    OPENVINO_OP("Relu", "swin_quant");

    Relu() = default;
    explicit Relu(const ov::Output<ov::Node>& x) : Op({x}) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        set_output_type(0, get_input_element_type(0), get_input_partial_shape(0));
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<Relu>(inputs.at(0));
    }

    bool visit_attributes(ov::AttributeVisitor&) override {
        return true;
    }

    bool has_evaluate() const override {
        const auto type = get_input_element_type(0);
        return type == ov::element::f32 || type == ov::element::f16 || type == ov::element::bf16;
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        outputs[0].set_shape(inputs[0].get_shape());
        const auto type = inputs[0].get_element_type();
        if (type == ov::element::f32)
            return compute<float>(outputs[0], inputs[0]);
        if (type == ov::element::f16)
            return compute<ov::float16>(outputs[0], inputs[0]);
        return type == ov::element::bf16 && compute<ov::bfloat16>(outputs[0], inputs[0]);
    }

private:
    template <typename T>
    static bool compute(ov::Tensor& output, const ov::Tensor& input) {
        const T zero(0.0f);
        const T* from = input.data<const T>();
        T* into = output.data<T>();
        for (size_t i = 0; i < input.get_size(); ++i)
            into[i] = from[i] < zero ? zero : from[i];
        return true;
    }
};

}  // namespace swin_quant

// Step 1 and 2 of a plugin operator: it is declared (inputs, attributes, shapes), and computed.
#pragma once

#include <cstring>
#include <vector>

#include "openvino/op/op.hpp"

namespace swin_quant {

// torch.roll along named dimensions: y[..., (i + shift) mod n, ...] = x[..., i, ...]. Any type of whole bytes.
class Roll : public ov::op::Op {
public:
    OPENVINO_OP("Roll", "swin_quant");

    Roll() = default;
    Roll(const ov::Output<ov::Node>& x, std::vector<int64_t> shifts, std::vector<int64_t> dims)
        : Op({x}), m_shifts(std::move(shifts)), m_dims(std::move(dims)) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(m_shifts.size() == m_dims.size(), "Roll: wants a shift for each of dims");
        const auto& shape = get_input_partial_shape(0);
        for (auto dim : m_dims) {
            const auto inside = dim >= 0 && (shape.rank().is_dynamic() || dim < shape.rank().get_length());
            OPENVINO_ASSERT(inside, "Roll: the input has no dimension ", dim);
        }
        set_output_type(0, get_input_element_type(0), shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<Roll>(inputs.at(0), m_shifts, m_dims);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("shifts", m_shifts);
        visitor.on_attribute("dims", m_dims);
        return true;
    }

    bool has_evaluate() const override {
        return true;
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto shape = inputs[0].get_shape();
        outputs[0].set_shape(shape);
        std::vector<size_t> shift(shape.size(), 0);
        for (size_t i = 0; i < m_dims.size(); ++i) {
            const auto length = static_cast<int64_t>(shape[m_dims[i]]);
            if (length > 0)
                shift[m_dims[i]] = (shift[m_dims[i]] + (m_shifts[i] % length + length) % length) % length;
        }
        auto outer = shape.size();  // dimensions behind the last one that is rolled move as one run
        while (outer > 0 && shift[outer - 1] == 0)
            --outer;
        size_t run = inputs[0].get_element_type().size(), rows = 1;
        for (size_t d = outer; d < shape.size(); ++d)
            run *= shape[d];
        for (size_t d = 0; d < outer; ++d)
            rows *= shape[d];
        const auto* from = static_cast<const char*>(inputs[0].data());
        auto* into = static_cast<char*>(outputs[0].data());
        std::vector<size_t> index(outer, 0);
        for (size_t row = 0; row < rows; ++row) {
            size_t place = 0;
            for (size_t d = 0; d < outer; ++d)
                place = place * shape[d] + (index[d] + shift[d]) % shape[d];
            std::memcpy(into + place * run, from + row * run, run);
            for (size_t d = outer; d-- > 0 && ++index[d] == shape[d];)
                index[d] = 0;
        }
        return true;
    }

private:
    std::vector<int64_t> m_shifts, m_dims;
};

}  // namespace swin_quant

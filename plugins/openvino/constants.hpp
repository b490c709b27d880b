// Inputs of operators that are constants: checked, and read.
#pragma once

#include <cstring>

#include "linear.hpp"
#include "openvino/op/constant.hpp"
#include "openvino/op/convert.hpp"
#include "openvino/op/op.hpp"

namespace swin_quant {

enum OfLinear { SCALE, ZERO, WEIGHTS, SCALES, BIASES, OF_LINEAR };  // what a linear takes, as nodes of ONNX have it

// Input `i` of a node must be a constant of one of these types, with so many values.
inline void want_constant(const ov::Node& node, size_t i, std::initializer_list<ov::element::Type> types, size_t size) {
    OPENVINO_ASSERT(!ov::is_type<ov::op::v0::Convert>(node.get_input_node_ptr(i)), node.get_type_name(), ": its input ", i,
                    " is converted, as `save_model` writes float16: save the model with compress_to_fp16=False");
    const auto type = node.get_input_element_type(i);
    const bool fits = std::find(types.begin(), types.end(), type) != types.end();
    OPENVINO_ASSERT(fits && ov::is_type<ov::op::v0::Constant>(node.get_input_node_ptr(i)), node.get_type_name(), ": its input ",
                    i, " must be a constant, not ", type, " from a ", node.get_input_node_ptr(i)->get_type_name());
    OPENVINO_ASSERT(ov::shape_size(node.get_input_shape(i)) == size, node.get_type_name(), ": its input ", i, " is ",
                    node.get_input_shape(i), ", and must have ", size, " values");
}

// The shape [in, out] of the weights of the linear from input `first` on, which must be known.
inline ov::Shape weights_of(const ov::Node& node, size_t first) {
    const auto& shape = node.get_input_partial_shape(first + WEIGHTS);
    OPENVINO_ASSERT(shape.is_static() && shape.size() == 2 && shape[0].get_length() > 0 && shape[1].get_length() > 0,
                    node.get_type_name(), ": its weights are ", shape);
    return shape.to_shape();
}

// The inputs from `first` on must be those of a linear [in, out].
inline void want_linear(const ov::Node& node, size_t first, size_t in, size_t out) {
    using namespace ov::element;
    want_constant(node, first + SCALE, {f32}, 1);
    want_constant(node, first + ZERO, {i8, u8}, 1);
    want_constant(node, first + WEIGHTS, {i8}, in * out);
    OPENVINO_ASSERT(weights_of(node, first) == (ov::Shape{in, out}), node.get_type_name(), ": its weights ",
                    weights_of(node, first), " must be ", in, " x ", out);
    want_constant(node, first + SCALES, {f32}, out);
    want_constant(node, first + BIASES, {f32}, out);
}

// Input `i` must be a constant of `size` places below `end`.
inline void want_places(const ov::Node& node, size_t i, size_t size, size_t end) {
    want_constant(node, i, {ov::element::i32}, size);
    const auto places = ov::as_type<ov::op::v0::Constant>(node.get_input_node_ptr(i))->cast_vector<int32_t>();
    const auto [least, most] = std::minmax_element(places.begin(), places.end());
    OPENVINO_ASSERT(*least >= 0 && size_t(*most) < end, node.get_type_name(), ": its input ", i, " must be within 0 and ",
                    end - 1, ", not ", *least, " to ", *most);
}

// The input of a branch: a stream [..., width].
inline void want_stream(const ov::Node& node, size_t width) {
    const auto type = node.get_input_element_type(0);
    OPENVINO_ASSERT(type.compatible(ov::element::f32) || type == ov::element::bf16, node.get_type_name(),
                    ": its input cannot be ", type);
    const auto& shape = node.get_input_partial_shape(0);
    OPENVINO_ASSERT(shape.rank().is_dynamic() || (shape.size() > 0 && shape[shape.size() - 1].compatible(width)),
                    node.get_type_name(), ": ", shape, " does not end in ", width, " channels");
}

// A shape, as it is at last, must be [B, tokens, width].
inline void want_pictures(const ov::Node& node, const ov::Shape& shape, size_t tokens, size_t width) {
    OPENVINO_ASSERT(shape.size() == 3 && shape[1] == tokens && shape[2] == width, node.get_type_name(), ": ", shape,
                    " are not pictures of ", tokens, " tokens of ", width, " channels");
}

// The same of a map [B, H, W, width].
inline void want_map(const ov::Node& node, const ov::Shape& shape, size_t width) {
    OPENVINO_ASSERT(shape.size() == 4 && shape[3] == width, node.get_type_name(), ": ", shape, " are not maps of ", width,
                    " channels");
}

// [B, ceil(H / side), ceil(W / side), width]: of x, whose height and width are its dimensions `first` and the next.
inline ov::PartialShape shape_of_map(const ov::Node& node, const ov::PartialShape& x, size_t first, int64_t side, size_t width) {
    if (x.rank().is_dynamic())
        return {ov::Dimension(), ov::Dimension(), ov::Dimension(), int64_t(width)};
    OPENVINO_ASSERT(x.size() == 4, node.get_type_name(), ": ", x, " are no maps");
    const auto parts = [&](const ov::Dimension& size) {
        return size.is_dynamic() ? ov::Dimension() : ov::Dimension((size.get_length() + side - 1) / side);
    };
    return {x[0], parts(x[first]), parts(x[first + 1]), int64_t(width)};
}

// Plain loops store float32 as it is, and bfloat16 half to even: OpenVINO's own conversion cuts.
inline void store(const std::vector<float>& row, float* place) {
    std::copy(row.begin(), row.end(), place);
}

inline void store(const std::vector<float>& row, ov::bfloat16* place) {
    std::transform(row.begin(), row.end(), place, [](float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        if (!std::isnan(value))
            bits += 0x7fff + (bits >> 16 & 1);
        return ov::bfloat16::from_bits(uint16_t(bits >> 16));
    });
}

inline Linear linear_of(const ov::Tensor* inputs) {
    const auto& zero = inputs[ZERO];
    const bool is_signed = zero.get_element_type() == ov::element::i8;  // as uint8 they lie 128 higher
    const int middle = is_signed ? *zero.data<const int8_t>() + 128 : *zero.data<const uint8_t>();
    const auto& shape = inputs[WEIGHTS].get_shape();
    return {shape[0], shape[1], inputs[WEIGHTS].data<const int8_t>(), inputs[SCALES].data<const float>(),
            inputs[BIASES].data<const float>(), {*inputs[SCALE].data<const float>(), middle}};
}

}  // namespace swin_quant

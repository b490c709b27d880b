// Step 1 and 2 of a plugin operator: the branch of a block with its window attention, for maps of any height and width.
#pragma once

#include "window_operator.hpp"

namespace swin_quant {

// The windows of a map, padded with zeros at the bottom and the right until they are whole, and rolled up and left by
// `shift`. `pad_first`: padded, then rolled; else rolled, then padded.
inline Windows windows_of(size_t height, size_t width, const std::vector<int64_t>& window, const std::vector<int64_t>& shift,
                          bool pad_first) {
    const size_t high = size_t(window[0]), wide = size_t(window[1]), length = high * wide;
    const size_t rows = (height + high - 1) / high * high, columns = (width + wide - 1) / wide * wide;
    const auto source = [&](size_t place, size_t size, size_t whole, size_t by) {  // -1: beyond the map
        const size_t found = pad_first ? (place + by) % whole : place < size ? (place + by) % size : size;
        return found < size ? int32_t(found) : Windows::NOWHERE;
    };
    const auto part = [](size_t place, size_t whole, size_t side, size_t by) {
        return uint8_t((place + side >= whole) + (place + by >= whole));
    };
    std::vector<int32_t> places;
    std::vector<uint8_t> regions;
    for (size_t top = 0; top < rows; top += high)
        for (size_t left = 0; left < columns; left += wide)
            for (size_t i = 0; i < length; ++i) {
                const size_t row = top + i / wide, column = left + i % wide;
                const auto y = source(row, height, rows, size_t(shift[0])), x = source(column, width, columns, size_t(shift[1]));
                places.push_back(y < 0 || x < 0 ? Windows::NOWHERE : y * int32_t(width) + x);
                regions.push_back(uint8_t(3 * part(row, rows, high, size_t(shift[0])) + part(column, columns, wide, size_t(shift[1]))));
            }
    const size_t count = places.size() / length;
    return {std::move(places), height * width, length, true, regions.data(), count};
}

// x [B, H, W, C] plus proj(attention(qkv(norm(x)))), or norm(proj(attention(qkv(x)))) with `norm_last`, window by window;
// float32 or bfloat16. The other inputs are constants, those of `WindowOperator`. Padded tokens are zeros behind the norm.
class MapBranch : public WindowOperator {
public:
    OPENVINO_OP("MapBranch", "swin_quant");

    enum Input { X, FIRST, LENGTHS = FIRST + CONSTANTS };

    MapBranch() = default;
    MapBranch(const ov::OutputVector& inputs, int64_t heads, std::vector<float> scales, bool norm_last, float epsilon,
              std::vector<int64_t> window, std::vector<int64_t> shift, bool pad_first)
        : WindowOperator(inputs, heads, std::move(scales), norm_last, epsilon), m_window(std::move(window)),
          m_shift(std::move(shift)), m_pad_first(pad_first) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        want_branch(FIRST, 0);
        const auto length = int64_t(length_of(FIRST));
        const bool fits = m_window.size() == 2 && m_shift.size() == 2 && m_window[0] > 0 && m_window[0] <= length &&
                          m_window[0] * m_window[1] == length;
        OPENVINO_ASSERT(fits && m_shift[0] >= 0 && m_shift[0] < m_window[0] && m_shift[1] >= 0 && m_shift[1] < m_window[1],
                        "MapBranch: wants a window of ", length, " tokens, and a shift within it");
        const auto& shape = get_input_partial_shape(X);
        OPENVINO_ASSERT(shape.rank().compatible(4), "MapBranch: ", shape, " are not maps");
        set_output_type(0, get_input_element_type(X), shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<MapBranch>(inputs, m_heads, m_scales, m_norm_last, m_epsilon, m_window, m_shift, m_pad_first);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("window", m_window);
        visitor.on_attribute("shift", m_shift);
        visitor.on_attribute("pad_first", m_pad_first);
        return WindowOperator::visit_attributes(visitor);
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto& shape = inputs[X].get_shape();
        OPENVINO_ASSERT(shape.size() == 4 && shape[3] == inputs[FIRST + GAIN].get_size() && shape[1] * shape[2] < 1u << 30,
                        "MapBranch: ", shape, " are not maps of ", inputs[FIRST + GAIN].get_size(), " channels");
        const auto windows = of_map(shape[1], shape[2]);
        compute_all(inputs, FIRST, inputs.size() > LENGTHS ? &inputs[LENGTHS] : nullptr, *windows, outputs[0]);
        return true;
    }

private:
    // The windows of a map, kept for the next one of its size.
    std::shared_ptr<const Windows> of_map(size_t height, size_t width) const {
        const std::lock_guard<std::mutex> lock(m_lock);
        if (!m_windows || m_height != height || m_width != width) {
            m_windows = std::make_shared<Windows>(windows_of(height, width, m_window, m_shift, m_pad_first));
            m_height = height, m_width = width;
        }
        return m_windows;
    }

    std::vector<int64_t> m_window, m_shift;
    bool m_pad_first = false;
    mutable std::mutex m_lock;
    mutable std::shared_ptr<const Windows> m_windows;
    mutable size_t m_height = 0, m_width = 0;
};

}  // namespace swin_quant

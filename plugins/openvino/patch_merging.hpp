// Step 1 and 2 of a plugin operator: patch merging on int8 values is declared, and computed, on all threads.
#pragma once

#include <mutex>

#include "constants.hpp"
#include "linear_fast.hpp"
#include "threads.hpp"

namespace swin_quant {

// x [B, T, C] -> [B, T / 4, E]: four tokens side by side, a norm, and an int8 linear, or the norm last; float32 or bfloat16,
// as the result. The other inputs are constants: gain and bias of the norm [4 C], or [E] with `norm_last`; what the linear
// takes, as of `Mlp`, W int8 [4 C, E]; places [T] in x of the four of each result. Without places, x is a map:
// [B, H, W, C] -> [B, ceil(H / 2), ceil(W / 2), E], with zeros beyond its edges.
class PatchMerging : public ov::op::Op {
public:
    OPENVINO_OP("PatchMerging", "swin_quant");

    enum Input { X, GAIN, BIAS, LINEAR, PLACES = LINEAR + OF_LINEAR, INPUTS };

    PatchMerging() = default;
    PatchMerging(const ov::OutputVector& inputs, bool norm_last, float epsilon)
        : Op(inputs), m_norm_last(norm_last), m_epsilon(epsilon) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        using namespace ov::element;
        OPENVINO_ASSERT(get_input_size() == INPUTS || get_input_size() == PLACES, "PatchMerging: wants ", int(INPUTS),
                        " inputs, one less for maps");
        const auto weights = weights_of(*this, LINEAR);
        const size_t in = weights[0], out = weights[1];
        OPENVINO_ASSERT(in % 4 == 0, "PatchMerging: its weights ", weights, " are not for four tokens");
        want_stream(*this, in / 4);
        want_linear(*this, LINEAR, in, out);
        for (size_t i : {GAIN, BIAS})
            want_constant(*this, i, {f32}, m_norm_last ? out : in);
        const auto& shape = get_input_partial_shape(X);
        if (get_input_size() == PLACES)
            return set_output_type(0, get_input_element_type(X), shape_of_map(*this, shape, 1, 2, out));
        const auto& places = get_input_partial_shape(PLACES);
        OPENVINO_ASSERT(places.is_static() && ov::shape_size(places.to_shape()) > 0 && ov::shape_size(places.to_shape()) % 4 == 0,
                        "PatchMerging: its places are ", places);
        const size_t tokens = ov::shape_size(places.to_shape());
        want_places(*this, PLACES, tokens, tokens);
        OPENVINO_ASSERT(shape.rank().is_dynamic() || (shape.size() == 3 && shape[1].compatible(tokens)), "PatchMerging: ", shape,
                        " are not pictures of ", tokens, " tokens");
        const auto batch = shape.rank().is_dynamic() ? ov::Dimension() : shape[0];
        set_output_type(0, get_input_element_type(X), ov::PartialShape{batch, int64_t(tokens / 4), int64_t(out)});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<PatchMerging>(inputs, m_norm_last, m_epsilon);
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
        const auto linear = linear_of(&inputs[LINEAR]);
        const auto& shape = inputs[X].get_shape();
        const size_t tokens = inputs.size() > PLACES ? inputs[PLACES].get_size() : 0;
        Given given{linear, norm, nullptr, tokens / 4, 0, 1, tokens};
        if (tokens) {
            want_pictures(*this, shape, tokens, linear.in / 4);
            given.places = inputs[PLACES].data<const int32_t>();
            outputs[0].set_shape({shape[0], tokens / 4, linear.out});
        } else {
            want_map(*this, shape, linear.in / 4);
            given.rows = shape[1], given.columns = shape[2], given.of_picture = (shape[1] + 1) / 2 * ((shape[2] + 1) / 2);
            outputs[0].set_shape({shape[0], (shape[1] + 1) / 2, (shape[2] + 1) / 2, linear.out});
        }
        given.all = shape[0] * given.of_picture;
        const bool is_half = inputs[X].get_element_type() == ov::element::bf16;
#if defined(SWIN_QUANT_TARGET)
        if (linear.in % (4 * WIDTHS) == 0 && linear.out % WIDTHS == 0) {
            is_half ? run_fast<uint16_t>(given, inputs[X], outputs[0]) : run_fast<float>(given, inputs[X], outputs[0]);
            return true;
        }
#endif
        is_half ? run<ov::bfloat16>(given, inputs[X], outputs[0]) : run<float>(given, inputs[X], outputs[0]);
        return true;
    }

private:
    struct Given {
        Linear linear;
        Norm norm;
        const int32_t* places;
        size_t of_picture, all;  // results
        size_t rows, columns;    // of x, whose tokens lie row by row

        static constexpr size_t BEYOND = SIZE_MAX;

        // Where one of the four tokens of a result lies in its picture.
        size_t place_of(size_t result, size_t i) const {
            if (places)
                return size_t(places[4 * result + i]);
            const size_t across = (columns + 1) / 2, row = result / across * 2 + i % 2, column = result % across * 2 + i / 2;
            return row < rows && column < columns ? row * columns + column : BEYOND;
        }

        // The four tokens of a result, side by side.
        template <typename From, typename To>
        void gather(const From* x, size_t result, To* row) const {
            const size_t width = linear.in / 4;
            x += result / of_picture * rows * columns * width;
            for (size_t i = 0; i < 4; ++i, row += width) {
                const size_t place = place_of(result % of_picture, i);
                if (place == BEYOND)
                    std::fill_n(row, width, To(0));
                else
                    std::copy_n(x + place * width, width, row);
            }
        }
    };

    template <typename T>
    void run(const Given& given, const ov::Tensor& x, ov::Tensor& y) const {
        for_each(given.all, [&](size_t result) {
            std::vector<float> row(given.linear.in);
            given.gather(static_cast<const T*>(x.data()), result, row.data());
            if (!m_norm_last)
                normalise(given.norm, row);
            row = multiplied(given.linear, row);
            if (m_norm_last)
                normalise(given.norm, row);
            store(row, static_cast<T*>(y.data()) + result * row.size());
        });
    }

#if defined(SWIN_QUANT_TARGET)

    template <typename T>
    void run_fast(const Given& given, const ov::Tensor& x, ov::Tensor& y) const {
        std::call_once(m_once, [&] {
            m_packed = std::make_unique<Packed>(given.linear, in_order(given.linear.out));
            m_to_levels = std::make_unique<ToLevels>(m_norm_last ? nullptr : &given.norm, given.linear.x, given.linear.in);
        });
        const size_t in = given.linear.in, out = given.linear.out, count = tile_of(given.all, TOKENS);
        for_each((given.all + count - 1) / count, [&](size_t i) {
            thread_local std::vector<T> rows;
            thread_local std::vector<float> floats;
            thread_local std::vector<uint8_t> levels;
            rows.resize(std::max(rows.size(), TOKENS * in));
            floats.resize(std::max(floats.size(), TOKENS * out));
            levels.resize(std::max(levels.size(), TOKENS * in));
            const size_t from = i * count, tile = std::min(count, given.all - from);
            for (size_t token = 0; token < tile; ++token)
                given.gather(static_cast<const T*>(x.data()), from + token, &rows[token * in]);
            merge(given, *m_packed, *m_to_levels, m_norm_last, tile, rows.data(), levels.data(), floats.data(),
                  static_cast<T*>(y.data()) + from * out);
        });
    }

    // A tile: rows [tokens, 4 C] -> result [tokens, E]. Room: levels, as the rows; y, as the result.
    template <typename T>
    SWIN_QUANT_TARGET static void merge(const Given& given, const Packed& packed, const ToLevels& to_levels, bool norm_last,
                                        size_t tokens, const T* rows, uint8_t* levels, float* y, T* result) {
        const size_t in = given.linear.in, out = given.linear.out;
        const auto row = [&](size_t token) { return rows + token * in; };
        to_levels(tokens, row, levels);
        multiply_all(packed, 0, out, tokens, levels, [&](size_t token, size_t column, const auto& sums) SWIN_QUANT_INLINE {
            unrolled<sizeof(sums) / sizeof(Floats)>([&](auto v) SWIN_QUANT_INLINE {
                const size_t place = token * out + column + LANES * v;
                norm_last ? put(y + place, sums[v]) : put(result + place, sums[v]);
            });
        });
        const auto own = [&](size_t token) { return static_cast<const float*>(y + token * out); };
        if (norm_last)
            each_row(&given.norm, out, tokens, own, [&](size_t token, size_t i, const auto& normal) SWIN_QUANT_INLINE {
                unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE { put(result + token * out + i + LANES * v, normal[v]); });
            });
    }

    mutable std::once_flag m_once;
    mutable std::unique_ptr<Packed> m_packed;
    mutable std::unique_ptr<ToLevels> m_to_levels;

#endif

    bool m_norm_last = false;
    float m_epsilon = 0;
};

}  // namespace swin_quant

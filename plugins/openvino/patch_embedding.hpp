// Step 1 and 2 of a plugin operator: patch embedding in floats is declared, and computed, on all threads.
#pragma once

#include <mutex>

#include "constants.hpp"
#include "linear_fast.hpp"
#include "threads.hpp"

namespace swin_quant {

// x [B, C, H, W] -> [B, T, E]: the convolution of patches that do not overlap, and a norm; float32 or bfloat16, as the
// result, with sums in float32. The other inputs are constants: W [E, C, p, p] and bias [E] of the convolution; gain and
// bias of the norm [E]; the place [T] of the patch of each result, row by row. Without places the result is a map,
// [B, ceil(H / p), ceil(W / p), E], with zeros beyond the edges of the pictures.
class PatchEmbedding : public ov::op::Op {
public:
    OPENVINO_OP("PatchEmbedding", "swin_quant");

    enum Input { X, FILTERS, OFFSETS, GAIN, BIAS, PLACES, INPUTS };

    PatchEmbedding() = default;
    PatchEmbedding(const ov::OutputVector& inputs, float epsilon) : Op(inputs), m_epsilon(epsilon) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        using namespace ov::element;
        OPENVINO_ASSERT(get_input_size() == INPUTS || get_input_size() == PLACES, "PatchEmbedding: wants ", int(INPUTS),
                        " inputs, one less for maps");
        const auto& filters = get_input_partial_shape(FILTERS);
        OPENVINO_ASSERT(filters.is_static() && filters.size() == 4 && ov::shape_size(filters.to_shape()) > 0 &&
                            filters[2] == filters[3],
                        "PatchEmbedding: its weights are ", filters);
        const auto shape = filters.to_shape();
        for (size_t i : {OFFSETS, GAIN, BIAS})
            want_constant(*this, i, {f32}, shape[0]);
        want_constant(*this, FILTERS, {f32}, ov::shape_size(shape));
        const auto type = get_input_element_type(X);
        OPENVINO_ASSERT(type.compatible(f32) || type == bf16, "PatchEmbedding: its input cannot be ", type);
        const auto& x = get_input_partial_shape(X);
        OPENVINO_ASSERT(x.rank().is_dynamic() || (x.size() == 4 && x[1].compatible(shape[1])), "PatchEmbedding: ", x,
                        " are not pictures of ", shape[1], " channels");
        if (get_input_size() == PLACES)
            return set_output_type(0, type, shape_of_map(*this, x, 2, int64_t(shape[2]), shape[0]));
        const auto& places = get_input_partial_shape(PLACES);
        OPENVINO_ASSERT(places.is_static() && ov::shape_size(places.to_shape()) > 0, "PatchEmbedding: its places are ", places);
        const size_t tokens = ov::shape_size(places.to_shape());
        want_places(*this, PLACES, tokens, tokens);
        if (x.rank().is_static() && x[2].is_static() && x[3].is_static())
            want_patches(x[2].get_length(), x[3].get_length(), shape[2], tokens);
        const auto batch = x.rank().is_dynamic() ? ov::Dimension() : x[0];
        set_output_type(0, type, ov::PartialShape{batch, int64_t(tokens), int64_t(shape[0])});
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<PatchEmbedding>(inputs, m_epsilon);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("epsilon", m_epsilon);
        return true;
    }

    bool has_evaluate() const override {
        return true;
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const auto &x = inputs[X].get_shape(), &filters = inputs[FILTERS].get_shape();
        const size_t tokens = inputs.size() > PLACES ? inputs[PLACES].get_size() : 0, patch = filters[2];
        OPENVINO_ASSERT(x.size() == 4 && x[1] == filters[1], "PatchEmbedding: ", x, " are not pictures of ", filters[1], " channels");
        const size_t down = (x[2] + patch - 1) / patch, across = (x[3] + patch - 1) / patch;
        if (tokens)
            want_patches(x[2], x[3], patch, tokens);
        outputs[0].set_shape(tokens ? ov::Shape{x[0], tokens, filters[0]} : ov::Shape{x[0], down, across, filters[0]});
        const auto floats = [&](size_t i) { return inputs[i].data<const float>(); };
        const Given given{filters[1], patch, x[2], x[3], filters[0], down * across,
                          tokens ? inputs[PLACES].data<const int32_t>() : nullptr,
                          floats(FILTERS), floats(OFFSETS), {floats(GAIN), floats(BIAS), m_epsilon}};
        const bool is_half = inputs[X].get_element_type() == ov::element::bf16;
#if defined(SWIN_QUANT_TARGET)
        if (given.width % WIDTHS == 0) {
            is_half ? run_fast<uint16_t>(given, inputs[X], outputs[0]) : run_fast<float>(given, inputs[X], outputs[0]);
            return true;
        }
#endif
        is_half ? run<ov::bfloat16>(given, inputs[X], outputs[0]) : run<float>(given, inputs[X], outputs[0]);
        return true;
    }

private:
    static void want_patches(size_t rows, size_t columns, size_t patch, size_t tokens) {
        OPENVINO_ASSERT(rows % patch == 0 && columns % patch == 0 && rows / patch * (columns / patch) == tokens,
                        "PatchEmbedding: ", rows, " x ", columns, " pixels are not pictures of ", tokens, " patches");
    }

    struct Given {
        size_t channels, patch, rows, columns, width, tokens;
        const int32_t* places;
        const float *filters, *offsets;
        Norm norm;

        size_t length() const {
            return channels * patch * patch;
        }

        // The first value of a patch, and the rows and columns of it that lie in the picture.
        template <typename T>
        struct Patch {
            const T* first;
            size_t rows, columns;
        };

        template <typename T>
        Patch<T> patch_of(const T* x, size_t result) const {
            const size_t across = (columns + patch - 1) / patch;
            const size_t place = places ? size_t(places[result % tokens]) : result % tokens;
            const size_t row = place / across * patch, column = place % across * patch;
            return {x + result / tokens * channels * rows * columns + row * columns + column, std::min(patch, rows - row),
                    std::min(patch, columns - column)};
        }
    };

    template <typename T>
    void run(const Given& given, const ov::Tensor& x, ov::Tensor& y) const {
        const size_t length = given.length();
        for_each(y.get_size() / given.width, [&](size_t result) {
            std::vector<float> patch(length), row(given.offsets, given.offsets + given.width);
            const auto from = given.patch_of(static_cast<const T*>(x.data()), result);
            for (size_t i = 0; i < length; ++i) {
                const size_t channel = i / given.patch / given.patch, down = i / given.patch % given.patch, right = i % given.patch;
                if (down < from.rows && right < from.columns)
                    patch[i] = from.first[(channel * given.rows + down) * given.columns + right];
            }
            for (size_t column = 0; column < given.width; ++column)
                for (size_t i = 0; i < length; ++i)
                    row[column] += patch[i] * given.filters[column * length + i];
            normalise(given.norm, row);
            store(row, static_cast<T*>(y.data()) + result * given.width);
        });
    }

#if defined(SWIN_QUANT_TARGET)

    static constexpr size_t TOGETHER = LANES == 16 ? 12 : 3;  // results whose sums lie in registers, PARTS vectors each
    static constexpr size_t TILE = 4 * TOGETHER;              // results; with the weights they lie in L1
    static constexpr size_t USUAL = 3 * 4 * 4;                // values of a patch

    template <typename T>
    void run_fast(const Given& given, const ov::Tensor& x, ov::Tensor& y) const {
        const size_t length = given.length(), width = given.width, all = y.get_size() / width;
        std::call_once(m_once, [&] {
            m_weights.resize(length * width);
            for (size_t i = 0; i < length * width; ++i)
                m_weights[i % length * width + i / length] = given.filters[i];
        });
        const size_t count = tile_of(all, TILE);
        for_each((all + count - 1) / count, [&](size_t i) {
            thread_local std::vector<float> room;
            room.resize(std::max(room.size(), TILE * (length + width)));
            const size_t from = i * count;
            embed(given, m_weights.data(), from, std::min(count, all - from), static_cast<const T*>(x.data()), room.data(),
                  room.data() + TILE * length, static_cast<T*>(y.data()) + from * width);
        });
    }

    // A tile: results `from`, `from` + 1 ... Room: patches [count, C p p], sums [count, E].
    template <typename T>
    SWIN_QUANT_TARGET static void embed(const Given& given, const float* weights, size_t from, size_t count, const T* x,
                                        float* patches, float* sums, T* result) {
        const size_t length = given.length(), width = given.width;
        for (size_t token = 0; token < count; ++token) {
            const auto patch = given.patch_of(x, from + token);
            float* to = patches + token * length;
            for (size_t channel = 0; channel < given.channels; ++channel)
                for (size_t row = 0; row < given.patch; ++row, to += given.patch) {
                    const T* line = patch.first + (channel * given.rows + row) * given.columns;
                    const size_t inside = row < patch.rows ? patch.columns : 0;
                    size_t i = 0;
                    for (; i + 4 <= inside; i += 4)
                        put_four(to + i, line + i);
                    for (; i < given.patch; ++i)
                        to[i] = i < inside ? as_float(line[i]) : 0;
                }
        }
        for (size_t token = 0; token < count; token += TOGETHER)
            for (size_t column = 0; column < width; column += WIDTHS) {
                const auto multiply_these = length == USUAL ? multiply<USUAL> : multiply<0>;
                multiply_these(patches + token * length, length, weights + column, width, given.offsets + column,
                               sums + token * width + column);
            }
        const auto row = [&](size_t token) { return static_cast<const float*>(sums + token * width); };
        each_row(&given.norm, width, count, row, [&](size_t token, size_t i, const auto& normal) SWIN_QUANT_INLINE {
            unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE { put(result + token * width + i + LANES * v, normal[v]); });
        });
    }

    // WIDTHS columns of some results; LENGTH: of a patch, if it is known, so that few registers point to them.
    template <size_t LENGTH>
    SWIN_QUANT_TARGET static void multiply(const float* patches, size_t length, const float* weights, size_t width,
                                           const float* offsets, float* result) {
        length = LENGTH ? LENGTH : length;
        Floats sums[TOGETHER][PARTS];
        unrolled<TOGETHER>([&](auto r) SWIN_QUANT_INLINE {
            unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE { sums[r][v] = load(offsets + LANES * v); });
        });
        for (size_t i = 0; i < length; ++i) {
            Floats of[PARTS];
            unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE { of[v] = load(weights + i * width + LANES * v); });
            unrolled<TOGETHER>([&](auto r) SWIN_QUANT_INLINE {
                const Floats value = floats_of(patches[r * length + i]);
                unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE { sums[r][v] = fma(value, of[v], sums[r][v]); });
            });
        }
        unrolled<TOGETHER>([&](auto r) SWIN_QUANT_INLINE {
            unrolled<PARTS>([&](auto v) SWIN_QUANT_INLINE { put(result + r * width + LANES * v, sums[r][v]); });
        });
    }

    static float as_float(float value) {
        return value;
    }

    // A value in bfloat16.
    static float as_float(uint16_t value) {
        const uint32_t bits = uint32_t(value) << 16;
        float result;
        std::memcpy(&result, &bits, sizeof(result));
        return result;
    }

    SWIN_QUANT_INLINE static void put_four(float* place, const float* values) {
        _mm_storeu_ps(place, _mm_loadu_ps(values));
    }

    SWIN_QUANT_INLINE static void put_four(float* place, const uint16_t* values) {
        const __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)));
        _mm_storeu_ps(place, _mm_castsi128_ps(_mm_slli_epi32(wide, 16)));
    }

    mutable std::once_flag m_once;
    mutable std::vector<float> m_weights;  // [C p p, E]

#endif

    float m_epsilon = 0;
};

}  // namespace swin_quant

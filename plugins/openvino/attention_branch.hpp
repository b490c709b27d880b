// Step 1 and 2 of a plugin operator: the branch of a block with its window attention is declared, and computed, on all threads.
#pragma once

#include <mutex>

#include "constants.hpp"
#include "threads.hpp"
#include "window_branch_fast.hpp"

namespace swin_quant {

// x [B, T, C] in another order, plus proj(attention(qkv(norm(x)))), or norm(proj(attention(qkv(x)))) with `norm_last`,
// window by window; float32 or bfloat16. The other inputs are constants: places [T] in x of the tokens, window by window;
// gain and bias of the norm [C]; what qkv takes, as of `Mlp`, W int8 [C, 3C]; the same for proj, W int8 [C, C]; position
// biases [heads, P], and which of them two tokens have, int32 [L, L]; the region of each token, uint8 [nW, L]; for V2
// the length [heads] to which q is normalised, when k has 1. Scales: of q, k, v, and of the softmax where it is rounded.
class AttentionBranch : public ov::op::Op {
public:
    OPENVINO_OP("AttentionBranch", "swin_quant");

    enum Input { X, PLACES, GAIN, BIAS, QKV, PROJ = QKV + OF_LINEAR, TABLE = PROJ + OF_LINEAR, INDEX, REGIONS, LENGTHS };

    AttentionBranch() = default;
    AttentionBranch(const ov::OutputVector& inputs, int64_t heads, std::vector<float> scales, bool norm_last, float epsilon)
        : Op(inputs), m_heads(heads), m_scales(std::move(scales)), m_norm_last(norm_last), m_epsilon(epsilon) {
        constructor_validate_and_infer_types();
    }

    void validate_and_infer_types() override {
        using namespace ov::element;
        const auto number = get_input_size();
        OPENVINO_ASSERT(number == LENGTHS || number == LENGTHS + 1, "AttentionBranch: cannot have ", number, " inputs");
        const size_t width = weights_of(*this, QKV)[0], heads = m_heads;
        OPENVINO_ASSERT(m_heads > 0 && width % heads == 0 && (m_scales.size() == 3 || m_scales.size() == 4) &&
                            *std::min_element(m_scales.begin(), m_scales.end()) > 0,
                        "AttentionBranch: wants heads that divide ", width, " channels, and 3 or 4 scales above 0");
        want_stream(*this, width);
        want_linear(*this, QKV, width, 3 * width);
        want_linear(*this, PROJ, width, width);
        for (size_t i : {GAIN, BIAS})
            want_constant(*this, i, {f32}, width);
        if (number > LENGTHS)
            want_constant(*this, LENGTHS, {f32}, heads);
        const auto sized = [&](Input i) {
            const auto& shape = get_input_partial_shape(i);
            OPENVINO_ASSERT(shape.is_static() && shape_size(shape.to_shape()) > 0, "AttentionBranch: its input ", int(i),
                            " is ", shape);
            return shape_size(shape.to_shape());
        };
        const size_t tokens = sized(PLACES), square = sized(INDEX), biases = sized(TABLE), of_rounds = sized(REGIONS);
        const auto length = size_t(std::lround(std::sqrt(double(square))));
        OPENVINO_ASSERT(length * length == square && biases % heads == 0 && of_rounds % length == 0 && tokens % of_rounds == 0,
                        "AttentionBranch: ", tokens, " tokens in regions ", get_input_shape(REGIONS), ", with biases ",
                        get_input_shape(TABLE), " at ", get_input_shape(INDEX), ", are not windows of ", heads, " heads");
        want_constant(*this, TABLE, {f32}, biases);
        want_constant(*this, REGIONS, {u8}, of_rounds);
        want_places(*this, PLACES, tokens, tokens);
        want_places(*this, INDEX, square, biases / heads);
        const auto* zero = ov::as_type<ov::op::v0::Constant>(get_input_node_ptr(PROJ + ZERO));
        OPENVINO_ASSERT(zero->get_element_type() == i8 && zero->cast_vector<int>()[0] == 0,
                        "AttentionBranch: what proj takes cannot have a zero point");
        const auto& shape = get_input_partial_shape(X);
        OPENVINO_ASSERT(shape.rank().is_dynamic() || (shape.size() == 3 && shape[1].compatible(tokens)), "AttentionBranch: ",
                        shape, " are not pictures of ", tokens, " tokens");
        set_output_type(0, get_input_element_type(X), shape);
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<AttentionBranch>(inputs, m_heads, m_scales, m_norm_last, m_epsilon);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("heads", m_heads);
        visitor.on_attribute("scales", m_scales);
        visitor.on_attribute("norm_last", m_norm_last);
        visitor.on_attribute("epsilon", m_epsilon);
        return true;
    }

    bool has_evaluate() const override {
        return true;
    }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        std::call_once(m_once, [&] { pack(inputs); });
        const auto branch = branch_of(inputs);
        want_pictures(*this, inputs[X].get_shape(), branch.tokens, branch.proj.in);
        outputs[0].set_shape(inputs[X].get_shape());
#if defined(SWIN_QUANT_TARGET)
        if (m_packed) {
            const bool is_half = inputs[X].get_element_type() == ov::element::bf16;
            is_half ? run_fast<uint16_t>(branch, inputs[X], outputs[0]) : run_fast<float>(branch, inputs[X], outputs[0]);
            return true;
        }
#endif
        run(branch, inputs[X], outputs[0]);
        return true;
    }

private:
    WindowBranch branch_of(const ov::TensorVector& inputs) const {
        const auto floats = [&](size_t i) { return inputs[i].data<const float>(); };
        WindowBranch branch{};
        branch.qkv = linear_of(&inputs[QKV]), branch.proj = linear_of(&inputs[PROJ]);
        branch.norm = {floats(GAIN), floats(BIAS), m_epsilon}, branch.norm_last = m_norm_last;
        branch.heads = size_t(m_heads), branch.tokens = inputs[PLACES].get_size();
        branch.length = size_t(std::lround(std::sqrt(double(inputs[INDEX].get_size()))));
        branch.places = inputs[PLACES].data<const int32_t>(), branch.bias = m_bias.data();
        branch.regions = inputs[REGIONS].data<const uint8_t>(), branch.rounds = inputs[REGIONS].get_size() / branch.length;
        branch.of_q = m_scales[0], branch.of_k = m_scales[1], branch.of_v = m_scales[2];
        branch.of_shares = m_scales.size() > 3 ? m_scales[3] : 0;
        branch.lengths = inputs.size() > LENGTHS ? floats(LENGTHS) : nullptr;
        return branch;
    }

    void pack(const ov::TensorVector& inputs) const {
        const auto* table = inputs[TABLE].data<const float>();
        const auto* index = inputs[INDEX].data<const int32_t>();
        const size_t heads = size_t(m_heads), square = inputs[INDEX].get_size(), biases = inputs[TABLE].get_size() / heads;
        for (size_t i = 0; i < heads * square; ++i)
            m_bias.push_back(table[i / square * biases + size_t(index[i % square])]);
#if defined(SWIN_QUANT_TARGET)
        const auto branch = branch_of(inputs);
        if (is_fast(branch))
            m_packed = std::make_unique<PackedWindowBranch>(branch);
#endif
    }

    static void run(const WindowBranch& branch, const ov::Tensor& x, ov::Tensor& y) {
        const size_t width = branch.proj.in, windows = branch.tokens / branch.length, size = branch.tokens * width;
        for_each(x.get_size() / size, [&](size_t picture) {
            std::vector<float> own(size), result(size);
            const bool is_half = x.get_element_type() == ov::element::bf16;
            if (is_half)
                std::copy_n(x.data<const ov::bfloat16>() + picture * size, size, own.begin());
            else
                std::copy_n(x.data<const float>() + picture * size, size, own.begin());
            for (size_t window = 0; window < windows; ++window)
                compute(branch, window, own.data(), &result[window * branch.length * width]);
            if (is_half)
                std::copy(result.begin(), result.end(), y.data<ov::bfloat16>() + picture * size);
            else
                std::copy(result.begin(), result.end(), y.data<float>() + picture * size);
        });
    }

#if defined(SWIN_QUANT_TARGET)

    // A thread takes whole windows; where they are few, it takes some heads of one, and then some tokens of proj.
    template <typename T>
    void run_fast(const WindowBranch& branch, const ov::Tensor& input, ov::Tensor& output) const {
        const auto& packed = *m_packed;
        const size_t width = branch.proj.in, length = branch.length, of_picture = branch.tokens / length;
        const size_t windows = input.get_size() / (length * width), pairs = (branch.heads + HEADS - 1) / HEADS;
        const size_t shares = windows % threads() == 0 || windows >= 2 * threads() ? 1 : std::min(pairs, threads());
        const auto* x = static_cast<const T*>(input.data());
        auto* y = static_cast<T*>(output.data());
        const auto attend_share = [&](size_t window, size_t share, uint8_t* attended) {
            const size_t first = pairs * share / shares * HEADS, last = pairs * (share + 1) / shares * HEADS;
            auto* room = bytes(length * (width + HEADS * HEAD));
            attend_heads(branch, packed, window % of_picture, first, std::min(last, branch.heads),
                         x + window / of_picture * branch.tokens * width, room,
                         reinterpret_cast<int8_t*>(room + length * width), attended);
        };
        const auto project = [&](size_t from, size_t count, const uint8_t* attended) {
            thread_local std::vector<float> floats;
            floats.resize(std::max(floats.size(), branch.norm_last ? count * width : 0));
            thread_local std::vector<const T*> rows;  // found once, since every panel of columns asks for them
            rows.resize(std::max(rows.size(), count));
            for (size_t i = 0; i < count; ++i) {
                const size_t place = from + i, picture = place / branch.tokens;
                rows[i] = x + (picture * branch.tokens + size_t(branch.places[place % branch.tokens])) * width;
            }
            const auto row = [found = rows.data()](size_t token) { return found[token]; };
            add_outputs(packed.proj, branch.norm_last ? &branch.norm : nullptr, count, attended, row, floats.data(),
                        y + from * width);
        };
        thread_local std::vector<uint8_t> results;
        if (shares == 1)
            return for_each(windows, [&](size_t window) {
                results.resize(std::max(results.size(), length * width));
                attend_share(window, 0, results.data());
                project(window * length, length, results.data());
            });
        results.resize(std::max(results.size(), windows * length * width));
        auto* attended = results.data();
        for_each(windows * shares, [&](size_t i) {
            attend_share(i / shares, i % shares, attended + i / shares * length * width);
        });
        const size_t tokens = windows * length, count = tile_of(tokens, TOKENS);
        for_each((tokens + count - 1) / count, [&](size_t i) {
            project(i * count, std::min(count, tokens - i * count), attended + i * count * width);
        });
    }

    // Room of the thread.
    static uint8_t* bytes(size_t size) {
        thread_local std::vector<uint8_t> room;
        room.resize(std::max(room.size(), size));
        return room.data();
    }

    mutable std::unique_ptr<PackedWindowBranch> m_packed;

#endif

    int64_t m_heads = 1;
    std::vector<float> m_scales;
    bool m_norm_last = false;
    float m_epsilon = 0;
    mutable std::once_flag m_once;
    mutable std::vector<float> m_bias;
};

}  // namespace swin_quant

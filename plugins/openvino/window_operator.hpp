// What the operators of a window branch share: their constants and attributes, and the branch on all threads.
#pragma once

#include <mutex>

#include "attributes.hpp"
#include "constants.hpp"
#include "threads.hpp"
#include "window_branch_fast.hpp"

namespace swin_quant {

// Input 0 is a stream x [..., C]. From input `first` on there are constants: gain and bias of the norm [C]; what qkv takes,
// as of `Mlp`, W int8 [C, 3C]; the same for proj, W int8 [C, C]; maybe position biases [heads, P], and which of them two
// tokens have, int32 [L, L]. After some inputs of the operator's own V2 has the length [heads] to which q is normalised, when k has
// 1. Scales: of q, k, v, and of the softmax where it is rounded.
class WindowOperator : public ov::op::Op {
public:
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("heads", m_heads);
        visit_bits(visitor, "scales", m_scales);
        visitor.on_attribute("norm_last", m_norm_last);
        visitor.on_attribute("epsilon", m_epsilon);
        return true;
    }

    bool has_evaluate() const override {
        return true;
    }

protected:
    enum Constant { GAIN, BIAS, QKV, PROJ = QKV + OF_LINEAR, TABLE = PROJ + OF_LINEAR, INDEX, CONSTANTS };

    WindowOperator() = default;
    WindowOperator(const ov::OutputVector& inputs, int64_t heads, std::vector<float> scales, bool norm_last, float epsilon)
        : Op(inputs), m_heads(heads), m_scales(std::move(scales)), m_norm_last(norm_last), m_epsilon(epsilon) {}

    // The inputs must be x and the constants from `first` on, `own` others behind them, and maybe lengths.
    void want_branch(size_t first, size_t own, bool has_biases = true) const {
        using namespace ov::element;
        const auto number = get_input_size();
        const size_t lengths = first + (has_biases ? CONSTANTS : TABLE) + own;
        OPENVINO_ASSERT(number == lengths || number == lengths + 1, get_type_name(), ": cannot have ", number, " inputs");
        const size_t width = weights_of(*this, first + QKV)[0], heads = m_heads;
        OPENVINO_ASSERT(m_heads > 0 && width % heads == 0 && (m_scales.size() == 3 || m_scales.size() == 4) &&
                            *std::min_element(m_scales.begin(), m_scales.end()) > 0,
                        get_type_name(), ": wants heads that divide ", width, " channels, and 3 or 4 scales above 0");
        want_stream(*this, width);
        want_linear(*this, first + QKV, width, 3 * width);
        want_linear(*this, first + PROJ, width, width);
        for (size_t i : {GAIN, BIAS})
            want_constant(*this, first + i, {f32}, width);
        if (number > lengths)
            want_constant(*this, lengths, {f32}, heads);
        const auto* zero = ov::as_type<ov::op::v0::Constant>(get_input_node_ptr(first + PROJ + ZERO));
        OPENVINO_ASSERT(zero->get_element_type() == i8 && zero->cast_vector<int>()[0] == 0, get_type_name(),
                        ": what proj takes cannot have a zero point");
        if (!has_biases)
            return;
        const size_t length = length_of(first), biases = sized(first + TABLE);
        OPENVINO_ASSERT(length * length == sized(first + INDEX) && biases % heads == 0, get_type_name(), ": biases ",
                        get_input_shape(first + TABLE), " at ", get_input_shape(first + INDEX), " are not those of ", heads,
                        " heads");
        want_constant(*this, first + TABLE, {f32}, biases);
        want_places(*this, first + INDEX, length * length, biases / heads);
    }

    // Tokens of a window.
    size_t length_of(size_t first) const {
        return size_t(std::lround(std::sqrt(double(sized(first + INDEX)))));
    }

    // How many values an input has, which must be known.
    size_t sized(size_t i) const {
        const auto& shape = get_input_partial_shape(i);
        OPENVINO_ASSERT(shape.is_static() && shape_size(shape.to_shape()) > 0, get_type_name(), ": its input ", i, " is ", shape);
        return shape_size(shape.to_shape());
    }

    // The branch of all pictures, of which `windows` are one's; the constants begin at input `first`.
    void compute_all(const ov::TensorVector& inputs, size_t first, const ov::Tensor* lengths, const Windows& windows,
                     ov::Tensor& output, bool has_biases = true, const Turn& turn = {}) const {
        std::call_once(m_once, [&] {
            if (has_biases)
                gather(inputs, first);
#if defined(SWIN_QUANT_TARGET)
            if (const auto branch = branch_of(inputs, first, lengths, windows.length, turn); is_fast(branch))
                m_packed = std::make_unique<PackedWindowBranch>(branch);
#endif
        });
        output.set_shape(inputs[0].get_shape());
        if (output.get_size() == 0)
            return;
        const auto branch = branch_of(inputs, first, lengths, windows.length, turn);
#if defined(SWIN_QUANT_TARGET)
        if (m_packed && fits<Narrow>(branch))
            return run_fast<Narrow>(branch, windows, inputs[0], output);
        if (m_packed && fits<Wide>(branch))
            return run_fast<Wide>(branch, windows, inputs[0], output);
#endif
        run(branch, windows, inputs[0], output);
    }

    int64_t m_heads = 1;
    std::vector<float> m_scales;
    bool m_norm_last = false;
    float m_epsilon = 0;

private:
    WindowBranch branch_of(const ov::TensorVector& inputs, size_t first, const ov::Tensor* lengths, size_t length,
                           const Turn& turn) const {
        const auto floats = [&](size_t i) { return inputs[first + i].data<const float>(); };
        WindowBranch branch{};
        branch.qkv = linear_of(&inputs[first + QKV]), branch.proj = linear_of(&inputs[first + PROJ]);
        branch.norm = {floats(GAIN), floats(BIAS), m_epsilon}, branch.norm_last = m_norm_last;
        branch.heads = size_t(m_heads), branch.length = length, branch.bias = m_bias.empty() ? nullptr : m_bias.data();
        branch.of_q = m_scales[0], branch.of_k = m_scales[1], branch.of_v = m_scales[2];
        branch.of_shares = m_scales.size() > 3 ? m_scales[3] : 0;
        branch.lengths = lengths ? lengths->data<const float>() : nullptr;
        branch.turn = turn;
        return branch;
    }

    void gather(const ov::TensorVector& inputs, size_t first) const {
        const auto* table = inputs[first + TABLE].data<const float>();
        const auto& index = inputs[first + INDEX];
        const size_t heads = size_t(m_heads), square = index.get_size(), biases = inputs[first + TABLE].get_size() / heads;
        m_bias.reserve(heads * square);
        for (size_t i = 0; i < heads * square; ++i)
            m_bias.push_back(table[i / square * biases + size_t(index.data<const int32_t>()[i % square])]);
    }

    static void run(const WindowBranch& branch, const Windows& windows, const ov::Tensor& x, ov::Tensor& y) {
        const size_t size = windows.tokens * branch.proj.in;
        for_each(x.get_size() / size, [&](size_t picture) {
            std::vector<float> own(size), result(size);
            const bool is_half = x.get_element_type() == ov::element::bf16;
            if (is_half)
                std::copy_n(x.data<const ov::bfloat16>() + picture * size, size, own.begin());
            else
                std::copy_n(x.data<const float>() + picture * size, size, own.begin());
            for (size_t window = 0; window < windows.places.size() / branch.length; ++window)
                compute(branch, windows, window, own.data(), result.data());
            is_half ? store(result, y.data<ov::bfloat16>() + picture * size) : store(result, y.data<float>() + picture * size);
        });
    }

#if defined(SWIN_QUANT_TARGET)

    template <typename Kind>
    void run_fast(const WindowBranch& branch, const Windows& windows, const ov::Tensor& x, ov::Tensor& y) const {
        const bool is_half = x.get_element_type() == ov::element::bf16;
        is_half ? run_fast<Kind, uint16_t>(branch, windows, x, y) : run_fast<Kind, float>(branch, windows, x, y);
    }

    // A thread takes whole windows; where they are few, it takes some heads of one, and then some tokens of proj.
    template <typename Kind, typename T>
    void run_fast(const WindowBranch& branch, const Windows& of_picture, const ov::Tensor& input, ov::Tensor& output) const {
        const auto& packed = *m_packed;
        const size_t width = branch.proj.in, length = branch.length, places = of_picture.places.size();
        const size_t windows = input.get_size() / (of_picture.tokens * width) * places / length;
        const size_t groups = (branch.heads + HEADS<Kind> - 1) / HEADS<Kind>;
        const size_t shares = windows % threads() == 0 || windows >= 2 * threads() ? 1 : std::min(groups, threads());
        const auto* x = static_cast<const T*>(input.data());
        auto* y = static_cast<T*>(output.data());
        const auto attend_share = [&](size_t window, size_t share, uint8_t* attended) {
            const size_t first = groups * share / shares * HEADS<Kind>, last = groups * (share + 1) / shares * HEADS<Kind>;
            auto* room = bytes(length * (width + COLUMNS * (branch.turn ? 1 + sizeof(float) : 1)));
            attend_heads<Kind>(branch, packed, of_picture, window % (places / length), first, std::min(last, branch.heads),
                         x + window * length / places * of_picture.tokens * width, room,
                         reinterpret_cast<int8_t*>(room + length * width), attended);
        };
        const auto project = [&](size_t from, size_t count, const uint8_t* attended) {
            thread_local std::vector<float> floats;
            floats.resize(std::max(floats.size(), branch.norm_last ? count * width : 0));
            thread_local std::vector<const T*> rows;  // found once, since every panel of columns asks for them
            thread_local std::vector<T*> results;
            thread_local std::vector<T> nowhere;
            rows.resize(std::max(rows.size(), count));
            results.resize(rows.size());
            nowhere.resize(std::max(nowhere.size(), width));
            for (size_t i = 0; i < count; ++i) {
                const auto place = of_picture.places[(from + i) % places];
                const size_t token = (from + i) / places * of_picture.tokens + size_t(std::max(place, 0));
                rows[i] = x + token * width;
                results[i] = place == Windows::NOWHERE ? nowhere.data() : y + (of_picture.stay ? token : from + i) * width;
            }
            add_outputs(packed.proj, branch.norm_last ? &branch.norm : nullptr, count, attended,
                        [found = rows.data()](size_t token) { return found[token]; }, floats.data(),
                        [found = results.data()](size_t token) { return found[token]; });
        };
        thread_local std::vector<uint8_t> results;
        if (shares == 1)
            return for_each(windows, [&](size_t window) {
                results.resize(std::max(results.size(), length * width + BEHIND));
                attend_share(window, 0, results.data());
                project(window * length, length, results.data());
            });
        results.resize(std::max(results.size(), windows * length * width + BEHIND));
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

    mutable std::once_flag m_once;
    mutable std::vector<float> m_bias;
};

}  // namespace swin_quant

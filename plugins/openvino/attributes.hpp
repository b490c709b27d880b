// Attributes as OpenVINO's files and caches keep them.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "openvino/core/attribute_visitor.hpp"

namespace swin_quant {

// OpenVINO writes lists of floats with six digits: these are written as the integers of their bits.
inline void visit_bits(ov::AttributeVisitor& visitor, const std::string& name, std::vector<float>& values) {
    std::vector<int64_t> bits(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
        uint32_t own;
        std::memcpy(&own, &values[i], sizeof(own));
        bits[i] = own;
    }
    visitor.on_attribute(name + "_bits", bits);
    values.resize(bits.size());
    for (size_t i = 0; i < bits.size(); ++i) {
        const auto own = uint32_t(bits[i]);
        std::memcpy(&values[i], &own, sizeof(own));
    }
}

}  // namespace swin_quant

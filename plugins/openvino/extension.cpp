// Step 3 of a plugin operator: it is registered, as an operator, and with the parser of ONNX files.
#include "openvino/core/extension.hpp"

#include "attention.hpp"
#include "attention_branch.hpp"
#include "map_branch.hpp"
#include "mlp.hpp"
#include "openvino/core/op_extension.hpp"
#include "openvino/frontend/node_context.hpp"
#include "openvino/frontend/onnx/extension/conversion.hpp"
#include "patch_embedding.hpp"
#include "patch_merging.hpp"
#include "relu.hpp"
#include "roll.hpp"
#include "token_branch.hpp"

#ifndef SWIN_QUANT_DOMAIN
#define SWIN_QUANT_DOMAIN "swin_quant"  // what stands before the :: of `export --plugin roll=swin_quant::Roll`
#endif

namespace {

using Integers = std::vector<int64_t>;

ov::OutputVector roll(const ov::frontend::NodeContext& node) {
    const auto shifts = node.get_attribute<Integers>("shifts");
    const auto dims = node.get_attribute<Integers>("dims");
    return std::make_shared<swin_quant::Roll>(node.get_input(0), shifts, dims)->outputs();
}

ov::OutputVector relu(const ov::frontend::NodeContext& node) {
    return std::make_shared<swin_quant::Relu>(node.get_input(0))->outputs();
}

ov::OutputVector attention(const ov::frontend::NodeContext& node) {
    const auto scales = node.get_attribute<std::vector<double>>("scales");  // all that the parser has
    return std::make_shared<swin_quant::Attention>(ov::OutputVector{node.get_input(0), node.get_input(1)},
                                                   node.get_attribute<int64_t>("heads"),
                                                   std::vector<float>(scales.begin(), scales.end()))
        ->outputs();
}

ov::OutputVector inputs_of(const ov::frontend::NodeContext& node) {
    ov::OutputVector inputs;
    for (size_t i = 0; i < node.get_input_size(); ++i)
        inputs.push_back(node.get_input(int(i)));
    return inputs;
}

ov::OutputVector attention_branch(const ov::frontend::NodeContext& node) {
    const auto scales = node.get_attribute<std::vector<double>>("scales");
    return std::make_shared<swin_quant::AttentionBranch>(
               inputs_of(node), node.get_attribute<int64_t>("heads"), std::vector<float>(scales.begin(), scales.end()),
               node.get_attribute<int64_t>("norm_last") != 0, node.get_attribute<float>("epsilon"))
        ->outputs();
}

ov::OutputVector map_branch(const ov::frontend::NodeContext& node) {
    const auto scales = node.get_attribute<std::vector<double>>("scales");
    return std::make_shared<swin_quant::MapBranch>(
               inputs_of(node), node.get_attribute<int64_t>("heads"), std::vector<float>(scales.begin(), scales.end()),
               node.get_attribute<int64_t>("norm_last") != 0, node.get_attribute<float>("epsilon"),
               node.get_attribute<Integers>("window"), node.get_attribute<Integers>("shift"),
               node.get_attribute<int64_t>("pad_first") != 0)
        ->outputs();
}

ov::OutputVector token_branch(const ov::frontend::NodeContext& node) {
    const auto scales = node.get_attribute<std::vector<double>>("scales");
    return std::make_shared<swin_quant::TokenBranch>(
               inputs_of(node), node.get_attribute<int64_t>("heads"), std::vector<float>(scales.begin(), scales.end()),
               node.get_attribute<int64_t>("norm_last") != 0, node.get_attribute<float>("epsilon"),
               node.get_attribute<std::string>("parts", ""))
        ->outputs();
}

ov::OutputVector mlp(const ov::frontend::NodeContext& node) {
    const auto norm_last = node.get_attribute<int64_t>("norm_last") != 0;
    const auto activation = node.get_attribute<std::string>("activation", "gelu");  // which older files do not have
    return std::make_shared<swin_quant::Mlp>(inputs_of(node), norm_last, node.get_attribute<float>("epsilon"), activation)
        ->outputs();
}

ov::OutputVector patch_embedding(const ov::frontend::NodeContext& node) {
    return std::make_shared<swin_quant::PatchEmbedding>(inputs_of(node), node.get_attribute<float>("epsilon"))->outputs();
}

ov::OutputVector patch_merging(const ov::frontend::NodeContext& node) {
    const auto norm_last = node.get_attribute<int64_t>("norm_last") != 0;
    return std::make_shared<swin_quant::PatchMerging>(inputs_of(node), norm_last, node.get_attribute<float>("epsilon"))
        ->outputs();
}

std::vector<ov::Extension::Ptr> all() {
    OPENVINO_ASSERT(swin_quant::runs_here(), "the library is built for instructions that this CPU does not have");
    return {
        std::make_shared<ov::OpExtension<swin_quant::Roll>>(),
        std::make_shared<ov::OpExtension<swin_quant::Relu>>(),
        std::make_shared<ov::OpExtension<swin_quant::Attention>>(),
        std::make_shared<ov::OpExtension<swin_quant::AttentionBranch>>(),
        std::make_shared<ov::OpExtension<swin_quant::MapBranch>>(),
        std::make_shared<ov::OpExtension<swin_quant::Mlp>>(),
        std::make_shared<ov::OpExtension<swin_quant::PatchEmbedding>>(),
        std::make_shared<ov::OpExtension<swin_quant::PatchMerging>>(),
        std::make_shared<ov::OpExtension<swin_quant::TokenBranch>>(),
        std::make_shared<ov::frontend::onnx::ConversionExtension>("Roll", SWIN_QUANT_DOMAIN, roll),
        std::make_shared<ov::frontend::onnx::ConversionExtension>("Relu", SWIN_QUANT_DOMAIN, relu),
        std::make_shared<ov::frontend::onnx::ConversionExtension>("Attention", SWIN_QUANT_DOMAIN, attention),
        std::make_shared<ov::frontend::onnx::ConversionExtension>("AttentionBranch", SWIN_QUANT_DOMAIN, attention_branch),
        std::make_shared<ov::frontend::onnx::ConversionExtension>("MapBranch", SWIN_QUANT_DOMAIN, map_branch),
        std::make_shared<ov::frontend::onnx::ConversionExtension>("Mlp", SWIN_QUANT_DOMAIN, mlp),
        std::make_shared<ov::frontend::onnx::ConversionExtension>("PatchEmbedding", SWIN_QUANT_DOMAIN, patch_embedding),
        std::make_shared<ov::frontend::onnx::ConversionExtension>("PatchMerging", SWIN_QUANT_DOMAIN, patch_merging),
        std::make_shared<ov::frontend::onnx::ConversionExtension>("TokenBranch", SWIN_QUANT_DOMAIN, token_branch),
    };
}

}  // namespace

OPENVINO_CREATE_EXTENSIONS(all());

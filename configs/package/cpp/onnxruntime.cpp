// infer_onnxruntime MODEL INPUT [HEIGHT WIDTH]: the model's first output for the pictures in INPUT, a number a line.
// Height and width are for a model that takes pictures of any size.
// INPUT holds raw numbers, as `python preprocess.py cat.jpg input.bin` writes them.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "settings.h"  // what package.json has under session

int main(int count, char** words) try {
    if (count != 3 && count != 5) {
        std::fprintf(stderr, "usage: %s MODEL INPUT [HEIGHT WIDTH]\n", words[0]);
        return 2;
    }
    std::ifstream file(words[2], std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());

    Ort::Env environment(ORT_LOGGING_LEVEL_ERROR, "infer");
    Ort::SessionOptions options;
    options.SetGraphOptimizationLevel(GraphOptimizationLevel::ORT_ENABLE_ALL);
    for (const auto& setting : SETTINGS)
        options.AddConfigEntry(setting.first, setting.second);
    Ort::Session session(environment, words[1], options);

    Ort::AllocatorWithDefaultOptions allocator;
    auto input = session.GetInputNameAllocated(0, allocator), output = session.GetOutputNameAllocated(0, allocator);
    auto kind = session.GetInputTypeInfo(0);
    auto info = kind.GetTensorTypeAndShapeInfo();
    auto type = info.GetElementType();
    auto shape = info.GetShape();
    std::size_t picture = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? 4 : type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2 : 1;
    for (std::size_t axis = 1; axis < shape.size(); ++axis) {
        if (shape[axis] < 0) shape[axis] = count == 5 ? std::strtoul(words[axis + 1], nullptr, 10) : 0;
        picture *= static_cast<std::size_t>(shape[axis]);
    }
    if (!picture)
        throw std::runtime_error("the model takes pictures of any size: give HEIGHT and WIDTH of those in INPUT");
    if (bytes.empty() || bytes.size() % picture)
        throw std::runtime_error("INPUT does not hold whole pictures of this model");
    if (shape[0] < 0) shape[0] = static_cast<std::int64_t>(bytes.size() / picture);
    if (static_cast<std::size_t>(shape[0]) * picture != bytes.size())
        throw std::runtime_error("INPUT does not hold a batch of this model");

    auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    auto tensor = Ort::Value::CreateTensor(memory, bytes.data(), bytes.size(), shape.data(), shape.size(), type);
    const char* inputs[] = {input.get()};
    const char* outputs[] = {output.get()};
    auto found = session.Run(Ort::RunOptions{nullptr}, inputs, &tensor, 1, outputs, 1);
    if (found[0].GetTensorTypeAndShapeInfo().GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
        throw std::runtime_error("the model's output is not float32: export it so, or run it with infer.py");
    const float* values = found[0].GetTensorData<float>();
    const std::size_t size = found[0].GetTensorTypeAndShapeInfo().GetElementCount();
    for (std::size_t i = 0; i < size; ++i)
        std::printf("%.9g\n", values[i]);
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
}

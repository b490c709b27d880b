// infer_openvino MODEL INPUT [HEIGHT WIDTH]: the model's first output for the pictures in INPUT, a number a line.
// Height and width are for a model that takes pictures of any size.
// INPUT holds raw numbers, as `python preprocess.py cat.jpg input.bin` writes them.
#include <openvino/openvino.hpp>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

int main(int count, char** words) try {
    if (count != 3 && count != 5) {
        std::fprintf(stderr, "usage: %s MODEL INPUT [HEIGHT WIDTH]\n", words[0]);
        return 2;
    }
    std::ifstream file(words[2], std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());

    ov::Core core;
    auto model = core.read_model(words[1]);
    auto type = model->input().get_element_type();
    auto shape = model->input().get_partial_shape();
    std::size_t picture = type.size();
    for (std::size_t axis = 1; axis < shape.size(); ++axis) {
        if (shape[axis].is_dynamic()) shape[axis] = count == 5 ? std::strtoul(words[axis + 1], nullptr, 10) : 0;
        picture *= shape[axis].get_length();
    }
    if (!picture)
        throw std::runtime_error("the model takes pictures of any size: give HEIGHT and WIDTH of those in INPUT");
    if (bytes.empty() || bytes.size() % picture)
        throw std::runtime_error("INPUT does not hold whole pictures of this model");
    if (shape[0].is_dynamic()) shape[0] = bytes.size() / picture;
    if (shape[0].get_length() * picture != bytes.size())
        throw std::runtime_error("INPUT does not hold a batch of this model");
    model->reshape(shape);

    // Float parts run in float32: OpenVINO's own choice is bfloat16 on many CPUs, and int8 beside int8 weights.
    auto compiled = core.compile_model(model, "CPU",
                                       ov::hint::performance_mode(ov::hint::PerformanceMode::LATENCY),
                                       ov::hint::inference_precision(ov::element::f32),
                                       ov::hint::dynamic_quantization_group_size(0));
    auto request = compiled.create_infer_request();
    request.set_input_tensor(ov::Tensor(type, shape.to_shape(), bytes.data()));
    request.infer();
    auto output = request.get_output_tensor(0);
    const float* values = output.data<float>();
    for (std::size_t i = 0; i < output.get_size(); ++i)
        std::printf("%.9g\n", values[i]);
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
}

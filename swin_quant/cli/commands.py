"""The commands by their section in --help, each with its sentence there; `verbs/NAME.py` has the function NAME."""

SECTIONS = {
    "the main way": {
        "quantize": "float checkpoint + pictures -> artifact for an engine, verified and scored, in one go",
        "calibrate": "float checkpoint + pictures -> calibrated INT8 checkpoint + run card",
        "evaluate": "accuracy and latency of a checkpoint or of artifacts on their engines, the float model first",
        "export": "calibrated checkpoint -> ONNX Runtime, OpenVINO, TensorRT, CUDA, ExecuTorch, FasterTransformer",
        "verify": "an artifact against its checkpoint on real pictures: logits within tolerance or not",
        "predict": "the most probable classes of pictures, from a checkpoint or an artifact",
        "report": "the accuracy-delta table of any number of run cards",
    },
    "make": {
        "finetune": "QAT: calibrated checkpoint + pictures -> fine-tuned INT8 checkpoint + run card",
        "train": "float training from scratch or from weights -> checkpoint + run card",
    },
    "measure": {
        "sensitivity": "the cost of each node and group of nodes: alone, and left out; in dB, KL and agreement",
        "search": "the policy that keeps the loss within a budget at the least measured latency, as YAML",
        "align": "two engines, checkpoints or dumps, layer by layer: the first that differs; or one training step",
    },
    "deploy": {
        "package": "ONNX artifact -> a folder that runs without torch: Python, C++, Docker, Triton, OpenVINO, KServe",
        "serve": "an artifact over HTTP on this machine: KServe v2 protocol, dynamic batching, metrics",
    },
    "look": {
        "analyze": "operators, MACs, shapes, precision risks, limits and replacements, before anything is quantized",
        "show": "the built-in policies; every node of a model; the int8 products of an ONNX file",
    },
    "begin": {
        "demo": "train, calibrate and score a micro Swin on handwritten digits, without downloads",
        "doctor": "what this machine has, its obstacles, and how to mend them",
    },
}
COMMANDS = {name: help for section in SECTIONS.values() for name, help in section.items()}
FRONT_DOOR = "ft front-door"  # main.py: not listed among the commands

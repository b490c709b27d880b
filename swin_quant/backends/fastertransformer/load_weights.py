"""Build the weight list of a FasterTransformer Swin op from an export. Needs torch and safetensors, nothing else.

    weights, arguments, head = load("swin_tiny_patch4_window7_224_int8_sm80_manifest.json")
    torch.classes.load_library("lib/libth_transformer.so")
    op = torch.classes.SwinTransformerINT8.Class(weights, *arguments)        # SwinTransformer for a float export
    logits = torch.nn.functional.linear(op.forward(pictures.half().cuda()).float(), *head)

An export for compute capability 80 runs on 80 and above, one for 75 on 75 only: int8 kernels lie in the order of their
GPU generation, and the op would not notice. This script does.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def load(manifest_file: str | Path, device: str = "cuda") -> tuple[list[torch.Tensor], list[Any], list[torch.Tensor]]:
    """The list, the arguments after it in order, and the classifier's weight and bias, on `device` ("cpu" to look)."""
    manifest = json.loads(Path(manifest_file).read_text())
    target, arguments = manifest["target"], list(manifest["arguments"].values())
    if device != "cpu" and target["kind"] == "int8":
        major, minor = torch.cuda.get_device_capability()
        if (10 * major + minor >= 80) != (target["sm"] >= 80):
            sys.exit(f"exported for compute capability {target['sm']}, this GPU has {major}.{minor}: export for it")
    tensors = load_file(Path(manifest_file).with_name(manifest["file"]))
    weights = [place(tensors[entry["key"]], entry, device) for entry in manifest["entries"]]
    arguments = [torch.tensor(a, dtype=torch.int32) if isinstance(a, list) else a for a in arguments]
    return weights, arguments, [tensors[name].to(device) for name in manifest["head"]]


def place(tensor: torch.Tensor, entry: dict[str, Any], device: str) -> torch.Tensor:
    if entry["container"]:  # int8 bytes in the first half of a float16 tensor of as many elements
        padded = torch.zeros(2 * tensor.numel(), dtype=torch.int8)
        padded[: tensor.numel()] = tensor.flatten()
        tensor = padded.view(torch.float16)
    tensor = tensor.reshape(entry["shape"]).contiguous()
    return tensor.to(device) if entry["device"] == "cuda" else tensor


if __name__ == "__main__":
    for number, weight in enumerate(load(sys.argv[1], "cpu")[0]):
        print(number, weight.dtype, tuple(weight.shape))

"""What OpenVINO computes inside a file: a graph of a copy with every module's output. Fusions stop at those."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx_reader.file import as_input, verified
from swin_quant.backends.onnx_reader.inside import of_images, opened_up
from swin_quant.backends.openvino.engine import DEFAULT_SIDE, _core, _Graphs
from swin_quant.score.options import EngineOptions


def inside(artifact: Artifact, options: EngineOptions) -> Callable[[Tensor], dict[str, Tensor]]:
    """Images [B, 3, S, S] -> what each module gives, float32, by its name."""
    file = verified(artifact)
    with opened_up(file) as copy:
        graphs = _Graphs(_core(os.getpid()), copy.file, options.float_type or "float32", options.threads)
        side = file.image_size or DEFAULT_SIDE
        graphs.request(file.shape(file.batch or 1, side))  # weights are in memory once a graph is compiled

    def run(images: Tensor) -> dict[str, Tensor]:
        array = as_input(file, images)
        request = graphs.request(array.shape)
        graphs._try("run", lambda: request.infer([array], share_inputs=True))
        found = {}
        for module, tensor in copy.tensors.items():
            output = torch.from_numpy(request.get_tensor(tensor).data.copy()).float()
            found[module] = of_images(output, images, file.batch)
        return found

    return run

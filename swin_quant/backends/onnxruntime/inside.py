"""What ONNX Runtime computes inside a file: a session of a copy with every module's output. Fusions stop at those."""

from collections.abc import Callable

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.onnx_reader.checks import first_line
from swin_quant.backends.onnx_reader.file import as_input, verified
from swin_quant.backends.onnx_reader.inside import of_images, opened_up
from swin_quant.backends.onnxruntime.engine import NAME, _session
from swin_quant.backends.saturation import exact_kernels
from swin_quant.base.errors import SwinQuantError
from swin_quant.score.options import EngineOptions


def inside(artifact: Artifact, options: EngineOptions) -> Callable[[Tensor], dict[str, Tensor]]:
    """Images [B, 3, S, S] -> what each module gives, float32, by its name."""
    file = verified(artifact)
    with opened_up(file) as copy:
        session = _session(copy.file, options, exact_kernels(NAME, artifact))
    names = list(dict.fromkeys(copy.tensors.values()))

    def run(images: Tensor) -> dict[str, Tensor]:
        try:
            outputs = session.run(names, {file.input: as_input(file, images)})
        except Exception as error:
            raise SwinQuantError(f"{file.path}: {NAME} cannot run it: {first_line(error)}") from error
        found = {name: torch.from_numpy(output).float() for name, output in zip(names, outputs, strict=True)}
        return {module: of_images(found[tensor], images, file.batch) for module, tensor in copy.tensors.items()}

    return run

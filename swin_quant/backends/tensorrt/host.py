"""This machine's TensorRT and GPU: the only place that imports the library, or says how to install it."""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log


@dataclass(frozen=True)
class Gpu:
    """torch's current GPU. `capability`: the compute capability, e.g. 8.6."""

    device: torch.device
    name: str
    capability: str


def tensorrt() -> ModuleType:
    """The library. UsageError if it is missing, broken or older than 10."""
    major = (torch.version.cuda or "12").split(".")[0]
    try:
        module = importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:
        raise UsageError(
            f"TensorRT cannot be imported ({error}): pip install tensorrt-cu{major} (of your CUDA), on a machine with "
            "an NVIDIA GPU"
        ) from error
    if not hasattr(module, "ICudaEngine") or not hasattr(module.ICudaEngine, "num_io_tensors"):
        version = getattr(module, "__version__", "of no version")
        raise UsageError(f"TensorRT {version} has no named tensors: pip install --upgrade tensorrt-cu{major}, 10 or 11")
    return module


def strongly_typed(trt: ModuleType) -> int:
    """The creation flags of a strongly typed network: STRONGLY_TYPED in TensorRT 10, none in 11, which has no other."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    if flag is None and hasattr(trt.BuilderFlag, "FP16"):  # an older one, which chooses types itself
        raise UsageError(f"TensorRT {trt.__version__} cannot build strongly typed networks: install 10 or 11")
    return 0 if flag is None else 1 << int(flag)


def find_gpu() -> Gpu:
    """The current GPU. UsageError where torch sees none."""
    if not torch.cuda.is_available():
        build = f"is a build for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
        raise UsageError(f"no NVIDIA GPU: torch {torch.__version__} {build} and sees none; TensorRT engines need one")
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu(device, torch.cuda.get_device_name(device), f"{major}.{minor}")


def logger(trt: ModuleType) -> Any:
    """A TensorRT logger that writes to ours; `errors` keeps the error messages, which no call returns."""

    class Logger(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.Logger.INTERNAL_ERROR, trt.Logger.ERROR):
                self.errors.append(" ".join(message.split()))
            log.debug("TensorRT: %s", message)

    return Logger()


def last_error(messages: Any, default: str) -> str:
    """The logger's last error, cut to one line, or `default`."""
    return (messages.errors or [default])[-1][:400]

"""Runs an engine on tensors that torch owns, on the caller's CUDA stream."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, get_policy_name
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.layers import LAYERS
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import read_json
from swin_quant.base.reading import reads
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

NAME = "tensorrt"
_TYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16}


@dataclass
class Session:
    """An execution context, for one thread at a time: it has one set of addresses.

    `input`, `output`: name, type and shape. `smallest`, `largest`: batches of the profile. A smaller batch is filled up
    with zeros, whose logits are dropped.
    """

    context: Any
    input: tuple[str, torch.dtype, tuple[int, ...]]
    output: tuple[str, torch.dtype, tuple[int, ...]]
    smallest: int
    largest: int
    device: torch.device
    messages: Any
    owners: tuple[Any, ...] = field(repr=False)  # runtime and engine, which must outlive the context

    def __call__(self, images: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] of any float type -> logits float32 [B, classes], on the pictures' device.

        The work is queued on the current stream, like torch's own; only a copy to the CPU waits for it.
        """
        name, dtype, (_, *sizes) = self.input
        wanted = tuple(sizes)
        if tuple(images.shape[1:]) != wanted:
            given, takes = ("x".join(map(str, shape)) for shape in (images.shape[1:], wanted))
            raise UsageError(f"the engine takes pictures of {takes}, not {given}")
        count, home = len(images), images.device
        # TensorRT enqueues on the current GPU, whichever one the stream belongs to
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            images = images.to(self.device, dtype).contiguous()
            if count < self.smallest:
                images = torch.cat([images, images.new_zeros(self.smallest - count, *wanted)])
            self._call(self.context.set_input_shape(name, tuple(images.shape)), "takes no such batch")
            shape = tuple(self.context.get_tensor_shape(self.output[0]))
            logits = torch.empty(shape, dtype=self.output[1], device=self.device)
            self._call(self.context.set_tensor_address(name, images.data_ptr()), "takes no input")
            self._call(self.context.set_tensor_address(self.output[0], logits.data_ptr()), "takes no output")
            # `images` may be freed on return: torch's allocator reuses its memory only for later work of this stream.
            stream = torch.cuda.current_stream(self.device).cuda_stream
            self._call(self.context.execute_async_v3(stream), "did not run")
            return logits[:count].to(home, torch.float32)

    def _call(self, done: bool, otherwise: str) -> None:
        if not done:
            why = host.last_error(self.messages, "it gives no reason")
            raise SwinQuantError(f"the TensorRT engine {otherwise}: {why}")


def load(artifact: Artifact, options: EngineOptions) -> Engine:
    """A built TensorRT engine on the current GPU. `options.threads` has no effect on a GPU.

    UsageError if TensorRT or a GPU is missing, for options that the build has settled, and for an engine of another
    TensorRT or GPU architecture, which TensorRT would refuse, or run with results that nobody measured.
    """
    record = artifact.record
    if record["backend"] != "tensorrt":
        raise UsageError(f"{artifact.file}: is no TensorRT engine: make one by `swin-quant export FILE --for tensorrt`")
    for name, why in (
        ("float_type", "its types are those of the exported graph"),
        ("optimize", "it was optimized when it was built"),
    ):
        if getattr(options, name) != getattr(EngineOptions(), name):
            raise UsageError(f"{artifact.file}: {name} cannot be chosen for a TensorRT engine: {why}")
    trt, gpu = host.tensorrt(), host.find_gpu()
    if options.device != "cuda":
        raise UsageError(f"{artifact.file}: a TensorRT engine runs on a GPU, not on {options.device}: ‹device› cuda")
    for key, what, here in (
        ("tensorrt", "TensorRT", trt.__version__),
        ("compute_capability", "a GPU of compute capability", gpu.capability),
    ):
        if (built := record["options"].get(key)) != here:
            raise UsageError(
                f"{artifact.file}: was built with {what} {built}, here is {here}: build it again on this machine by "
                "`swin-quant export FILE --for tensorrt`"
            )
    session = open_session(artifact, trt, gpu)
    known = {
        "library": f"{NAME} {trt.__version__}",
        "device": gpu.name,
        "compute_capability": gpu.capability,
        "float_type": record["options"]["onnx"]["options"].get("float_type"),
        "batch": [session.smallest, session.largest],
    }
    details = Details(known, partial(_gemms, artifact))
    precision, policy = record["precision"], get_policy_name(artifact)
    return Engine(NAME, precision, policy, session, session.largest, details, device=str(gpu.device))


@reads("layer report", lambda artifact: artifact.file)
def _gemms(artifact: Artifact) -> Mapping[str, str]:
    """Product -> the type that it runs in, from the engine inspector's report at the time of the build."""
    files = [other["file"] for other in artifact.record["others"] if other["file"].endswith(LAYERS)]
    rows = read_json(artifact.file.with_name(files[0]), "layer report")["gemms"] if files else []
    return {row["name"]: row["ran"] for row in rows}


@reads("TensorRT engine", lambda artifact, *_: artifact.file)
def open_session(artifact: Artifact, trt: ModuleType, gpu: host.Gpu) -> Session:
    """Deserialize the engine and find its one input and one output."""
    messages = host.logger(trt)
    runtime = trt.Runtime(messages)
    engine = runtime.deserialize_cuda_engine(artifact.file.read_bytes())
    if engine is None:
        why = host.last_error(messages, "no reason given")
        raise SwinQuantError(f"{artifact.file}: TensorRT cannot read it: {why}")
    ports: dict[Any, list[Any]] = {trt.TensorIOMode.INPUT: [], trt.TensorIOMode.OUTPUT: []}
    for number in range(engine.num_io_tensors):
        name = engine.get_tensor_name(number)
        kind = engine.get_tensor_dtype(name).name
        if kind not in _TYPES:
            raise SwinQuantError(f"{artifact.file}: its tensor {name} is of type {kind}: must be a float type")
        shape = tuple(engine.get_tensor_shape(name))
        ports[engine.get_tensor_mode(name)].append((name, _TYPES[kind], shape))
    if [len(found) for found in ports.values()] != [1, 1]:
        raise SwinQuantError(f"{artifact.file}: must have one input and one output: it is no classifier of pictures")
    (source,), (target,) = ports.values()
    smallest = largest = source[2][0]
    if largest < 0:  # any batch of the profile
        smallest, _, largest = (shape[0] for shape in engine.get_tensor_profile_shape(source[0], 0))
    context = engine.create_execution_context()
    if context is None:
        raise SwinQuantError(f"{artifact.file}: no context: {host.last_error(messages, 'out of GPU memory?')}")
    return Session(context, source, target, smallest, largest, gpu.device, messages, (runtime, engine))

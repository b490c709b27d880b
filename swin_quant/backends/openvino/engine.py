"""OpenVINO on the CPU, for latency: one stream, and a graph compiled for each shape of batch."""

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, get_policy_name
from swin_quant.backends.onnx_reader import inside as reader
from swin_quant.backends.onnx_reader.checks import first_line
from swin_quant.backends.onnx_reader.file import OnnxFile, as_input, as_output, verified
from swin_quant.backends.openvino.operators import LIMIT, find_libraries, run_plain, stream_in_half
from swin_quant.backends.releases import refuse_wrong
from swin_quant.backends.saturation import warn
from swin_quant.base.cpu import within
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.base.files import compute_sha256, near
from swin_quant.quant.outputs import Output
from swin_quant.score.engine import HALF_TYPES, Engine
from swin_quant.score.options import EngineOptions

NAME = "openvino"
# Float type -> OpenVINO's word for it as a precision hint, and among the capabilities of a device.
HINTS = {"float32": ("f32", "FP32"), "bfloat16": ("bf16", "BF16"), "float16": ("f16", "FP16")}
_TYPES = {hint: name for name, (hint, _) in HINTS.items()} | {"i8": "int8", "u8": "int8"}
_FAILED: list[Any] = []  # requests after an exception, which crash the process where they are freed
# Layers of its runtime; `Subgraph` is several in one kernel.
_GEMMS = ("FullyConnected", "MatMul", "Convolution", "Deconvolution")


def load(artifact: Artifact, options: EngineOptions = EngineOptions()) -> Engine:
    """The engine of an ONNX artifact. UsageError for a type or device that this CPU or engine lacks.

    Float layers run in `options.float_type`, float32 if None: OpenVINO's own default is bfloat16 on many CPUs, without
    a word.
    """
    openvino = library("openvino", "openvino")
    if options.device != "cpu":
        raise UsageError(f"{NAME}: runs on a CPU here, not on {options.device}")
    if not options.optimize:
        raise UsageError(f"{NAME}: always rewrites the graph: there is no run without optimization")
    float_type = options.float_type or "float32"
    if float_type not in (able := float_types()):
        raise UsageError(f"{NAME}: this CPU does not run {float_type}: choose {' or '.join(able)}")
    refuse_wrong(NAME, openvino.__version__, artifact, batch=1)  # every shape is fixed before it is compiled
    file = verified(artifact)
    if file.float8:
        raise UsageError(f"{file.path}: {NAME} is not given float8: run it on onnxruntime, or export with ‹policy› cpu")
    libraries, graphs = _opened(artifact, file, float_type, options)
    extensions = {Path(file).name: compute_sha256(file) for file in libraries}
    known = {
        "library": ", ".join([f"{NAME} {openvino.__version__}", *(f"{n} {h[:12]}" for n, h in extensions.items())]),
        **({"extensions": extensions} if extensions else {}),
        "opset": file.opset,
        "device": graphs.core.get_property("CPU", "FULL_DEVICE_NAME"),
        "threads": options.threads,
        "float_type": float_type,
        "caution": warn(NAME, artifact),
    }
    precision = artifact.record["precision"]  # with its float layers in bfloat16, int8 is int8+bfloat16
    if precision in ("float32", *HALF_TYPES):
        precision = float_type
    elif float_type != "float32":
        precision = f"{precision}+{float_type}"
    details = Details(known, graphs.gemms)
    run_open = graphs.run_open if file.batch is None and not file.inputs else None
    policy, batch = get_policy_name(artifact), file.batch
    return Engine(NAME, precision, policy, graphs.run, max_batch=batch, details=details, run_open=run_open)


def float_types() -> list[str]:
    """The types that this CPU runs float layers in.

    OpenVINO 2026.4 names half types although ONEDNN_MAX_CPU_ISA forbids their instructions, and then compiles no file.
    """
    able = _core(os.getpid()).get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if not {"avx512_vnni", "amx_int8"}.intersection(within(os.environ.get(LIMIT, ""))):
        able = ["FP32"]
    return [name for name, (_, capability) in HINTS.items() if capability in able]


@cache
def _core(process: int, extensions: tuple[str, ...] = ()) -> Any:
    """OpenVINO's Core with the operators of these libraries, kept for as long as the process lives.

    On CPUs with AMX the CPU plugin gives the main thread a signal stack, and frees it with the last Core. The next
    signal, from a picture loader that ends, for example, would then crash the program.
    """
    core = library("openvino", "openvino").Core()
    for extension in extensions:
        if not os.path.isfile(extension):
            raise UsageError(f"‹extension› {extension}: no such file{near(extension)}")
        try:
            core.add_extension(os.path.abspath(extension))
        except Exception as error:  # RuntimeError mostly
            raise SwinQuantError(f"{extension}: {NAME} cannot load it as an extension: {first_line(error)}") from error
    return core


class _Graphs:
    """A file's latest `kept` compiled graphs, by the shape of their input: fixed shapes run faster than open ones."""

    def __init__(
        self, core: Any, file: OnnxFile, float_type: str, threads: int | None, extended: bool = False, kept: int = 2
    ) -> None:
        self.core, self.file, self.kept = core, file, kept
        self.settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": HINTS[float_type][0],
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # else float inputs of int8 weights are rounded to int8, too
            **({"INFERENCE_NUM_THREADS": threads} if threads else {}),
        }
        self.compiled: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self.open: Any = None
        # OpenVINO's parser knows no functions
        inlined = file.functions and not extended
        self.model = self._try(
            "load", lambda: core.read_model(without_functions(file.path) if inlined else str(file.path))
        )
        if float_type == "bfloat16":
            stream_in_half(self.model)

    def request(self, shape: tuple[int, ...]) -> Any:
        """An inference request of the graph for pictures of this shape."""
        if shape not in self.compiled:
            while len(self.compiled) >= self.kept:
                self.compiled.popitem(last=False)
            self.compiled[shape] = self.compiled_for(shape).create_infer_request()
        self.compiled.move_to_end(shape)
        return self.compiled[shape]

    def run(self, images: Tensor) -> Output:
        """The outputs for a batch."""
        request = self.fed(images)
        return as_output([request.get_output_tensor(at).data for at in range(len(self.file.outputs))], images)

    def run_open(self, images: Tensor) -> Output:
        """The outputs of the graph for every shape that the file takes."""
        if self.open is None:
            self.open = self.compiled_for(None).create_infer_request()
        self._try("run", lambda: self.open.infer(as_input(self.file, images), share_inputs=True))
        return as_output([self.open.get_output_tensor(at).data for at in range(len(self.file.outputs))], images)

    def fed(self, images: Tensor) -> Any:
        """The request of a batch, which has run. SwinQuantError if it leaves an output unwritten.

        With one thread, OpenVINO 2026.4 drops the exception of a node, and outputs stay as they were. The next
        inference of that request may crash: another one, with two threads, raises the exception.
        """
        given = as_input(self.file, images)
        count = len(next(iter(given.values())))
        shape = (count, *images.shape[1:]) if self.file.inputs else given[self.file.input].shape
        values = [given[name] for name in self.file.input_names]

        def run() -> Any:
            request = self.request(shape)
            if _find_unwritten(request, values, 0xA5) is None:
                return request
            _FAILED.append(self.compiled.pop(shape))
            request = self.compiled_for(shape, {"INFERENCE_NUM_THREADS": 2}).create_infer_request()
            if (left := _find_unwritten(request, values, 0x5A)) is not None:
                _FAILED.append(request)
                fault = f"a node failed, its output {self.file.outputs[left]} is not written"
                raise RuntimeError(f"{fault}, and with one CPU nothing says why")
            return request  # its output was the bytes that marked it

        return self._try("run", run)

    def gemms(self) -> Mapping[str, str]:
        """Matrix product -> the type that it runs in, from the latest graph, or else from one for one picture."""
        shape = next(reversed(self.compiled), self.file.shape(self.file.batch or 1))
        return self.types_in(self.request(shape).get_compiled_model())

    def types_in(self, compiled: Any) -> Mapping[str, str]:
        """Matrix product -> the type that a compiled graph runs it in."""
        sources = {op.get_friendly_name() for op in self.model.get_ops() if op.get_type_name() in _GEMMS}
        layers = compiled.get_runtime_model().get_ordered_ops()
        return dict(found for layer in layers for found in _products(layer, sources))

    def compiled_for(self, shape: tuple[int, ...] | None, more: Mapping[str, Any] = {}) -> Any:  # noqa: B006
        """A compiled graph for pictures of this shape, None: of every shape that the file takes; `more`: settings."""
        model = self.model.clone()
        if shape and (self.file.batch is None or self.file.sizes is None):
            model.reshape({name: list(sizes) for name, sizes in self.file.shapes(shape).items()})

        return self._try("compile", lambda: self.core.compile_model(model, "CPU", {**self.settings, **more}))

    def _try(self, what: str, action: Any) -> Any:
        try:
            return action()
        except Exception as error:  # mostly RuntimeError, with a page of places in C++
            raise SwinQuantError(f"{self.file.path}: {NAME} cannot {what} it: {first_line(error)}") from error


def _opened(
    artifact: Artifact, file: OnnxFile, float_type: str, options: EngineOptions
) -> tuple[tuple[str, ...], _Graphs]:
    """The libraries that run operators of a file, and its graphs.

    Where our own library fails, as for operators of a later one, plain nodes serve, and a line says why.
    """
    libraries = options.extensions or find_libraries(artifact)
    while True:
        try:
            core = _core(os.getpid(), libraries)
            return libraries, _Graphs(core, file, float_type, options.threads, bool(libraries), options.graphs)
        except SwinQuantError as error:
            if options.extensions or not libraries:
                raise
            run_plain(artifact, error)
            libraries = ()


def products(file: OnnxFile, batch: int | None = None) -> Mapping[str, str]:
    """Matrix product -> the type that it runs in, what is not int8 in float32; `batch`: fixed before loading."""
    graphs = _Graphs(_core(os.getpid()), file, "float32", None)
    fixed = file.shape(batch or 1) if batch or file.sizes is None else None
    return graphs.types_in(graphs.compiled_for(fixed))


def without_functions(path: Path) -> bytes:
    """The ONNX file with its functions inlined."""
    onnx = library("onnx", "onnx")
    from onnx.inliner import inline_local_functions

    return inline_local_functions(onnx.load(str(path))).SerializeToString()


def _find_unwritten(request: Any, values: list[Any], mark: int) -> int | None:
    """Run a request whose outputs begin with this byte, again and again. Returns the place of one that is as it was."""

    def outputs() -> list[Any]:
        places = range(len(request.model_outputs))
        return [request.get_output_tensor(place).data.reshape(-1)[:1024].view("uint8") for place in places]

    for one in outputs():
        one.fill(mark)
    request.infer(values, share_inputs=True)
    return next((place for place, one in enumerate(outputs()) if one.size and (one == mark).all()), None)


def _products(layer: Any, sources: set[str]) -> Iterator[tuple[str, str]]:
    """Name and type of each matrix product in one layer of a runtime graph; `sources`: the products of the file."""
    info = layer.get_rt_info()
    kind, type_ = str(info["layerType"].value), str(info["runtimePrecision"].value)
    inputs = [port.get_element_type().get_type_name() for port in layer.inputs()]
    eight = [name in ("i8", "u8") for name in inputs]
    if kind in _GEMMS:
        name = re.sub(r"/Dequantization\w*$", "", layer.get_friendly_name())
        yield name, "int8" if all(eight[:2]) else _TYPES.get(type_, type_)
    elif kind == "Subgraph":
        inside = [name for name in str(info["originalLayersNames"].value).split(",") if name in sources]
        other = next((_TYPES[name] for name in inputs if _TYPES.get(name, "int8") != "int8"), "float32")
        for index, name in enumerate(inside):  # attention: softmax(q k + mask) v, whose inputs are q, k, mask, v
            quantized = all(eight[:2]) if index == 0 else eight[-1]
            yield name, "int8" if quantized else other


def inside(artifact: Artifact, options: EngineOptions) -> Callable[[Tensor], dict[str, Tensor]]:
    """`onnx_reader.inside.inside` on OpenVINO."""

    def start(file: OnnxFile, copy: OnnxFile, names: list[str]) -> Callable[[Tensor], Mapping[str, Any]]:
        _, graphs = _opened(artifact, copy, options.float_type or "float32", options)
        graphs.request(file.shape(file.batch or 1))  # weights are in memory once a graph is compiled

        def run(images: Tensor) -> Mapping[str, Any]:
            request = graphs.fed(images)
            return {name: request.get_tensor(name).data.copy() for name in names}

        return run

    return reader.inside(artifact, start)

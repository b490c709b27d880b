"""A stand-in for the Python API of TensorRT 10 and 11, as far as NVIDIA documents it and this package uses it.

Classes have only the documented names and signatures: any other attribute or argument raises, and so does a name that
the version lacks. An "engine" is its ONNX file; ONNX Runtime computes it on the memory at the given addresses. Put this
folder first on sys.path; `become` chooses the version.
"""

import ctypes
import enum
import json
import math

import numpy as np
import onnx
import onnxruntime

__version__ = "10.13.3"
MAGIC = b"standin-engine\n"
UNSUPPORTED: set[str] = set()  # ops that the parser refuses
FAIL_BUILD: list[str] = []  # messages of a failing build
FALLBACK: set[str] = set()  # names of nodes that run in float despite the graph
STREAMS: list[int] = []  # streams with queued work
BUILDS: list[dict] = []


def become(version: str) -> None:
    """Behave as this version: TensorRT 11 has no flag for strong typing, its only mode."""
    global __version__, NetworkDefinitionCreationFlag, BuilderFlag
    __version__ = version
    NetworkDefinitionCreationFlag, BuilderFlag = _FLAGS[_major()], _BUILDER_FLAGS[_major()]
    for state in (UNSUPPORTED, FALLBACK, STREAMS, BUILDS, FAIL_BUILD):
        state.clear()


def _major() -> int:
    return int(__version__.split(".")[0])


_FLAGS = {
    10: enum.IntEnum("NetworkDefinitionCreationFlag", {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1}),
    11: enum.IntEnum("NetworkDefinitionCreationFlag", {"PREFER_AOT_PYTHON_PLUGINS": 3}),
}
_BUILDER_FLAGS = {
    10: enum.Enum("BuilderFlag", ["FP16", "INT8", "TF32", "REFIT"]),
    11: enum.Enum("BuilderFlag", ["TF32", "REFIT"]),
}
NetworkDefinitionCreationFlag, BuilderFlag = _FLAGS[10], _BUILDER_FLAGS[10]
MemoryPoolType = enum.Enum("MemoryPoolType", ["WORKSPACE", "TACTIC_DRAM"])
ProfilingVerbosity = enum.Enum("ProfilingVerbosity", ["LAYER_NAMES_ONLY", "DETAILED", "NONE"])
LayerInformationFormat = enum.Enum("LayerInformationFormat", ["ONELINE", "JSON"])
TensorIOMode = enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
DataType = enum.Enum("DataType", ["FLOAT", "HALF", "BF16", "INT8", "INT32", "INT64"])
_TYPES = {1: (DataType.FLOAT, np.float32), 10: (DataType.HALF, np.float16), 7: (DataType.INT64, np.int64)}


class ILogger:
    Severity = enum.Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])

    def __init__(self) -> None:
        pass


class Logger(ILogger):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = ILogger.Severity


class _Network:
    __slots__ = ("model", "flags")

    def __init__(self, flags: int) -> None:
        self.model, self.flags = None, flags


class _ParserError:
    __slots__ = ("_node",)

    def __init__(self, node) -> None:
        self._node = node

    def desc(self) -> str:
        return f"No importer registered for op:\n {self._node.op_type}"

    def node(self) -> int:
        return 7

    def node_name(self) -> str:
        return self._node.name

    def node_operator(self) -> str:
        return self._node.op_type


class OnnxParser:
    __slots__ = ("_network", "_errors")

    def __init__(self, network: _Network, logger: ILogger) -> None:
        assert isinstance(network, _Network) and isinstance(logger, ILogger)
        self._network, self._errors = network, []

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, index: int) -> _ParserError:
        return self._errors[index]

    def parse(self, model: bytes, path: str | None = None) -> bool:
        proto = onnx.load_from_string(model)
        self._errors = [_ParserError(node) for node in proto.graph.node if node.op_type in UNSUPPORTED]
        self._network.model = model
        return not self._errors


class _Profile:
    __slots__ = ("shapes",)

    def __init__(self) -> None:
        self.shapes = {}

    def set_shape(self, input: str, min: tuple, opt: tuple, max: tuple) -> None:
        self.shapes[input] = (tuple(min), tuple(opt), tuple(max))


class _Cache:
    """Lines of text under a header that names the version."""

    __slots__ = ("lines",)

    def __init__(self, data: bytes) -> None:
        self.lines = data.decode().splitlines() or [f"cache {__version__}"]

    def serialize(self) -> memoryview:
        return memoryview("\n".join(self.lines).encode())

    def combine(self, input_cache: "_Cache", ignore_mismatch: bool) -> bool:
        if input_cache.lines[0] != self.lines[0] and not ignore_mismatch:
            return False
        self.lines += [line for line in input_cache.lines if line not in self.lines]
        return True


class _Config:
    __slots__ = ("profiling_verbosity", "_profiles", "_limits", "_cache")

    def __init__(self) -> None:
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self._profiles, self._limits, self._cache = [], {}, None

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        self._limits[pool] = pool_size

    def add_optimization_profile(self, profile: _Profile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> _Cache | None:
        text = bytes(serialized_timing_cache)
        return _Cache(text) if not text or text.startswith(b"cache ") else None

    def set_timing_cache(self, cache: _Cache, ignore_mismatch: bool) -> bool:
        if cache.lines[0] != f"cache {__version__}" and not ignore_mismatch:
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> _Cache:
        return self._cache


class _Logged:
    __slots__ = ("_logger",)

    def __init__(self, logger: ILogger) -> None:
        assert isinstance(logger, ILogger)
        self._logger = logger


class Builder(_Logged):
    __slots__ = ()

    def create_network(self, flags: int = 0) -> _Network:
        wanted = 1 << 1 if _major() == 10 else 0
        assert flags == wanted, f"flags {flags}: the network would be weakly typed, or the flag is unknown"
        return _Network(flags)

    def create_builder_config(self) -> _Config:
        return _Config()

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: _Network, config: _Config) -> memoryview | None:
        for message in FAIL_BUILD:
            self._logger.log(Logger.ERROR, message)
        if FAIL_BUILD:
            return None
        proto = onnx.load_from_string(network.model)
        fixed = proto.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value")
        assert fixed or config._profiles, "a network with open sizes needs a profile"
        if config._cache is not None:
            config._cache.lines.append(f"timed {len(BUILDS)}")
        shapes = config._profiles[0].shapes if config._profiles else {}
        head = {"profile": shapes, "verbosity": config.profiling_verbosity.name, "version": __version__}
        BUILDS.append({"limits": dict(config._limits), **head})
        return memoryview(MAGIC + json.dumps(head).encode() + b"\n" + network.model)


class Runtime(_Logged):
    __slots__ = ()

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        if not serialized_engine.startswith(MAGIC):
            self._logger.log(Logger.ERROR, "Magic tag\n does not match")
            return None
        head, _, model = serialized_engine[len(MAGIC) :].partition(b"\n")
        return ICudaEngine(json.loads(head), model)


class ICudaEngine:
    __slots__ = ("_head", "_model", "_ports")

    def __init__(self, head: dict, model: bytes) -> None:
        self._head, self._model = head, model
        graph = onnx.load_from_string(model).graph
        ends = [(TensorIOMode.INPUT, info) for info in graph.input]
        ends += [(TensorIOMode.OUTPUT, info) for info in graph.output]
        self._ports = {info.name: (mode, info.type.tensor_type) for mode, info in ends}

    num_io_tensors = property(lambda self: len(self._ports))

    def get_tensor_name(self, index: int) -> str:
        return list(self._ports)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self._ports[name][0]

    def get_tensor_dtype(self, name: str) -> DataType:
        return _TYPES[self._ports[name][1].elem_type][0]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in self._ports[name][1].shape.dim)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        assert profile_index == 0
        return [tuple(shape) for shape in self._head["profile"][name]]

    def create_execution_context(self) -> "_Context":
        return _Context(self)

    def create_engine_inspector(self) -> "_Inspector":
        return _Inspector(self)


class _Context:
    __slots__ = ("_engine", "_session", "_shape", "_addresses")

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        settings = onnxruntime.SessionOptions()
        tensors = onnx.load_from_string(engine._model).graph.initializer
        if any(tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN for tensor in tensors):
            settings.add_session_config_entry(
                "session.disable_quant_qdq", "1"
            )  # otherwise its fusions mistake float8 for int8
        self._session = onnxruntime.InferenceSession(engine._model, settings, providers=["CPUExecutionProvider"])
        self._shape, self._addresses = None, {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        wanted = self._engine.get_tensor_shape(name)
        if wanted[0] < 0:
            least, _, most = self._engine.get_tensor_profile_shape(name, 0)
            inside = least[0] <= shape[0] <= most[0]
        else:
            inside = shape[0] == wanted[0]
        self._shape = tuple(shape)
        return inside and tuple(shape[1:]) == wanted[1:]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        shape = self._engine.get_tensor_shape(name)
        return (self._shape[0], *shape[1:])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory != 0

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert isinstance(stream_handle, int)
        STREAMS.append(stream_handle)
        views = {}
        for name, (mode, kind) in self._engine._ports.items():
            shape, dtype = self.get_tensor_shape(name), np.dtype(_TYPES[kind.elem_type][1])
            memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(self._addresses[name])
            views[mode, name] = np.frombuffer(memory, dtype).reshape(shape)
        inputs = {name: view for (mode, name), view in views.items() if mode is TensorIOMode.INPUT}
        outputs = [name for mode, name in views if mode is TensorIOMode.OUTPUT]
        for name, value in zip(outputs, self._session.run(outputs, inputs), strict=True):
            views[TensorIOMode.OUTPUT, name][...] = value
        return True


class _Inspector:
    __slots__ = ("_engine", "execution_context")

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        assert format is LayerInformationFormat.JSON
        graph = onnx.load_from_string(self._engine._model).graph
        makers = {name: node for node in graph.node for name in node.output}
        kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}

        def is_float8(node) -> bool:
            return kinds.get(node.input[2]) == onnx.TensorProto.FLOAT8E4M3FN

        key = "Format/Datatype" if self._engine._head["version"].startswith("10") else "DataType"
        layers = []
        for node in graph.node:
            before = [makers[name] for name in node.input if name in makers]
            int8 = sum(other.op_type == "DequantizeLinear" for other in before) == 2 and node.name not in FALLBACK
            if node.op_type == "MatMul":
                parts = [node, *(other for other in before if other.op_type == "DequantizeLinear")]
                float8 = int8 and before[0].input[0] in makers and is_float8(makers[before[0].input[0]])
                kernel = "sm80_xmma_gemm_i8f16_i8i32_f32_tn_n" if int8 else "sm80_xmma_gemm_f16f16_f16f16_f16_nn_n"
                kernel = "sm89_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n" if float8 else kernel
                layer = {"Name": f"__myl_Fc_{len(layers)}", "LayerType": "gemm", "TacticName": kernel}
                layer["Inputs"] = [{"Name": node.input[0], key: "Int8" if int8 else "Half"}]
                layer["Outputs"] = [{"Name": node.output[0], key: "Half"}]
                layer["Metadata"] = "\x1f".join(f"[ONNX Layer: {part.name}]" for part in parts)
                layers.append(layer)
            elif node.op_type in ("Transpose", "Reshape"):
                layers.append({"Name": f"Reformatting CopyNode for {node.name}", "LayerType": "Reformat"})
        if self._engine._head["verbosity"] != "DETAILED":
            layers = [layer["Name"] for layer in layers]
        if key != "DataType":
            return json.dumps({"Layers": layers, "Bindings": list(self._engine._ports)})
        about = {"DataType": "Float", "Dimensions": [-1], "ProfileInfo": []}
        tensors = [{"Name": name, "IOMode": mode.name, **about} for name, (mode, _) in self._engine._ports.items()]
        return json.dumps({"Layers": layers, "I/O Tensors": tensors})

"""Builds an engine from an ONNX artifact with TensorRT 10 or 11, told apart by their functions, never by version.

Networks are strongly typed: the graph sets every type, and nothing here chooses a precision (TensorRT 11 has no other
mode). Sources: NVIDIA's Python API reference of 10.x and 11.x, and its guide "Migrating from 10.x to 11.x".
"""

from pathlib import Path
from types import ModuleType
from typing import Any

from swin_quant.backends.artifact import Artifact, finish_artifact
from swin_quant.backends.onnx_reader.products import FLOAT8
from swin_quant.backends.tensorrt import host
from swin_quant.backends.tensorrt.layers import LAYERS, LayerReport, read_layers
from swin_quant.backends.tensorrt.plan import EnginePlan, check_output
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import atomic_write_bytes, reason, write_json
from swin_quant.base.progress import log

_FLOAT8_FROM = (8, 9)  # the first compute capability with float8 products


def build(plan: EnginePlan, output: Path) -> tuple[Artifact, LayerReport]:
    """Build the engine, then write it, its layer report, and last its run card."""
    trt, gpu = host.tensorrt(), host.find_gpu()
    float8 = [one.name for one in plan.report.gemms if one.format == FLOAT8]
    if float8 and tuple(map(int, gpu.capability.split("."))) < _FLOAT8_FROM:
        raise UsageError(
            f"{plan.file.path}: {len(float8)} products are float8, which {gpu.name} (compute capability "
            f"{gpu.capability}) does not multiply: it begins with 8.9; export with ‹policy› tensorrt, in int8"
        )
    check_output(output, plan.file.path, plan.options.timing_cache)
    messages = host.logger(trt)
    builder = trt.Builder(messages)
    network = builder.create_network(host.strongly_typed(trt))
    _parse(trt, network, messages, plan.file.path)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # layers and their types, for the report
    if plan.options.workspace:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, plan.options.workspace << 20)
    if plan.file.batch is None:
        profile = builder.create_optimization_profile()
        profile.set_shape(plan.file.input, *plan.shapes)
        if config.add_optimization_profile(profile) < 0:
            raise SwinQuantError(f"{plan.file.path}: TensorRT refuses the profile: {host.last_error(messages, 'why?')}")
    if cache_file := plan.options.timing_cache:  # measurements of another TensorRT or GPU are not used
        cache = config.create_timing_cache(_read_cache(cache_file))
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            log.warning("%s: is not a timing cache of this TensorRT and GPU: starting a new one", cache_file)
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    log.info("building for %s with TensorRT %s: this takes minutes", gpu.name, trt.__version__)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        why = host.last_error(messages, "it does not say why; ‹verbose› shows its log")
        raise SwinQuantError(f"{plan.file.path}: TensorRT {trt.__version__} cannot build this graph: {why}")
    if cache_file:  # merged with the measurements that another build wrote into the file meanwhile
        cache = config.get_timing_cache()
        if other := config.create_timing_cache(_read_cache(cache_file)) if cache_file.is_file() else None:
            cache.combine(other, ignore_mismatch=False)  # returns False for another GPU's file, which ours replaces
        atomic_write_bytes(cache_file, bytes(cache.serialize()))
    data = bytes(serialized)
    layers = inspect_engine(trt, data, messages, plan)
    report = output.with_name(f"{output.stem}{LAYERS}")
    write_json(report, layers.to_dict())
    atomic_write_bytes(output, data)
    record, options = plan.artifact.record, plan.options
    details = {
        "tensorrt": trt.__version__,
        "gpu": gpu.name,
        "compute_capability": gpu.capability,
        "profile": dict(zip(("min", "opt", "max"), map(list, plan.shapes), strict=True)),
        "timing_cache": options.timing_cache.name if options.timing_cache else None,
        "workspace_mib": options.workspace,
        "gemms": layers.counts(),
        "onnx": {"file": record["file"], "sha256": record["sha256"], "options": record["options"]},
    }
    return finish_artifact(output, plan.artifact.card, "tensorrt", record["precision"], details, [report]), layers


def _parse(trt: ModuleType, network: Any, messages: Any, path: Path) -> None:
    parser = trt.OnnxParser(network, messages)
    if parser.parse(path.read_bytes(), str(path)):
        return
    faults = []
    for number in range(parser.num_errors):
        error = parser.get_error(number)
        node = error.node_name() if hasattr(error, "node_name") else f"number {error.node()}"
        op = f" ({error.node_operator()})" if hasattr(error, "node_operator") else ""
        faults.append(f"node {node}{op}: {' '.join(error.desc().split())}"[:300])
    why = listed(faults, 2) or host.last_error(messages, "it does not say why")
    raise SwinQuantError(f"{path}: TensorRT {trt.__version__} cannot read it: {why}")


def _read_cache(file: Path) -> bytes:
    try:
        return file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise SwinQuantError(f"{file}: the timing cache cannot be read: {reason(error)}") from error


def inspect_engine(trt: ModuleType, data: bytes, messages: Any, plan: EnginePlan) -> LayerReport:
    """The engine inspector's report on the built engine's layers, matched with the products of the ONNX graph."""
    runtime = trt.Runtime(messages)
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise SwinQuantError(f"{plan.file.path}: the engine cannot be read back: {host.last_error(messages, 'why?')}")
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    try:
        return read_layers(text, plan.report.gemms)
    except SwinQuantError as error:  # a missing report is no reason to lose minutes of building
        log.warning("no layer report: %s", error)
        return read_layers('{"Layers": []}', plan.report.gemms)

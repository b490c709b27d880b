"""The engine: runs an exported network on a GPU by its kernels, or on a CPU by their slow references."""

import re

import torch

from swin_quant.backends.artifact import Artifact, Details, get_policy_name
from swin_quant.backends.cuda.binding import by_interpreter, by_kernels
from swin_quant.backends.cuda.file import read_network
from swin_quant.backends.cuda.gpu_errors import check_launcher
from swin_quant.backends.cuda.machines import gpus, load_machine
from swin_quant.backends.cuda.sessions import GraphSession, HostSession, sizes
from swin_quant.backends.cuda.spec_from_policy import check_batch
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.base.progress import log
from swin_quant.quant.fake_quant import FP8
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

NAME = "cuda"
REFERENCES, INTERPRETED = "cuda (emulated)", "cuda (interpreted)"  # names of the engine on a CPU
OLDEST = {"int8": (8, 0), FP8: (8, 9)}  # oldest compute capability by operand format
_WHAT = {"int8": "the CUDA engine", FP8: "float8"}


def load(artifact: Artifact, options: EngineOptions = EngineOptions()) -> Engine:
    """An engine from the exported file alone, on `options.device`: with several GPUs, torch's current one.

    UsageError or SwinQuantError if there is no GPU or it is too old, if Triton lacks a C compiler, if the file was
    exported with another type, and if it was changed or is not an export.
    """
    record = artifact.record
    if record["backend"] != NAME:
        raise SwinQuantError(f"{artifact.file}: is an export of backend {record['backend']!r:.40}")
    if not options.optimize:
        raise UsageError(f"{NAME}: its kernels are fused: there is no run without optimization")
    device = torch.device(options.device)
    if device.type == "cuda":
        check_gpu()
    if by_kernels(device):
        library("triton", NAME)
    network = read_network(artifact.file)
    spec, largest = network.spec, record["options"].get("batch")
    if not isinstance(largest, int) or isinstance(largest, bool) or largest < 1:
        raise SwinQuantError(f"{artifact.file}: its run card names no batch that it takes; export again")
    if device.type == "cuda":
        check_gpu(spec.format)
        check_launcher()
        device = torch.device("cuda", torch.cuda.current_device())  # fixed now: another GPU may be current later
        check_batch(spec, largest)
    if network.preprocess and network.preprocess != artifact.preprocess:
        raise SwinQuantError(f"{artifact.file}: prepares pictures differently from its run card; export again")
    if options.float_type not in (None, spec.float_type):
        raise UsageError(
            f"‹float_type› {options.float_type}: {artifact.file} was exported with {spec.float_type}: export it again"
        )
    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = device.type == "cuda"
    session = GraphSession(network, device, largest, load_machine(name_here())) if on_gpu else HostSession(network)
    known = {
        "library": f"triton {library('triton', NAME).__version__}"
        if by_kernels(device)
        else f"torch {torch.__version__}, references of the kernels",
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "float_type": spec.float_type,
        "arithmetic": spec.arithmetic,
        "max_batch": largest,
    }
    types = {"patch_embed.proj": spec.float_type, **{p: spec.kind(p) for p in spec.products()}, "head": "float32"}
    return Engine(
        NAME if on_gpu else INTERPRETED if by_kernels(device) else REFERENCES,
        record["precision"],
        get_policy_name(artifact),
        session,
        largest,
        Details(known, lambda: types),
        device=options.device,
        sizes=tuple(sizes(largest)) if on_gpu else (),
    )


def name_here() -> str:
    """The name of this GPU's file (`own_file`), else of that with the nearest compute capability and, among these, the
    nearest number of multiprocessors, which a line names."""
    gpu = torch.cuda.get_device_name()
    if own := own_file(gpu):
        return own
    capability, sms = capability_here(), torch.cuda.get_device_properties("cuda").multi_processor_count

    def unlike(name: str) -> tuple[int, int]:
        known = load_machine(name).gpu
        return abs(known.capability - capability), abs(known.sms - sms)

    nearest = min(gpus(), key=unlike)
    log.info("%s: no file of configs/machines is for it; fusions and tiles are those of the nearest, %s", gpu, nearest)
    return nearest


def own_file(gpu: str) -> str | None:
    """The name of the shipped machine whose words are all in the name of a GPU: a100_80gb, rather than a100."""
    named = [name for name in gpus() if _words(name) <= _words(gpu)]
    return max(named, key=lambda name: len(_words(name)), default=None)


def _words(name: str) -> set[str]:
    """The words of a GPU's or machine's name: A100-SXM4-80GB has those of a100_80gb, RTX 4090 that of rtx4090."""
    return set(re.split("[^a-z0-9]+", name.lower().replace("rtx ", "rtx")))


def capability_here() -> int:
    """This GPU's compute capability, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def check_gpu(format: str = "int8") -> None:
    """UsageError unless torch finds a GPU that runs kernels with operands of this format."""
    if not torch.cuda.is_available():
        raise UsageError("‹device› cuda: torch finds no GPU here: on a CPU (‹device› cpu) the engine is emulated")
    if by_interpreter():
        raise UsageError("TRITON_INTERPRET is set, and kernels would be interpreted on the GPU's tensors: unset it")
    found, oldest = torch.cuda.get_device_capability(), OLDEST[format]
    if found < oldest:
        named, have, need = torch.cuda.get_device_name(), *(f"{major}.{minor}" for major, minor in (found, oldest))
        remedy = ": export with ‹policy› cuda, in int8" if found >= OLDEST["int8"] else ""
        raise UsageError(f"{named}: is of compute capability {have}, and {_WHAT[format]} needs {need} or above{remedy}")

"""The engine: runs an exported network on a GPU by its kernels, or on a CPU by their slow references.

The residual stream can be read after each part of the model.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, get_policy_name
from swin_quant.backends.cuda.export import read_network
from swin_quant.backends.cuda.gpu import check_gpu, check_launcher, gpu_errors, load_machine, name_here
from swin_quant.backends.cuda.launches import build_program, check_batch
from swin_quant.backends.cuda.program import Launch, bind, by_kernels
from swin_quant.backends.cuda.sessions import GraphSession, HostSession, as_input, sizes
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

NAME = "cuda"
REFERENCES, INTERPRETED = "cuda (emulated)", "cuda (interpreted)"  # names of the engine on a CPU


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
    on_gpu = device.type == "cuda"
    if on_gpu:
        check_gpu()
    found = f"torch {torch.__version__}, references of the kernels"
    if by_kernels(device):
        found = f"triton {library('triton', NAME).__version__}"
    network = read_network(artifact.file)
    spec, largest = network.spec, record["options"].get("batch")
    if type(largest) is not int or largest < 1:
        raise SwinQuantError(f"{artifact.file}: its run card names no batch that it takes; export again")
    if on_gpu:
        check_gpu(spec.format)
        check_launcher()
        device = torch.device("cuda", torch.cuda.current_device())  # fixed now: another GPU may be current later
        check_batch(spec, largest)
    if network.preprocess and network.preprocess != artifact.preprocess:
        raise SwinQuantError(f"{artifact.file}: prepares pictures differently from its run card; export again")
    if options.float_type not in (None, spec.float_type):
        fault = f"{artifact.file} was exported with {spec.float_type}: export it again"
        raise UsageError(f"‹float_type› {options.float_type}: {fault}")
    if options.threads:
        torch.set_num_threads(options.threads)
    session = GraphSession(network, device, largest, load_machine(name_here())) if on_gpu else HostSession(network)
    known = {
        "library": found,
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


def inside(artifact: Artifact, options: EngineOptions) -> Callable[[Tensor], dict[str, Tensor]]:
    """Maps images [B, in, S, S] to the residual stream after each part of the model, float32, by the part's name."""
    session = load(artifact, options).run

    def run(images: Tensor) -> dict[str, Tensor]:
        network, device = session.network, session.device  # type: ignore[attr-defined]  # a session of ours
        program = build_program(network.spec, len(images))
        parts, found = [_part(launch) for launch in program.launches], dict[str, Tensor]()
        with gpu_errors(f"a batch of {len(images)}", device):
            bound = bind(program, session.tensors, network.scalars, device)  # type: ignore[attr-defined]
            bound.images.copy_(as_input(network, images))
            for call, part, after in zip(bound.calls, parts, [*parts[1:], None], strict=True):
                call()
                if part and part != after:  # read the stream now: a later call may overwrite it
                    stage = int(part.split(".")[1]) + part.endswith("downsample") if part != "patch_embed" else 0
                    found[part] = bound.buffers[f"x{stage}"].flatten(1, 2).float().cpu().clone()
        return found

    return run


def _part(launch: Launch) -> str | None:
    """The part of the model that a launch belongs to."""
    words = launch.name.split(".")
    if words[0] == "layers":
        return ".".join(words[:3] if words[2] == "downsample" else words[:4])
    return "patch_embed" if words[0] == "patch_embed" else None

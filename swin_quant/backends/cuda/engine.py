"""The engine: runs an exported network on a GPU by its kernels, or on a CPU by their slow references.

Its tensors can be read after each launch, by the names of the model's modules and nodes.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, get_policy_name
from swin_quant.backends.cuda.export import read_network
from swin_quant.backends.cuda.gpu import check_gpu, check_launcher, gpu_errors, load_machine, name_here
from swin_quant.backends.cuda.launches import build_program, check_batch
from swin_quant.backends.cuda.network import Network
from swin_quant.backends.cuda.program import Launch, Program, bind, by_kernels
from swin_quant.backends.cuda.sessions import GraphSession, HostSession, as_input, sizes
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.extras import library
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

NAME = "cuda"
REFERENCES, INTERPRETED = "cuda (emulated)", "cuda (interpreted)"  # names of the engine on a CPU
_QKV = {1: ("matmul_q", "matmul_k", "matmul_v"), 2: ("mha_q", "mha_k", "matmul_v")}
Seen = Iterator[tuple[str, Tensor]]


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
    """Maps images [B, in, S, S] to float32 results by name: of each block, and of each node whose levels are in memory.

    Under FasterTransformer's arithmetic only the residual stream is given: its integers are no values of nodes.
    """
    session = load(artifact, options).run

    def run(images: Tensor) -> dict[str, Tensor]:
        network, device = session.network, session.device  # type: ignore[attr-defined]  # a session of ours
        program = build_program(network.spec, len(images))
        found: dict[str, Tensor] = {}
        with gpu_errors(f"a batch of {len(images)}", device):
            bound = bind(program, session.tensors, network.scalars, device)  # type: ignore[attr-defined]
            bound.images.copy_(as_input(network, images))
            for number, call in enumerate(bound.calls):
                call()  # read the results now: a later call may overwrite them
                found |= {name: x.float().cpu().clone() for name, x in _seen(network, program, number, bound.buffers)}
        return found

    return run


def _seen(network: Network, program: Program, number: int, buffers: Mapping[str, Tensor]) -> Seen:
    """What can be read after a launch."""
    spec, launch, later = network.spec, program.launches[number], program.launches[number + 1 : number + 2]
    part = _part(launch)
    if part and not (later and _part(later[0]) == part):  # the part ends here, and its buffer has the residual stream
        number = int(part.split(".")[1]) + part.endswith("downsample") if part != "patch_embed" else 0
        yield part, buffers[f"x{number}"].flatten(1, 2)
    for word, operand in launch.operands.items():
        layer, _, what = operand.name.rpartition(".")
        if spec.is_ft or word not in ("out", "out_quantized") or what not in ("input", "output"):
            continue
        x, stage = buffers[operand.name].float(), int(layer.split(".")[1])
        heads, length = spec.geometry.heads[stage], spec.geometry.window_in_use(stage) ** 2
        if layer.endswith("attn.qkv") and what == "output":
            at = layer.removesuffix("qkv")
            if f"{at}q k" in spec.quantized:  # q, k and v, [B * windows, heads, L, channels]
                x = x * _inverse(network.tensors[f"{layer}.levels"]).to(x.device)
                parts = x.view(-1, length, 3, heads, spec.padded_head_dim(stage)).permute(2, 0, 3, 1, 4)
                for node, own in zip(_QKV[spec.version], parts[..., : spec.head_dim(stage)], strict=True):
                    # transposed as in the model of V2
                    yield f"{at}{node}_input_quantizer", own.transpose(-2, -1) if node == "mha_k" else own
            continue
        if what == "input" and layer not in spec.quantized:
            continue
        x = x if what == "output" else x * _step(network, layer)
        # [M, K] in the shape of the model: windows first around attention, pictures first elsewhere
        if layer.endswith(("attn.qkv", "attn.proj")):
            if x.shape[1] != spec.channels(stage):  # padded heads
                x = x.unflatten(1, (heads, -1))[..., : spec.head_dim(stage)].flatten(1)
            x = x.unflatten(0, (-1, length))
        else:
            x = x.unflatten(0, (program.batch, -1))
        yield layer if what == "output" else f"{layer}._input_quantizer", x


def _part(launch: Launch) -> str | None:
    """The part of the model that a launch belongs to."""
    words = launch.name.split(".")
    if words[0] == "layers":
        return ".".join(words[:3] if words[2] == "downsample" else words[:4])
    return "patch_embed" if words[0] == "patch_embed" else None


def _step(network: Network, layer: str) -> float:
    """The factor from a level of a linear's input to the real value; the projection's is part of attention's scales."""
    scalars = network.scalars
    if not layer.endswith("attn.proj"):
        return float(_inverse(torch.tensor(scalars[f"{layer}.input_levels"])))
    at = layer.removesuffix("proj")
    levels = scalars[f"{at}context_scale"] * scalars.get(f"{at}softmax_levels", 1.0)
    if f"{at}q k" in network.spec.quantized:
        v_channel = 2 * network.spec.attention_width(int(layer.split(".")[1]))
        levels *= network.tensors[f"{at}qkv.levels"][v_channel].item()
    return float(_inverse(torch.tensor(levels)))


def _inverse(levels: Tensor) -> Tensor:
    """1 / levels; 0 for a range so small that every level is 0."""
    return torch.where(levels > 0, 1 / levels, 0.0)

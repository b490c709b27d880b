"""Read the tensors inside the engine after each launch, by the names of the model's modules and nodes."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.cuda.binding import bind
from swin_quant.backends.cuda.engine import load
from swin_quant.backends.cuda.gpu_errors import gpu_errors
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.network import Network
from swin_quant.backends.cuda.program import Launch, Program
from swin_quant.backends.cuda.sessions import as_input
from swin_quant.score.options import EngineOptions

_QKV = {1: ("matmul_q", "matmul_k", "matmul_v"), 2: ("mha_q", "mha_k", "matmul_v")}
Seen = Iterator[tuple[str, Tensor]]


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
    launch, batch, later = program.launches[number], program.batch, program.launches[number + 1 : number + 2]
    part = _part(launch)
    if part and not (later and _part(later[0]) == part):  # the part ends here, and its buffer has the residual stream
        stage = int(part.split(".")[1]) + part.endswith("downsample") if part != "patch_embed" else 0
        yield part, buffers[f"x{stage}"].flatten(1, 2)
    if network.spec.is_ft:
        return
    for word, operand in launch.operands.items():
        layer, _, what = operand.name.rpartition(".")
        if word not in ("out", "out_quantized") or what not in ("input", "output"):
            continue
        x = buffers[operand.name].float()
        if layer.endswith("attn.qkv") and what == "output":
            if f"{layer.removesuffix('qkv')}q k" in network.spec.quantized:
                yield from _heads(network, layer, x)
        elif what == "output":
            yield layer, _as_module(network, layer, x, batch)
        elif layer in network.spec.quantized:
            yield f"{layer}._input_quantizer", _as_module(network, layer, x * _step(network, layer), batch)


def _part(launch: Launch) -> str | None:
    """The part of the model that a launch belongs to."""
    words = launch.name.split(".")
    if words[0] == "layers":
        return ".".join(words[:3] if words[2] == "downsample" else words[:4])
    return "patch_embed" if words[0] == "patch_embed" else None


def _as_module(network: Network, layer: str, x: Tensor, batch: int) -> Tensor:
    """[M, K] in the shape of the model: windows first around attention, pictures first elsewhere, without padding of
    heads."""
    spec, stage = network.spec, int(layer.split(".")[1])
    if not layer.endswith(("attn.qkv", "attn.proj")):
        return x.unflatten(0, (batch, -1))
    width = spec.channels(stage)
    if x.shape[1] != width:
        heads = x.unflatten(1, (spec.geometry.heads[stage], -1))
        x = heads[..., : spec.head_dim(stage)].flatten(1)
    return x.unflatten(0, (-1, spec.geometry.window_in_use(stage) ** 2))


def _heads(network: Network, layer: str, x: Tensor) -> Seen:
    """q, k and v, [B * windows, heads, L, channels]; k is transposed as in the model of V2."""
    spec, stage = network.spec, int(layer.split(".")[1])
    x = x * _inverse(network.tensors[f"{layer}.levels"]).to(x.device)
    length, heads = spec.geometry.window_in_use(stage) ** 2, spec.geometry.heads[stage]
    parts = x.view(-1, length, 3, heads, spec.padded_head_dim(stage)).permute(2, 0, 3, 1, 4)
    for node, part in zip(_QKV[spec.version], parts[..., : spec.head_dim(stage)], strict=True):
        name = f"{layer.removesuffix('qkv')}{node}_input_quantizer"
        yield name, part.transpose(-2, -1) if node == "mha_k" else part


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

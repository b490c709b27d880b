"""The network of a training step: its precision, compiled if the recipe says so; on ranks copied (DDP) or sharded.

apex's levels O0 to O3, on torch.amp. O0: everything in float32. O1: autocast; matrix products in half, and weights,
norms, softmax and residual stream in float32. O2: the network computes in half, and the optimizer updates float32
master weights; Swin's layer norms keep float32 weights. O3 trains as O2. Norms, softmax and fake quantization compute
in float32 at every level; ranges and batch norms are never half.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from swin_quant.base.distributed import World, all_sum
from swin_quant.base.errors import UsageError
from swin_quant.base.progress import log
from swin_quant.models.classifier import Classifier
from swin_quant.models.registry import list_blocks
from swin_quant.quant.outputs import Output
from swin_quant.score.engine import HALF_TYPES
from swin_quant.train.recipe import Recipe


def is_emulated(half: str, device: torch.device) -> bool:
    """Whether a device only emulates the half-precision type of a recipe: a CPU without bfloat16 arithmetic."""
    return device.type == "cpu" and half != "float16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(frozen=True)
class Precision:
    """A level of precision on a device; `half` is its half-precision type."""

    level: str
    half: torch.dtype
    device: torch.device

    @classmethod
    def choose(cls, level: str, half: str, device: torch.device) -> "Precision":
        """`half` auto is bfloat16, or float16 on a GPU without bfloat16."""
        automatic = "float16" if device.type == "cuda" and not torch.cuda.is_bf16_supported() else "bfloat16"
        chosen = automatic if half == "auto" else half
        if level != "O0" and is_emulated(half, device):
            told = "this CPU has no bfloat16 arithmetic, so %s is emulated: ‹amp_opt_level› O0 is faster"
            log.warning(told, level)
        return cls("O2" if level == "O3" else level, HALF_TYPES[chosen], device)

    def network(self, model: nn.Module) -> nn.Module:
        """The network that computes the logits of a model from its float32 weights."""
        return HalfCopy(model, self.half) if self.level == "O2" else model

    def finish(self, model: nn.Module) -> None:
        """Undo `network` at the end of training."""
        for norm in _layer_norms(model).values():
            norm.follows_input = False

    def autocast(self) -> torch.autocast:
        """The context of every forward pass."""
        return torch.autocast(self.device.type, self.half, enabled=self.level == "O1")

    def scaler(self) -> torch.amp.GradScaler:
        """A loss scaler, active only for float16 gradients of float32 weights."""
        return torch.amp.GradScaler(
            self.device.type, enabled=self.half == torch.float16 and self.level in ("O1", "O2"), init_scale=2.0**14
        )

    def logits(self, network: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """The float32 logits of images [B, 3, H, W]."""
        (logits,) = self.outputs(network, images)
        return logits

    def outputs(self, network: Callable[[Tensor], Output], images: Tensor) -> list[Tensor]:
        """The float32 outputs of a network for images [B, 3, H, W]: one tensor, or a list of maps."""
        if self.level == "O2":
            images = images.to(self.half)
        with self.autocast():
            outputs = network(images)
            return [part.float() for part in ([outputs] if isinstance(outputs, Tensor) else outputs)]


class HalfCopy(nn.Module):
    """Calls a float32 model with half-precision copies of its weights; gradients reach the float32 weights."""

    def __init__(self, model: nn.Module, half: torch.dtype) -> None:
        super().__init__()
        norms = _layer_norms(model)
        for norm in norms.values():
            norm.follows_input = True
        batch_norm = nn.modules.batchnorm._BatchNorm
        kept = {name for name, module in model.named_modules() if isinstance(module, batch_norm)}
        self.model, self.dtype, self.kept = model, half, kept | set(norms)

    def forward(self, images: Tensor) -> Tensor:
        """The output for half images. Ranges and norms' weights stay, and a batch norm's statistics, which a copy would
        not update."""
        copies = {
            name: tensor.to(self.dtype)
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
            if tensor.is_floating_point()
            and not name.endswith(("_amax", "_bounds"))
            and name.rpartition(".")[0] not in self.kept
        }
        return functional_call(self.model, copies, (images,))


def _layer_norms(model: nn.Module) -> dict[str, Any]:
    """The norms whose weights may have another type than the network, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "follows_input")}


M = TypeVar("M", bound=nn.Module)


def check_parallel(recipe: Recipe, world: World) -> None:
    """UsageError if FSDP2 cannot train this recipe."""
    if recipe.memory.offload and not recipe.memory.fsdp:
        raise UsageError("‹offload› is a part of FSDP: give ‹fsdp› too")
    if not recipe.memory.fsdp:
        return
    if world.size < 2:
        raise UsageError("‹fsdp› shards a model over ranks, and this is one: start it by torchrun --nproc_per_node N")
    if recipe.memory.offload and world.device.type != "cuda":
        raise UsageError("‹offload› moves the state of a model from its GPU to the CPU: on a CPU it is there already")
    refused = {
        "precision O2 or O3": recipe.precision in ("O2", "O3"),
        "an EMA": recipe.ema > 0,
        "learned ranges": recipe.amax.mode == "learned",
    }
    if found := [what for what, wanted in refused.items() if wanted]:
        raise UsageError(f"‹fsdp› does not go with {' and '.join(found)}: change the recipe")


def parallel(network: nn.Module, model: Classifier, recipe: Recipe, world: World) -> nn.Module:
    """The network that computes the logits on every rank, compiled if the recipe says so.

    Call it before the optimizer takes the parameters; their names stay those of `model`.
    """
    if recipe.compile:
        network = cast(nn.Module, torch.compile(network))
    if world.size == 1:
        return network
    if recipe.memory.fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        policy = CPUOffloadPolicy() if recipe.memory.offload else OffloadPolicy()
        for part in (*list_blocks(model).values(), model):  # in place
            fully_shard(part, mesh=mesh, offload_policy=policy)
        return model
    devices = [world.device] if world.device.type == "cuda" else None
    with warnings.catch_warnings():  # torch 2.13 deprecates broadcast_buffers; its successor lacks this
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(network, devices, broadcast_buffers=False, gradient_as_bucket_view=True)


def average_buffers(models: Iterable[nn.Module], world: World) -> None:
    """Replace all buffers, such as the running statistics of batch norms, by their mean over ranks."""
    buffers = [buffer for model in models for buffer in model.buffers() if buffer.is_floating_point()]
    if world.size == 1 or not buffers:
        return
    counted = torch.cat([buffer.detach().flatten().double() for buffer in buffers])
    mean = all_sum(counted, world.device) / world.size
    for buffer, part in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))  # equal buffers keep their bits: sums in double are exact


@contextmanager
def gathering(network: nn.Module, last: bool) -> Iterator[None]:
    """Sum gradients over ranks only in the backward pass of a step's last micro-batch."""
    context: AbstractContextManager[None] = nullcontext()
    if sync := getattr(network, "set_requires_gradient_sync", None):
        sync(last)
    elif isinstance(network, DistributedDataParallel) and not last:
        context = network.no_sync()
    with context:
        yield


def whole(value: Tensor) -> Tensor:
    """A possibly sharded tensor in one piece."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are sharded over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def without_values(model: M) -> M:
    """A copy whose tensors have shapes but no values until a state_dict is assigned."""
    parameters = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return deepcopy(model, parameters | {id(buffer): buffer.to("meta") for buffer in model.buffers()})


def full_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The unsharded state_dicts of a model and its optimizer. For a sharded model all ranks must call; rank 0 gets
    them."""
    if not is_sharded(model):
        return model.state_dict(), optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_full_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Load `full_states`; every rank must have all of them."""
    if not is_sharded(model):
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)


def check_compiler(recipe: Recipe, device: torch.device) -> None:
    """UsageError if the recipe's `compile` cannot work.

    Only a trial tells whether the compiler works: C++ on a CPU, Triton on a GPU.
    """
    if not recipe.compile:
        return
    if recipe.memory.fsdp:
        raise UsageError("‹compile› does not go with ‹fsdp›: leave one of them out")
    try:
        tell_cpus_apart()
        torch.compile(torch.sin, fullgraph=True)(torch.zeros(2, device=device))
    except Exception as error:  # a broken compiler raises anything
        reason = next(line for line in f"{error}\n{type(error).__name__}".splitlines() if line.strip())
        raise UsageError(f"‹compile›: torch.compile does not work here ({reason}): leave it out") from error


def tell_cpus_apart() -> None:
    """Add the width of this CPU's vectors to the key of torch's cache of compiled graphs.

    torch 2.13 omits it: with a shared cache folder, a CPU runs the graphs of a wider one and silently computes wrong
    numbers.
    """
    from torch._inductor import config, cpu_vec_isa

    config.cpp.simdlen = cpu_vec_isa.pick_vec_isa().bit_width()

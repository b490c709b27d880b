"""The engines that torch runs: the float model, its half-precision form, the fake-quantized model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from swin_quant.quant.fake_quant import FP8
from swin_quant.quant.policy import Policy, apply_settings, enabled_nodes, quantizing, settings_for, told_apart
from swin_quant.quant.quantizer import Role
from swin_quant.quant.setting import Setting
from swin_quant.quant.watch import eval_mode
from swin_quant.score.engine import EAGER, FAKE_QUANT, HALF_TYPES, Engine


def torch_engines(
    model: nn.Module, device: torch.device, half: str | None, policies: Sequence[Policy] = ()
) -> dict[str, Engine]:
    """Engines by label: float32 first, then `half` unless None, then one for each policy that enables a node.

    Half precision is autocast: matmuls in half, residual stream, LayerNorm and softmax in float32. Raises
    SwinQuantError with the names of enabled nodes that have no range, before any picture is read.
    """
    engines = [Engine(EAGER, "float32", None, partial(_run_float, model))]
    if half:
        engines.append(Engine(EAGER, half, None, partial(_run_half, model, device, HALF_TYPES[half])))
    for policy in policies:
        settings = settings_for(model, policy)
        with _quantizing(model, settings):
            if enabled_nodes(model):
                run = partial(_run_quantized, model, settings)
                precision = precision_of(model)
                engines.append(Engine(FAKE_QUANT, precision, policy.name, run, policy_sha256=policy.sha256))
    names = told_apart((engine.policy, engine.policy_sha256) for engine in engines if engine.policy)
    policies_of = (names[engine.policy, engine.policy_sha256] if engine.policy else None for engine in engines)
    labels = [replace(engine, policy=policy).label for engine, policy in zip(engines, policies_of, strict=True)]
    return {label: replace(engine, device=str(device)) for label, engine in zip(labels, engines, strict=True)}


def engine_under(model: nn.Module, device: torch.device, policies: Sequence[Policy]) -> Engine:
    """The model quantized under the last policy, or in float where none enables a node."""
    return list(torch_engines(model, device, None, policies).values())[-1]


def _run_float(model: nn.Module, images: Tensor) -> Tensor:
    with _evaluating(model):
        return model(images)


def _run_half(model: nn.Module, device: torch.device, dtype: torch.dtype, images: Tensor) -> Tensor:
    with _evaluating(model), torch.autocast(device.type, dtype):
        return model(images)


def _run_quantized(model: nn.Module, settings: Mapping[str, Setting], images: Tensor) -> Tensor:
    with _evaluating(model), _quantizing(model, settings):
        return model(images)


def _evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the context, evaluation mode. A model already in it is not walked, which would count as the network's
    time."""
    return eval_mode(model) if model.training else nullcontext()


@contextmanager
def _quantizing(model: nn.Module, settings: Mapping[str, Setting]) -> Iterator[None]:
    """Inside, the nodes that `settings` enable quantize; afterwards every node is off."""
    apply_settings(model, settings)
    with quantizing(model):
        yield


def precision_of(model: nn.Module) -> str:
    """`int8` or `fp8` if every enabled node is, `W4A8` by the bits of weights and activations, else `mixed`.

    16 stands for what is not quantized, as in `W4A16`: engines run it in a half type or in float32.
    """
    formats = {node.setting.format for node in enabled_nodes(model).values()}
    if formats == {FP8}:
        return FP8
    if len(formats) > 1:
        return "mixed"
    bits: dict[bool, set[int]] = {True: set(), False: set()}
    for node in enabled_nodes(model).values():
        bits[node.role is Role.GEMM_WEIGHT].add(node.setting.bits)
    if bits[True] | bits[False] == {8}:
        return "int8"
    if any(len(kind) > 1 for kind in bits.values()):
        return "mixed"
    weights, activations = (min(kind, default=16) for kind in (bits[True], bits[False]))
    return f"W{weights}A{activations}"

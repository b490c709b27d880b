"""Ranges during QAT: frozen, learned or re-estimated; at the end they fit the trained weights.

FasterTransformer freezes ranges: weights that drift beyond amax saturate silently at export (docs/reference, section
2.7, point 16). Here `settle` leaves no weight outside its range, in every mode.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from swin_quant.cards.records import RangesRecord
from swin_quant.quant.calibration import Method, observe, set_ranges
from swin_quant.quant.fake_quant import TINY_AMAX, lowest_inside
from swin_quant.quant.layer import QuantizedLayer, weighted_layers
from swin_quant.quant.policy import enabled_nodes, refuse_blocks
from swin_quant.quant.quantizer import Quantizer, Role, named_nodes
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.ranges import weight_range
from swin_quant.quant.watch import eval_mode, watching
from swin_quant.train.recipe import Ranges

Images = Callable[[], Iterable[Tensor]]


class RangeKeeper:
    """Keeps the ranges of `model`, whose policy is applied and whose nodes are on, as the recipe says.

    `images` gives this rank's share of a fixed sample of pictures [B, 3, H, W], on the model's device. The ranges of
    `frozen` nodes do not change.
    """

    def __init__(
        self, model: nn.Module, recipe: Ranges, epochs: int, images: Images, frozen: Collection[str] = ()
    ) -> None:
        self.model, self.recipe, self.epochs, self.images = model, recipe, epochs, images
        self.nodes: dict[str, Quantizer] = {}
        for name, node in enabled_nodes(model).items():
            is_activation = node.role is not Role.GEMM_WEIGHT
            is_chosen = recipe.activations and node.setting.amax is None if is_activation else recipe.weights
            if is_chosen and name not in frozen:
                self.nodes[name] = node
        settle_granularity(model, enabled_nodes(model))
        self.before = {name: _size(node).clone() for name, node in enabled_nodes(model).items()}
        if recipe.initial == "reestimated":
            self.reestimate()
        if recipe.mode == "learned":
            for node in self.nodes.values():
                node.learn_range()

    def after_step(self) -> None:
        """Keep learned ranges positive, and their zero points unchanged."""
        if self.recipe.mode == "learned":
            for node in self.nodes.values():
                node.hold_range()

    def after_epoch(self, epoch: int) -> dict[str, float]:
        """Re-estimate if it is due after `epoch` epochs. Returns the drift of the ranges and the share of clipped
        values."""
        due = epoch % self.recipe.every_epochs == 0 and epoch <= self.recipe.until * self.epochs
        if self.recipe.mode == "reestimated" and due:
            self.reestimate()
        clipped = clipped_shares(self.model, self.images())
        sizes = [(_size(node), self.before[name]) for name, node in enabled_nodes(self.model).items()]
        drifts = [((now - before).abs() / before.clamp(min=TINY_AMAX)).mean().item() for now, before in sizes]
        return {
            "amax_drift": sum(drifts) / max(len(drifts), 1),
            "clipped_share": sum(clipped.values()) / max(len(clipped), 1),
        }

    def record(self) -> RangesRecord:
        """The range methods, for the run card."""
        if (self.recipe.mode, self.recipe.initial) == ("frozen", "calibrated"):
            return RangesRecord(weights=None, activations=None)
        method = "learned" if self.recipe.mode == "learned" else self.recipe.method
        own = method == "learned" or RANGE_METHODS[method].search_weight is not None
        return RangesRecord(
            weights=(method if own else "max") if self.recipe.weights else None,
            activations=method if self.recipe.activations else None,
        )

    def reestimate(self) -> None:
        """Re-estimate the chosen nodes' ranges from the current weights and the sample of pictures."""
        _calibrate(self.model, self.nodes, Method(self.recipe.method), self.images())
        settle_granularity(self.model, self.nodes)
        for name, layer in _weights(self.model, self.nodes):
            found = weight_range(self.recipe.method, layer.weight, self.nodes[name])
            if found is not None:  # `_calibrate` gave the weight its maximum, whatever the method
                self.nodes[name].amax = found

    def settle(self, model: nn.Module) -> None:
        """End training: put weights inside their ranges, turn learned ranges into buffers, and calibrate the nodes that
        were off.

        `model` is the trained model: the keeper's own, unless that was sharded. Clamping a weight to the ends of its
        grid changes no quantized value. Nodes that are off get ranges from the trained weights without quantization.
        """
        for node in self.nodes.values():
            node.freeze_range()
        on = enabled_nodes(model)
        for name, layer in _weights(model, on):
            qmin, qmax = on[name].setting.levels
            with torch.no_grad():
                amax = on[name].range
                layer.weight.copy_(torch.minimum(torch.maximum(layer.weight, amax * (qmin / qmax)), amax))
        off = {name: node for name, node in named_nodes(model).items() if name not in on}
        _calibrate(model, off, Method(), self.images())


def settle_granularity(model: nn.Module, nodes: dict[str, Quantizer]) -> None:
    """Give the weight nodes among `nodes` the shape of range that their policy asks for: 0-dim or [out, 1].

    Training updates ranges in place, so they need their final shape first; and a row's range must not follow its
    weights.
    """
    refuse_blocks(model, "QAT")
    for name, layer in _weights(model, nodes):
        nodes[name].amax = nodes[name].range_for(layer.weight)


def clipped_shares(model: nn.Module, images: Iterable[Tensor]) -> dict[str, float]:
    """The share of values, 0 to 1, that each enabled activation node clips, over the `images`."""
    nodes = {name: node for name, node in enabled_nodes(model).items() if node.role is not Role.GEMM_WEIGHT}
    device = next(model.parameters()).device
    counts = torch.zeros(len(nodes), 2, dtype=torch.float64, device=device)
    rows = dict(zip(nodes, counts, strict=True))

    def count(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        node, values = nodes[name], inputs[0].float()
        amax = node.range_for()
        outside = (values > amax) | (values < lowest_inside(amax, *node.grid))
        rows[name].add_(torch.stack([outside.sum(), torch.tensor(outside.numel(), device=device)]))

    with torch.no_grad(), eval_mode(model), watching(nodes, count):
        for batch in images:
            model(batch)
    clipped, seen = counts.cpu().unbind(1)
    return dict(zip(nodes, (clipped / seen.clamp(min=1)).tolist(), strict=True))


def _size(node: Quantizer) -> Tensor:
    """amax, or one for each row; for a range with a zero point, its upper end."""
    return (node.range if node.setting.symmetric else node.range_for()).detach()


def _calibrate(model: nn.Module, nodes: dict[str, Quantizer], method: Method, images: Iterable[Tensor]) -> None:
    """Calibrate only `nodes`; all other nodes keep their range and state."""
    kept = {node: (node.amax, node.bounds, node.state) for node in named_nodes(model).values()}
    set_ranges(model, observe(model, images, method), method)
    for node, (amax, bounds, state) in kept.items():
        node.state = state
        if node not in nodes.values():
            node.amax, node.bounds = amax, bounds


def _weights(model: nn.Module, nodes: Collection[str]) -> Iterator[tuple[str, QuantizedLayer]]:
    """Layers whose weight node is among `nodes`, by that node's name."""
    return ((name, layer) for name, layer in weighted_layers(model).items() if name in nodes)

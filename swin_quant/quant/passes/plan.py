"""Plan the passes after a calibration."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from torch import nn

from swin_quant.cards.records import AdviceRecord, PassRecord
from swin_quant.quant.passes.recipe import PassRecipe, PassStep, steps_of
from swin_quant.quant.passes.run import refuse
from swin_quant.quant.policy import enabled_nodes
from swin_quant.quant.quantizer import Role

EVENED = steps_of([{"name": "equalize", "only_outliers": True}])
CORRECTED = steps_of([{"name": "bias_correction"}])  # gains 4 to 5 dB on EfficientNet-Lite0 (docs/any_model.md)


@dataclass(frozen=True)
class PassPlan:
    """The passes after a calibration; with `recipe`, they depend on the policy's bits.

    `automatic`: without chosen passes, outlier channels are evened out, and biases after the folded batch norms of a
    wrapped module are corrected.
    """

    steps: tuple[PassStep, ...] = ()
    automatic: bool = False
    recipe: PassRecipe | None = None

    @classmethod
    def of(cls, recipe: PassRecipe) -> "PassPlan":
        """The plan of a recipe."""
        return cls(recipe.steps, recipe=recipe)

    def for_model(self, model: nn.Module) -> "PassPlan":
        """The plan for the bits of a model's enabled nodes. UsageError if its policy forbids a pass."""
        nodes = enabled_nodes(model).values()
        weights = _usual(node.setting.bits for node in nodes if node.role is Role.GEMM_WEIGHT)
        activations = _usual(node.setting.bits for node in nodes if node.role is not Role.GEMM_WEIGHT)
        steps = self.recipe.for_bits(min(weights, activations), activations) if self.recipe else self.steps
        refuse(model, steps)
        return replace(self, steps=steps, recipe=None)

    def made(self, records: Sequence[PassRecord], advice: Sequence[AdviceRecord] = ()) -> bool:
        """Whether a calibration with these passes and this advice followed the same plan."""
        done = [{"name": one["name"], **one["options"]} for one in records]
        if self.automatic and not done and any(one["kind"] == "outliers" for one in advice):
            return False  # outliers remain, so no automatic pass was wanted
        variants = self.recipe.variants if self.recipe else [self.steps]
        if self.automatic and not self.steps:
            variants = [*variants, EVENED, CORRECTED, (*EVENED, *CORRECTED)]
        return done in [[step.to_dict() for step in steps] for steps in variants]

    def around_ranges(self) -> "tuple[PassPlan, PassPlan]":
        """The passes up to the last one after which ranges are observed again, and the passes after it, which may
        choose ranges."""
        if not self.steps:
            return self, PassPlan()
        last = max((number for number, step in enumerate(self.steps, 1) if step.kind.observes_again), default=0)
        return replace(self, steps=self.steps[:last]), PassPlan(self.steps[last:])


def _usual(bits: Iterable[int]) -> int:
    """The bits that half of the nodes have at least: a few nodes with other bits do not change the recipe."""
    found = list(bits)
    return median_high(found) if found else 8

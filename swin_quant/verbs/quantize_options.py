"""The options of `quantize`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Annotated

from swin_quant.base.errors import UsageError
from swin_quant.cli import shared
from swin_quant.cli.flags import Flag, Group, words_from
from swin_quant.quant import AUTO
from swin_quant.verbs.calibrate import SampleOptions
from swin_quant.verbs.search_options import Budget, TimingOptions

NO_SEARCH = f"a budget needs ‹policy› {AUTO}, which searches for a policy that keeps it"


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Which checkpoints become artifacts of which backend, and how."""

    backend: shared.TargetName
    checkpoint: Annotated[
        tuple[str, ...],
        Flag("a float or a calibrated checkpoint, from anywhere", "CHECKPOINT", or_flag=True),
    ] = ()
    model: shared.ModelOptions = shared.ModelOptions()
    data: shared.ScoringOptions = shared.ScoringOptions()
    sample: SampleOptions = SampleOptions()
    ranges: shared.RangeOptions = shared.RangeOptions()
    passes: shared.PassOptions = shared.PassOptions()
    policy: shared.PolicyOptions = shared.PolicyOptions()
    budget: Annotated[Budget, Group("budget of --policy auto")] = Budget()
    int4_weights: shared.Int4Weights = False
    tune: shared.Tune = False
    timing: Annotated[TimingOptions, Group("options")] = TimingOptions()
    dry_run: Annotated[bool, Flag("print the steps, as commands, and do nothing")] = False
    run: Annotated[shared.RunOptions, Group("options")] = shared.RunOptions()
    output: shared.Output = None
    json: shared.Json = None

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise UsageError("no checkpoint: name a float or a calibrated one")
        if len(self.policy.policy) > 1:
            raise UsageError(f"--policy {' '.join(self.policy.policy)}: give one")
        automatic = self.policy.policy == (AUTO,)
        if self.budget != Budget() and not automatic:
            raise UsageError(NO_SEARCH)
        if self.tune and (self.policy != shared.PolicyOptions() or self.timing.float_type or self.int4_weights):
            raise UsageError(
                "‹tune› chooses the policy, and times files in the engine's fastest types: leave ‹policy› and what "
                "changes one, ‹float_type› and ‹int4_weights› out"
            )
        changes = shlex.join(words_from(replace(self.policy, policy=(), saturation_safe=False)))
        if automatic and changes:
            raise UsageError(
                f"--policy {AUTO}: {changes} is for a policy with a name: calibrate, then `search --policy NAME` with "
                "it"
            )
        if automatic and self.policy.saturation_safe:
            raise UsageError("--saturation-safe: a search measures policies as they are: leave it out")

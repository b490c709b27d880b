"""Options that several verbs share, each a group in --help: the model, the pictures, ranges, passes, the policy."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from swin_quant.backends.registry import engines, targets
from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import shipped_files
from swin_quant.base.progress import log
from swin_quant.cli.flags import Flag, Rare
from swin_quant.config import architecture
from swin_quant.config.outputs import OUTPUT_KINDS
from swin_quant.quant import AUTO, BY_BITS, CALIBRATORS, DEFAULT_PERCENTILE
from swin_quant.score.options import EngineOptions

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from swin_quant.base.distributed import World
    from swin_quant.checkpoint.opened import Checkpoint, OpenedCheckpoint
    from swin_quant.data.picture_set import PictureSet
    from swin_quant.data.pictures import Pictures
    from swin_quant.quant.calibration import Method
    from swin_quant.quant.passes.run import PassPlan
    from swin_quant.quant.policy import Policy, Rule


DEFAULT_BATCH = 32  # pictures at a time, without a config's value
HIDDEN = Flag(argparse.SUPPRESS)  # without a place in --help
OTHER_MACHINE = {"DATA.DATA_PATH": "", "DATA.ZIP_MODE": False}  # instead of a card's values, which name no folder here

Calibrated = Annotated[str | None, Flag("calibrated checkpoint", "CHECKPOINT", or_flag=True)]
MadeFrom = Annotated[str | None, Flag("the checkpoint that was exported (default: looked for)", "FILE")]
ArtifactFile = Annotated[str, Flag("exported file; its run card lies beside it", "ARTIFACT", place=True)]
TargetName = Annotated[str, Flag("backend that will run it", name="--for", choices=targets)]
Int4Weights = Annotated[bool, Rare("store weights of at most 4 bits as INT4 (policies w4a16, w4a8)")]
Tune = Annotated[bool, Flag("openvino: try files, keep the fastest (minutes)")]
ClassNames = Annotated[str | None, Flag("class names, one a line (default: the model's, ImageNet's)", "FILE")]
Evenly = Annotated[int, Flag("pictures, evenly spread over those there are", "N", least=1)]
Shard = Annotated[int | None, Rare("pictures a Parquet file (default 10000)", "N")]
Json = Annotated[str | None, Flag("print the result as JSON, or write it to FILE", "FILE", optional="-")]
Output = Annotated[str | None, Flag("folder of the results (default: output/<NAME>)", "DIR")]
OutputKind = Annotated[
    str | None,
    Rare("the model's output: logits, the input of its head, or the maps of its stages", choices=OUTPUT_KINDS),
]
NoEval = Annotated[bool, Flag("do not score the result on the val split")]
ReplaceHead = Annotated[bool, Rare("leave out a head of another number of classes")]
Original = Annotated[
    str | None, Rare("the float checkpoint that QAT is compared with (default: looked for)", "FILE", name="--float")
]
FloatType = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    Rare("type of float layers, where the engine chooses"),
]
AnyDevice = Annotated[Literal["auto", "cpu", "cuda"], HIDDEN]
OnlyCpu = Annotated[Literal["cpu"], HIDDEN]
MaxUnreadable = Annotated[float, Rare("end the run when more than this share is unreadable", "SHARE")]


class SetsKeys(Protocol):
    """Options that set keys of the config."""

    def keys(self) -> dict[str, Any]:
        """Dotted key -> value, for the options that are set."""


def _set_keys(**keys: Any) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in keys.items() if value is not None}


@dataclass(frozen=True)
class ModelOptions:
    """The model in a checkpoint, if the file does not say it or another size is wanted."""

    TITLE = "model"
    cfg: Annotated[str | None, Flag("YAML, or a shipped name (default: the checkpoint says)", "FILE")] = None
    weights: Annotated[
        str | None, Rare("which, of a file that holds several sets (default: as timm's loader)", "ema|raw|NAME")
    ] = None
    img_size: Annotated[str | None, Rare("side of the pictures, or HEIGHTxWIDTH, if not the file's", "PIXELS")] = None
    window: Annotated[int | None, Rare("side of the windows, if not the file's (interpolated)", "TOKENS")] = None
    opts: Annotated[tuple[str, ...], Rare("set keys of the config, as KEY VALUE pairs", "KEY VALUE")] = ()

    def keys(self) -> dict[str, Any]:
        windows = {"MODEL__SWIN__WINDOW_SIZE": self.window, "MODEL__SWINV2__WINDOW_SIZE": self.window}
        return _set_keys(MODEL__WEIGHTS=self.weights, DATA__IMG_SIZE=_sides_in(self.img_size), **windows)


def upright_opts(pictures: PictureSet) -> tuple[str, ...]:
    """The words of --opts that turn pictures as this set does; none where it leaves that to the model."""
    return () if pictures.upright is None else ("DATA.UPRIGHT", str(pictures.upright))


def _sides_in(text: str | None) -> int | list[int] | None:
    """`192x224` as [192, 224]. UsageError for any other text."""
    words = text.split("x") if text else []
    if len(words) > 2 or not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise UsageError(f"‹img_size› {text!r:.40}: must be a number of pixels, or height and width as 192x224")
    numbers = [int(word) for word in words]
    return numbers if len(numbers) == 2 else numbers[0] if numbers else None


@dataclass(frozen=True)
class LoadingOptions:
    """Where labelled pictures are, and how they are read."""

    TITLE = "pictures"
    data_path: Annotated[str | None, Flag("train/ and val/, or their zips; digits, csv:FILE, ...", "DIR")] = None
    zip: Annotated[bool, Rare("zips and maps of DIR, though folders lie there")] = False
    cache_mode: Annotated[Literal["no", "full", "part"] | None, Rare("zip: keep no, all, or this rank's bytes")] = None
    batch: Annotated[int | None, Flag("pictures at a time, a rank (default: DATA.BATCH_SIZE)", "N")] = None
    workers: Annotated[int | None, Rare("processes that load pictures, at most", "N")] = None
    max_unreadable: MaxUnreadable = 0.01

    def keys(self) -> dict[str, Any]:
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"‹batch› {self.batch}: must be at least 1")
        return _set_keys(
            DATA__DATA_PATH=self.data_path,
            DATA__ZIP_MODE=self.zip or None,
            DATA__CACHE_MODE=self.cache_mode,
            DATA__BATCH_SIZE=self.batch,
            DATA__NUM_WORKERS=self.workers,
        )


@dataclass(frozen=True)
class ScoringOptions(LoadingOptions):
    """Labelled pictures, and the half-precision baseline that scores beside a model."""

    half: Annotated[
        Literal["auto", "none", "float16", "bfloat16"],
        Rare("half-precision baseline (default: the device's)"),
    ] = "auto"


@dataclass(frozen=True)
class SplitOptions:
    """A split of a data set."""

    TITLE = "pictures"
    data_path: Annotated[
        str | None, Flag("folder of pictures, or with val/ or its zip; digits, csv:FILE, ...", "DIR")
    ] = None
    zip: Annotated[bool, Rare("the zip of the split, though a folder lies beside it")] = False
    split: Annotated[str, Flag("split of --data-path (default val)")] = "val"


@dataclass(frozen=True)
class PlaceOfPictures(SplitOptions):
    """Pictures whose labels need not be known: a split of a dataset, or files, folders and patterns."""

    images: Annotated[tuple[str, ...], Flag("instead: files, folders, 'patterns'", "PLACE")] = ()

    def open(self, classes: int | None = None) -> Pictures:
        """The pictures, labelled if `classes`, their number, is given. UsageError for no kind, or for both."""
        from swin_quant.data.named import NamedPictures
        from swin_quant.data.sources import open_pictures

        if bool(self.data_path) == bool(self.images):
            raise UsageError(
                "--data-path and --images both name the pictures: give one of them"
                if self.data_path
                else "no pictures: give --data-path DIR or --images PLACE ..."
            )
        if not self.data_path:
            return NamedPictures(list(self.images))
        return open_pictures(self.data_path, self.split, zip_mode=self.zip, num_classes=classes)


@dataclass(frozen=True)
class PictureOptions(PlaceOfPictures):
    """The same, and how they are read."""

    max_unreadable: MaxUnreadable = 0.01
    batch: Annotated[int, Flag("pictures at a time", "N")] = DEFAULT_BATCH
    workers: Annotated[int, Rare("processes that load pictures, at most", "N")] = 8


def _engine_names() -> str:
    return f"{', '.join(engines())} (default: the one it was exported for, else all)"


@dataclass(frozen=True)
class EngineFlags:
    """Which engines run an artifact, and how."""

    TITLE = "engines"
    engine: Annotated[tuple[str, ...], Flag(_engine_names, "NAME")] = ()
    threads: Annotated[int | None, Flag("threads of an engine (default: its own choice)", "N")] = None
    extension: Annotated[
        tuple[str, ...],
        Rare("openvino: libraries with operators of your own (docs/custom_operators.md)", "FILE"),
    ] = ()
    float_type: FloatType = None

    def options(self, device: str) -> EngineOptions:
        return EngineOptions(self.threads, self.float_type, device, extensions=self.extension)


@dataclass(frozen=True)
class RunOptions:
    """Device and seed of a run."""

    TITLE = "run"
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("default: a GPU if there is one")] = "auto"
    seed: Annotated[int | None, Rare("seed of the sample of pictures and of new weights (default: SEED, 0)")] = None
    local_rank: Annotated[int | None, Flag(argparse.SUPPRESS, name="--local_rank", names=("--local-rank",))] = None

    def keys(self) -> dict[str, Any]:
        return _set_keys(SEED=self.seed)


@dataclass(frozen=True)
class RangeOptions:
    """How ranges are found."""

    TITLE = "calibration"
    calibrator: Annotated[
        str | None,
        Flag(
            "default: by a node's bits, "
            + ", ".join(f"{name} from {bits} bits on" for bits, name in BY_BITS.items())
            + "; auto: node by node, by its cost",
            choices=(*CALIBRATORS, AUTO),
        ),
    ] = None
    percentile: Annotated[
        float | None, Rare(f"means the percentile calibrator (default {DEFAULT_PERCENTILE})", "P")
    ] = None
    exact_histogram: Annotated[bool, Rare("count every value, not a sample of each picture")] = False

    def method(self) -> Method:
        from swin_quant.quant.calibration import Method

        if self.percentile is None:
            return Method(self.calibrator, exact=self.exact_histogram)
        return Method(self.calibrator or "percentile", self.percentile, self.exact_histogram)


def pass_recipes() -> str:
    """The shipped recipes of passes, for --help."""
    return f"{', '.join(path.stem for path in shipped_files('passes'))}, or a YAML file"


@dataclass(frozen=True)
class PassOptions:
    """Passes after the calibration, which recover accuracy."""

    TITLE = "calibration"
    passes: Annotated[str | None, Flag(pass_recipes, "NAME|FILE")] = None
    no_equalize: Annotated[bool, Rare("leave channels that stand out as they are (without --passes)")] = False

    def plan(self) -> PassPlan:
        from swin_quant.quant.passes.recipe import load_passes
        from swin_quant.quant.passes.run import PassPlan

        if self.passes and self.no_equalize:
            raise UsageError("--passes and --no-equalize: the recipe says whether to equalize: leave one of them out")
        if self.passes:
            return PassPlan.of(load_passes(self.passes))
        return PassPlan(automatic=not self.no_equalize)


@dataclass(frozen=True)
class PolicyOptions:
    """The quantized nodes and their settings; several policies for verbs that compare them."""

    TITLE = "policy: which nodes are quantized, and how"
    policy: Annotated[tuple[str, ...], Flag("names of `swin-quant policies`, or YAML files", "NAME|FILE")] = ()
    wprec: Annotated[int | None, Flag("bits of weights, 2 to 8 (default: the policy's, 8)", "BITS")] = None
    aprec: Annotated[int | None, Flag("bits of activations, 2 to 8 (default: the policy's, 8)", "BITS")] = None
    quant_per_tensor: Annotated[bool, Rare("one range a weight, whatever the policy says")] = False
    narrow_range: Annotated[bool, Rare("weights to -127..127 instead of -128..127")] = False
    saturation_safe: Annotated[bool, Rare("weights of 7 bits: exact products on CPUs without VNNI")] = False
    off: Annotated[tuple[str, ...], Flag("nodes that stay float: names with * and ?, or roles", "NODES")] = ()

    def policies(self) -> list[Policy]:
        """The policies, in order; empty if none is named.

        A policy that other options change gets its own name: its results are not the original's.
        """
        from swin_quant.quant.policy import load_policy

        if AUTO in self.policy:
            raise UsageError("--policy auto: `quantize` has it, and `search` finds it for a calibrated checkpoint")
        rules = self._rules()
        policies = [load_policy(name) for name in self.policy]
        if rules and not policies:
            raise UsageError("--policy: name the policy that --off, --wprec or another option changes")
        counted = Counter(policy.sha256 for policy in policies)
        if twice := [policy.name for policy in policies if counted[policy.sha256] > 1]:
            raise UsageError(f"--policy: {' and '.join(dict.fromkeys(twice))} is given twice, by its rules")
        nothing, changes = load_policy("float").sha256, " ".join(self.changes())
        return [
            replace(policy.and_then(*rules), name=f"{policy.name} {changes}")
            if rules and policy.sha256 != nothing
            else policy
            for policy in policies
        ]

    def one(self) -> Policy | None:
        """The policy of a verb that takes one; None if none is named. UsageError for several."""
        policies = self.policies()
        if len(policies) > 1:
            raise UsageError(f"--policy {' '.join(self.policy)}: give one")
        return policies[0] if policies else None

    def changes(self) -> list[str]:
        """The options that change a policy, as words for its name."""
        words = {
            f"W{self.wprec}": self.wprec,
            f"A{self.aprec}": self.aprec,
            "per-tensor": self.quant_per_tensor,
            "narrow-range": self.narrow_range,
            "saturation-safe": self.saturation_safe,
        }
        return [word for word, is_given in words.items() if is_given] + [f"-{selector}" for selector in self.off]

    def _rules(self) -> list[Rule]:
        from swin_quant.backends.saturation import SAFE_WEIGHTS
        from swin_quant.quant.policy import Rule

        if self.wprec and self.saturation_safe:
            raise UsageError("--wprec and --saturation-safe both set the bits of weights: give one of them")
        for flag, bits in (("--wprec", self.wprec), ("--aprec", self.aprec)):
            if bits is not None and not 2 <= bits <= 8:
                raise UsageError(f"{flag} {bits}: must be from 2 to 8")
        rules = []
        if self.wprec or self.quant_per_tensor or self.narrow_range:
            granularity = "per-tensor" if self.quant_per_tensor else None
            narrow = self.narrow_range or None
            rules.append(
                Rule(nodes=("role:gemm_weight",), bits=self.wprec, granularity=granularity, narrow_range=narrow)
            )
        if self.saturation_safe:
            rules.append(SAFE_WEIGHTS)
        if self.aprec:
            rules.append(Rule(nodes=("role:activation",), bits=self.aprec))
        if self.off:
            rules.append(Rule(disable=self.off))
        return rules


def config_of(checkpoint: Checkpoint | None, model: ModelOptions, *others: SetsKeys, **more: Any) -> CfgNode:
    """The config: --cfg, else the checkpoint's; then --opts, then single options and `more` keys.

    `checkpoint`: already open, or a path, which is then opened only for this. `more`: keys with `__` for the dot.
    """
    from swin_quant.checkpoint.identify import config_for, config_given
    from swin_quant.config.load import keys_and_values

    overrides = _set_keys(MODEL__RESUME=checkpoint and str(checkpoint), **more) | model.keys()
    for options in others:
        overrides |= options.keys()
    if model.cfg:
        cfg = config_given(model.cfg, checkpoint, model.opts, overrides)
    elif checkpoint:
        cfg = config_for(checkpoint, OTHER_MACHINE | keys_and_values(model.opts) | overrides)
    else:
        raise UsageError("no model: give a CHECKPOINT, or --cfg FILE")
    if model.window and "WINDOW_SIZE" not in architecture(cfg):
        raise UsageError(f"--window {model.window}: {cfg.MODEL.NAME} is no Swin, and has no windows of one size")
    if not 0 <= cfg.SEED < 2**32:
        raise UsageError(f"SEED (--seed) {cfg.SEED}: must be from 0 to {2**32 - 1}")
    return cfg


def opened(checkpoint: str | None) -> OpenedCheckpoint | None:
    """The checkpoint at a path, in a folder, or with a name from timm or Hugging Face's hub; None for none."""
    from swin_quant.checkpoint.opened import open_checkpoint

    return open_checkpoint(checkpoint) if checkpoint else None


def tell_bits(policies: Sequence[Policy]) -> None:
    """Warn about policies with few bits. 7 bits are for export."""
    if few := [policy.name for policy in policies if any(rule.bits and rule.bits < 7 for rule in policy.rules)]:
        log.info(
            "%s: fewer than 8 bits are simulated: ONNX files store such weights as int8 (4 bits also as INT4, by "
            "`export --int4-weights`) and refuse such activations; FasterTransformer refuses both",
            listed(few),
        )


def one_process(world: World, command: str) -> None:
    """UsageError under a launcher of several processes."""
    if world.size > 1:
        raise UsageError(f"{command} runs in one process: start it without torchrun")


def output_dir(output: str | None, cfg: CfgNode) -> Path:
    return Path(output) if output else Path("output") / cfg.MODEL.NAME

"""The flags of main.py: FasterTransformer's (docs/reference, section 2.1), and those of our training and policies."""

import argparse
import inspect
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser

from swin_quant.base.errors import UsageError, did_you_mean
from swin_quant.policies import PolicyChoice
from swin_quant.quant import CALIBRATORS, INT8_MODES
from swin_quant.train.run import Qat, Training

Options = TypeVar("Options", PolicyChoice, Training, Qat)
EXAMPLES = """examples:
  python -m torch.distributed.launch --nproc_per_node 1 --master_port 12345 main.py --calib \\
      --cfg configs/swin/swin_tiny_patch4_window7_224.yaml --resume swin_tiny_patch4_window7_224.pth \\
      --data-path imagenet --num-calib-batch 10 --calib-batchsz 8 --int8-mode 1 --calib-output-path out
  python main.py --eval --cfg configs/swin/swin_tiny_patch4_window7_224.yaml --int8-mode 1 \\
      --resume out/swin_tiny_patch4_window7_224_calib.pth --data-path imagenet --batch-size 64"""
VERSIONS = {1: "swin", 2: "swinv2"}  # values of --version in its guide
_HIDDEN = argparse.SUPPRESS
_LARGEST = 2**31 - 1  # every library can hold whole numbers up to it
# Flag -> its type (a tuple: choices; [str]: several words), help, and its default if it has one.
FLAGS: dict[str, tuple[Any, ...]] = {
    "--calib": (bool, "calibrate, save <NAME>_calib.pth, score it on val"),
    "--train": (bool, "QAT of --resume, or of what --calib made; scored on val"),
    "--eval": (bool, "score --resume on val"),
    "--throughput": (bool, "images/s on the first val batch, then stop"),
    "--cfg": (str, "YAML of the model, or the name of a shipped one"),
    "--opts": ([str], "set keys of the config, as KEY VALUE pairs"),
    "--pretrained": (str, "checkpoint to start from"),
    "--resume": (str, "the checkpoint; auto: go on with the training of the output folder"),
    "--replace-head": (bool, "leave out a head of another number of classes"),
    "--data-path": (str, "train/ and val/, or their zips; digits, csv:FILE, ..."),
    "--zip": (bool, "zips and maps of DIR, though folders lie there"),
    "--cache-mode": (("no", "full", "part"), "zip: keep no, all, or this rank's bytes"),
    "--batch-size": (int, "pictures at a time, a rank (default: DATA.BATCH_SIZE)"),
    "--workers": (int, "processes that load pictures, at most"),
    "--max-unreadable": (float, "end the run when more than this share is unreadable", 0.01),
    "--half": (("auto", "none", "float16", "bfloat16"), "half-precision baseline (default: the device's)", "auto"),
    "--disable_amp": (bool, "no half-precision baseline (= --half none)"),
    "--num-calib-batch": (int, "batches", 4),
    "--calib-batchsz": (int, "pictures a batch", 8),
    "--calib-output-path": (str, "default: DIR/<NAME>/<TAG> of --output"),
    "--calib-split": (str, "pictures to sample (default train)"),
    "--calib-augment": (bool, "FasterTransformer's augmented training crops"),
    "--passes": (str, "what recovers accuracy after the calibration: a recipe or a YAML file"),
    "--calibrator": (CALIBRATORS, "how ranges are found (default: by a node's bits)"),
    "--percentile": (float, "means the percentile calibrator (default 99.99)"),
    "--exact-histogram": (bool, "count every value, not a sample of each picture"),
    "--int8-mode": (tuple(INT8_MODES), "FasterTransformer's modes"),
    "--quant-disable": (bool, "quantize nothing (the policy `float`)"),
    "--quant-disable-keyword": ([str], "switch off nodes with TEXT in their name"),
    "--num-epochs": (int, "epochs"),
    "--qat-lr": (float, "the same as --lr"),
    "--continue": (bool, "go on with the run of the output folder"),
    "--overwrite": (bool, "replace the run that the output folder holds"),
    "--distill": (bool, "learn from a teacher, with FasterTransformer's loss"),
    "--teacher": (str, "float checkpoint of the same classes to learn from (default: the original)"),
    "--amax": (("frozen", "learned", "reestimated"), "amax.mode: how ranges are trained"),
    "--no-eval": (bool, "do not score the result on the val split"),
    "--float": (str, "the float checkpoint that QAT is compared with (default: searched for)"),
    "--output": (str, "results go to DIR/<NAME>/<TAG> (default: output)"),
    "--tag": (str, "default: default"),
    "--device": (("auto", "cpu", "cuda"), "default: a GPU if there is one", "auto"),
    "--seed": (int, "seed of the sample of pictures and of new weights (default: SEED, 0)"),
    "--verbose": (bool, "more messages, and tracebacks of errors"),
    "--quiet": (bool, "only results, warnings and errors"),
    "--local_rank": (int, _HIDDEN),
    "--engine": (str, _HIDDEN),
    "--fused_window_process": (bool, _HIDDEN),
    "--fuse-qkv": (bool, _HIDDEN),
    "--version": (tuple(VERSIONS), _HIDDEN),
    "--quant-mode": (("ft1", "ft2", "ft3", "trt"), _HIDDEN),
}
RENAMED = {"distill_weight": "--distillation_loss_scale"}  # a field of ours with its name
# Fields of messages whose flag here is not called like them.
FIELDS = {"batch": "--batch-size", "epochs": "--num-epochs", "exact": "--exact-histogram", "checkpoint": "--resume",
          "pictures": "--num-calib-batch times --calib-batchsz", "off": "--off or --quant-disable-keyword"}  # fmt: skip
TRAINING = ("num_epochs", "continue", "overwrite", "distill", "teacher", "amax", "qat_lr")  # for --train alone


class FrontDoorParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which takes no abbreviated flags."""

    def __init__(self) -> None:
        super().__init__(
            prog="main.py",
            description="FasterTransformer's front door: --calib, --train, --eval and --throughput, alone or together.",
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--help-all", action="help", help="the same as --help")
        for flag, (kind, help, *default) in FLAGS.items():
            spellings = (flag, "--local-rank") if flag == "--local_rank" else (flag,)
            self._add(spellings, flag.strip("-").replace("-", "_"), kind, help, *default)
        for options in (PolicyChoice, Training, Qat):
            notes = docstring_parser.parse(inspect.cleandoc(options.__doc__ or "")).params
            helps = {note.arg_name: " ".join((note.description or "").split()) for note in notes}
            hints = get_type_hints(options)
            for field in fields(options):
                flag = RENAMED.get(field.name, f"--{field.name.replace('_', '-')}")
                self._add((flag,), field.name, _get_kind(hints[field.name]), helps[field.name])
        self.words = {action.dest: action.option_strings[0] for action in self._actions} | FIELDS

    def _add(self, flags: Sequence[str], dest: str, kind: Any, help: str, default: Any = None) -> None:
        told = f"{help} (default {default})" if default is not None and "default" not in help else help
        how: dict[str, Any] = {"dest": dest, "help": told.replace("%", "%%")}
        if kind is bool:
            self.add_argument(*flags, action="store_true", **how)
        elif isinstance(kind, list):
            self.add_argument(*flags, action="extend", nargs="+", type=_text, default=[], **how)
        elif isinstance(kind, tuple):
            self.add_argument(*flags, type=type(kind[0]), choices=kind, default=default, **how)
        else:
            parse: Any = {int: _whole, str: _text, float: float}[kind]
            self.add_argument(*flags, type=parse, default=default, **how)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The values of the flags. UsageError for arguments that cannot be parsed."""
        for word in arguments:
            if re.fullmatch(r"--[\w-]+=--", word):  # argparse turns it into an empty list
                self.error(f"argument {word[:-3]}: expected one argument")
        args = self.parse_args(arguments)
        if args.cfg is None:
            self.error("the following arguments are required: --cfg")
        return args

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="")  # argparse would hide that it cannot be written

    def error(self, message: str) -> NoReturn:
        near = ""
        if flag := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            near = did_you_mean(flag[1], self._option_string_actions)
        elif value := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            near = did_you_mean(value[1], re.findall(r"[\w-]+", value[2]))
        raise UsageError(f"{message}{near}; see main.py --help")


def options_from(args: argparse.Namespace, kind: type[Options]) -> Options:
    """The dataclass with the values of a command line."""
    read = {field.name: getattr(args, field.name) for field in fields(kind)}
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}
    return kind(**given)


def _get_kind(hint: Any) -> Any:
    """A field's type as in FLAGS."""
    plain = next(one for one in get_args(hint) if one is not type(None)) if type(None) in get_args(hint) else hint
    if get_origin(plain) is Literal:
        return get_args(plain)
    return [str] if get_origin(plain) is tuple else plain


def _whole(text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?\d+(_\d+)*\s*", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number")
    if abs(number := int(text)) > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is beyond {_LARGEST}")
    return number


def _text(text: str) -> str:
    """The text with a home folder for a leading ~, which shells leave in `--data-path=~/folder`."""
    return os.path.expanduser(text) if text.startswith("~/") else text

"""One run of one command: parse, join the other ranks, and turn whatever goes wrong into one line and an exit code."""

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from termcolor import colored

from swin_quant.cli import COMMANDS
from swin_quant.errors import SwinQuantError, UsageError

FRONT_DOOR = "fastertransformer"  # main.py: not listed among the commands
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and which takes no abbreviated flags."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Run command `name`; errors are printed, never raised. `--verbose` adds their traceback."""
    verbose = "--verbose" in arguments
    try:
        signal.signal(signal.SIGTERM, _as_interrupt)
        _run(name, arguments)
        sys.stdout.flush()
        return 0
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as stop:
        _complain(f"interrupted; {stop.args[0] if stop.args else 'nothing half-written is left'}", verbose)
        return INTERRUPTED
    except SwinQuantError as error:
        _complain(str(error), verbose)
        return error.exit_code
    except MemoryError:
        _complain("out of memory: lower --batch-size or --calib-batchsz", verbose)
        return 1
    except Exception as error:  # noqa: BLE001
        if type(error).__name__ == "OutOfMemoryError":
            _complain("out of GPU memory: lower --batch-size or --calib-batchsz", verbose)
        else:
            hint = "" if verbose else "; this is a bug of swin-quant: --verbose shows where"
            _complain(f"{type(error).__name__}: {error}{hint}", verbose)
        return 1


def command_of(name: str) -> ModuleType:
    """The module of a command: HELP, EXAMPLES, `add_arguments(parser)` and `run(args, world)`."""
    if name not in (*COMMANDS, FRONT_DOOR):
        raise UsageError(f"no command {name!r}: there are {', '.join(COMMANDS)}")
    return importlib.import_module(f"swin_quant.cli.{name.replace('-', '_')}")


def parser_of(name: str, command: ModuleType) -> argparse.ArgumentParser:
    """What parses the arguments of a command."""
    parser = _Parser(
        prog="main.py" if name == FRONT_DOOR else f"swin-quant {name}",
        description=command.HELP,
        epilog=command.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="more messages, and tracebacks of errors")
    parser.add_argument("--quiet", action="store_true", help="only results, warnings and errors")
    return parser


def _run(name: str, arguments: Sequence[str]) -> None:
    command = command_of(name)
    args = parser_of(name, command).parse_args(arguments)

    from swin_quant import progress
    from swin_quant.distributed import process_group, rank_of_launcher

    progress.set_up(args.verbose, args.quiet, rank_of_launcher())
    with process_group(getattr(args, "device", "cpu"), getattr(args, "local_rank", None)) as world:
        command.run(args, world)
        sys.stdout.flush()  # what is printed is out before this rank waits for the others


def _as_interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _complain(message: str, verbose: bool) -> None:
    if verbose and sys.exc_info()[0] is not None:
        traceback.print_exc()
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    line = " ".join(message.split())
    print(colored(f"error{where}:", "red", attrs=["bold"], force_color=None), line, file=sys.stderr, flush=True)

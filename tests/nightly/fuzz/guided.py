"""The attack by coverage: `python tests/nightly/fuzz/guided.py --seconds 60 [--parser NAME]`, with atheris.

Atheris changes one file of a valid case, and keeps changes that reach new code. Faults are other exceptions than a
one-line error, 2 s for one case, and 2 GB. A case with a fault is stored in `--keep`, for `--replay FILE`.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command line, before torch is imported

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed: passed over")

_TRIES = bool({"--libfuzzer", "--replay"} & set(sys.argv))  # runs in this process, not in children

with atheris.instrument_imports(include=["swin_quant"]) if _TRIES else contextlib.nullcontext():
    from parsers import PARSERS

import logging  # noqa: E402

import torch  # noqa: E402
from mutations import Files  # noqa: E402
from runner import write  # noqa: E402

from swin_quant.base.errors import SwinQuantError  # noqa: E402

_MEGABYTES = 2048  # of the process, with torch and all that is loaded once


def places(valid: list[Files]) -> list[tuple[Files, str]]:
    """Every file that can be changed, with its case: the first byte of an input selects one."""
    return [(files, name) for files in valid for name in files][:256]


def seeds(valid: list[Files], folder: Path) -> None:
    for number, (files, name) in enumerate(places(valid)):
        (folder / f"valid{number}").write_bytes(bytes([number]) + files[name])


def fuzz(name: str, options: list[str]) -> None:
    """Attack one parser; libFuzzer's `options`. Never returns."""
    parser = next(each for each in PARSERS if each.name == name)
    known = places(parser.valid())
    folder = Path(tempfile.mkdtemp(prefix="guided"))
    logging.disable()

    def parse(files: Files) -> None:
        shutil.rmtree(folder / "case", ignore_errors=True)
        write(files, folder / "case")
        parser.parse(folder / "case")

    def one(data: bytes) -> None:
        files, changed = known[data[0] % len(known) if data else 0]
        try:
            parse({**files, changed: data[1:]})
        except SwinQuantError as error:
            assert str(error).isprintable(), f"its message is no line of text: {str(error)[:300]!a}"

    os.chdir(folder)
    for files, _ in known:  # load now what is loaded once
        parse(files)
    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parser", action="append", choices=[each.name for each in PARSERS], help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each parser")
    parser.add_argument("--keep", type=Path, default=Path("out/fuzz"), help="folder for cases that make a fault")
    parser.add_argument("--replay", type=Path, help="such a case; with one --parser")
    parser.add_argument("--libfuzzer", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # in a separate process
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = args.parser or [each.name for each in PARSERS]
    if args.libfuzzer or args.replay:
        fuzz(chosen[0], args.libfuzzer or [str(args.replay.resolve())])
    faults = 0
    for name in chosen:
        kept = args.keep.resolve() / name.replace(" ", "_")
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as corpus:
            seeds(next(each for each in PARSERS if each.name == name).valid(), Path(corpus))
            limits = ["-timeout=2", f"-rss_limit_mb={_MEGABYTES}", f"-max_total_time={args.seconds}"]
            options = [corpus, f"-artifact_prefix={kept}/", *limits, "-len_control=0", "-max_len=1000000"]
            command = [sys.executable, __file__, "--parser", name, "--libfuzzer", *options]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        said = [line for line in done.stderr.splitlines() if re.match(r"#\d+", line)]
        faults += bool(done.returncode)
        print(f"{name}: {said[-1] if said else 'no case'}", flush=True)
        if done.returncode:
            print(*done.stderr.splitlines()[-25:], sep="\n", flush=True)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())

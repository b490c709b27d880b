"""Operators that become nodes of a user's own domain: the calls that qualify, with their inputs and attributes.

They are for compilers that lack an operator or have a better one. For other engines the file has an ONNX function with
the node's name (`backends/onnx/functions.py`). The C++ of an operator is compiled at first use, once for a user. The
library runs as code: the folder must belong to the user alone. Its name has a hash of the sources and the platform, and
a record beside it has its own hash.
"""

import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, wrap_torch_function

from swin_quant.base.errors import SwinQuantError, UsageError, offered, one_line
from swin_quant.base.files import compute_sha256, one_at_a_time, read_json, reason, write_json
from swin_quant.base.progress import log
from swin_quant.operators.trace import operator_name

_TAKEN = ("ai.onnx", "ai.onnx.ml", "ai.onnx.training", "com.microsoft", "com.microsoft.nchwc", "pkg", "local")
_SPEC = re.compile(r"(\w+)=([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)::([A-Za-z_]\w*)")
_COMPILERS = ("g++", "c++", "clang++")
_SECONDS = 600


@dataclass(frozen=True)
class Node:
    """A node to write: inputs, attributes (numbers, truth values, and several numbers), and the shape of its output."""

    inputs: tuple[Tensor, ...]
    attributes: Mapping[str, Any]
    shape: tuple[Any, ...]


def _roll(x: Tensor, shifts: Any, dims: Any = None) -> Node | None:
    if dims is None or dims == ():
        return None
    shifts, dims = ([value] if isinstance(value, int) else list(value) for value in (shifts, dims))
    return Node((x,), {"shifts": shifts, "dims": [dim % x.dim() for dim in dims]}, tuple(x.shape))


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Node | None:
    if weight is None or bias is None:
        return None
    return Node((x, weight, bias), {"axis": -len(normalized_shape), "epsilon": eps}, tuple(x.shape))


def _attention(levels: Tensor, constant: Tensor, heads: int, scales: Sequence[float]) -> Node:
    *tokens, channels = levels.shape
    return Node((levels, constant), {"heads": heads, "scales": scales}, (*tokens, channels // 3))


def _keep_shape(x: Tensor, *constants: Tensor, **attributes: Any) -> Node:
    return Node((x, *constants), attributes, tuple(x.shape))


def _patch_merging(x: Tensor, *constants: Tensor, **attributes: Any) -> Node:
    return Node((x, *constants), attributes, (*_merged(x, 1, 2, constants[7:], 4), constants[4].shape[1]))


def _patch_embedding(x: Tensor, *constants: Tensor, **attributes: Any) -> Node:
    weight = constants[0]
    return Node((x, *constants), attributes, (*_merged(x, 2, weight.shape[-1], constants[4:]), len(weight)))


def _merged(x: Tensor, first: int, side: int, places: Sequence[Tensor], each: int = 1) -> tuple[Any, ...]:
    """Batch and tokens, `each` of so many places; without places, height and width of a map: those of x, its
    dimensions from `first` on, by `side`."""
    if places:
        return x.shape[0], len(places[0]) // each
    return x.shape[0], *((size + side - 1) // side for size in x.shape[first : first + 2])


CALLS: dict[str, Callable[..., Node | None]] = {
    "roll": _roll,
    "relu": lambda x, inplace=False: Node((x,), {}, tuple(x.shape)),
    "layer_norm": _layer_norm,
    "attention": _attention,
    **dict.fromkeys(("attention_branch", "map_branch", "token_branch", "mlp"), _keep_shape),
    "patch_merging": _patch_merging,
    "patch_embedding": _patch_embedding,
}
# What OpenVINO's compiled attention is fast for (plugins/openvino/attention_fast.hpp)
FAST_DEPTH = 32  # channels of a head
FAST_TOKENS = {"attention": 64, "attention_branch": 576}  # of a window, at most
FAST_HEADS = {32: 576, 64: 1024}  # channels of a head -> tokens of a picture that is one window, at most


def plugged(operator: str) -> Callable[..., Tensor]:
    """The function whose calls `Plugging` writes as nodes of this operator; its result has a shape and no values."""

    def call(x: Tensor, *inputs: Any, **attributes: Any) -> Tensor:
        return x.new_zeros(CALLS[operator](x, *inputs, **attributes).shape)  # type: ignore[union-attr]

    call.__name__ = operator
    return wrap_torch_function(lambda *inputs, **_: inputs)(call)


@dataclass(frozen=True)
class Plugin:
    """An operator, and the domain and name of its node."""

    operator: str
    domain: str
    name: str


def parse_plugins(specs: Sequence[str], replaced: Sequence[str] = ()) -> dict[str, Plugin]:
    """Plugins by operator, from specs such as `roll=my.domain::Roll`. UsageError for a malformed, unknown or clashing
    spec."""
    found: dict[str, Plugin] = {}
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if not match:
            raise UsageError(f"‹plugin› {spec!r:.80}: must be OPERATOR=DOMAIN::NAME, as roll=my.domain::Roll")
        plugin = Plugin(*match.groups())
        if plugin.operator not in CALLS:
            raise UsageError(f"‹plugin› {plugin.operator!r:.60}{offered(plugin.operator, CALLS)}")
        if plugin.operator in found:
            raise UsageError(f"‹plugin› {plugin.operator}: is named twice")
        if plugin.operator in replaced:
            raise UsageError(f"‹plugin› {plugin.operator}: is replaced as well: leave it out of ‹replace›")
        if plugin.domain.split(".")[0] in ("pkg", "local") or plugin.domain in _TAKEN:
            raise UsageError(f"‹plugin› {spec}: the domain {plugin.domain} is not yours: choose another")
        taken = {(one.domain, one.name): one.operator for one in found.values()}
        if clash := taken.get((plugin.domain, plugin.name)):
            raise UsageError(f"‹plugin› {spec}: {clash} is {plugin.domain}::{plugin.name} already")
        found[plugin.operator] = plugin
    return found


def symbolic(plugin: Plugin, node: Node) -> Tensor:
    """A tensor with a shape and no values, which torch's ONNX exporter writes as a node of the plugin's domain."""
    plain = {name: list(one) if isinstance(one, tuple) else one for name, one in node.attributes.items()}
    return torch.onnx.ops.symbolic(
        f"{plugin.domain}::{plugin.name}",
        node.inputs,
        {name: int(one) if isinstance(one, bool) else one for name, one in plain.items()},
        dtype=node.inputs[0].dtype,
        shape=node.shape,
        version=1,
    )


class Plugging(TorchFunctionMode):
    """Inside the context, `make` replaces the calls that plugins take; `done` counts them, `nodes` holds them."""

    def __init__(self, plugins: Mapping[str, Plugin], make: Callable[[Plugin, Node], Tensor] = symbolic) -> None:
        super().__init__()
        self.plugins, self.make = plugins, make
        self.done: Counter[str] = Counter()
        self.nodes: list[tuple[Plugin, Node]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = operator_name(func, args)
        if op in self.plugins and (node := CALLS[op](*args, **kwargs)):
            self.done[op] += 1
            self.nodes.append((self.plugins[op], node))
            made, name = self.make(self.plugins[op], node), getattr(func, "__name__", "")
            # `relu_`, or `relu(x, inplace=True)`, changes x itself.
            in_place = name.endswith("_") and not name.startswith("_")
            in_place = in_place or kwargs.get("inplace", name == "relu" and any(args[1:2]))
            return args[0].copy_(made) if in_place else made
        return func(*args, **kwargs)


def compiled(sources: Path, what: str, built_for: Mapping[str, str]) -> Path:
    """The library that `build.sh` in `sources` builds and `selftest.py` there has tested.

    `what`: its content, for messages. `built_for`: versions and instructions that it holds for, which the script finds
    in its environment. SwinQuantError says in one line why there is none.
    """
    files = sorted(file for file in sources.iterdir() if file.suffix in (".cpp", ".hpp", ".sh", ".py"))
    digest = hashlib.sha256("\0".join(f"{name}={value}" for name, value in built_for.items()).encode())
    for file in files:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    folder = own_folder()
    library = folder / f"{sources.name}-{digest.hexdigest()[:24]}.so"
    if not _is_whole(library):
        with one_at_a_time(folder):  # a process that waited finds it built
            if not _is_whole(library):
                if library.exists():
                    log.warning("%s: is not the library that was built there: it is built again", library)
                _build(sources, library, what, built_for)
    return library


def own_folder() -> Path:
    """The user's folder of libraries, made with mode 0700. SwinQuantError if others can write to it or above it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "swin-quant" / "operators"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise SwinQuantError(f"{folder}: {reason(error)}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SwinQuantError(f"{folder}: is not a folder of yours: move it away")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise SwinQuantError(f"{folder}: others have access: `chmod 700` it if what lies in it is yours, or remove it")
    for parent in {*folder.absolute().parents, *folder.resolve().parents}:  # a new name there puts another one in place
        above = parent.lstat()
        if above.st_uid not in (0, os.geteuid()):
            raise SwinQuantError(f"{folder}: {parent} belongs to another user: set XDG_CACHE_HOME to a folder of yours")
        if _others_write(above) and not above.st_mode & stat.S_ISVTX and not stat.S_ISLNK(above.st_mode):
            raise SwinQuantError(f"{folder}: others can write to {parent}: `chmod go-w` it, or set XDG_CACHE_HOME")
    return folder


def _others_write(found: os.stat_result) -> bool:
    """Whether other users can write to a file or folder. A group with the number of its owner is the owner's alone."""
    shared = found.st_mode & stat.S_IWGRP and found.st_gid != found.st_uid
    return bool(shared or found.st_mode & stat.S_IWOTH)


def compiler() -> str:
    """The C++ compiler's command: CXX, else the first that is installed. SwinQuantError if there is none."""
    command = os.environ.get("CXX", "").split()
    if command and not shutil.which(command[0]):
        raise SwinQuantError(f"CXX is {' '.join(command)}, which is not installed")
    found = " ".join(command) or next(filter(shutil.which, _COMPILERS), None)
    if not found:
        raise SwinQuantError("no C++ compiler is installed")
    return found


def _is_whole(library: Path) -> bool:
    """Whether a library is there as it was built.

    SwinQuantError if others may have put it or its record there, or if it failed its self-test: it stays refused.
    """
    if (failed := library.with_suffix(".failed")).exists():
        raise SwinQuantError(f"its self-test failed before (remove {failed} to try again)")
    record = library.with_suffix(".json")
    for file in (library, record):
        try:
            found = file.lstat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise SwinQuantError(f"{file}: {reason(error)}") from error
        if not stat.S_ISREG(found.st_mode):
            raise SwinQuantError(f"{file}: is a link, or no file: remove it, and it is built again")
        if found.st_uid != os.geteuid():
            raise SwinQuantError(f"{file}: belongs to another user: remove it, and it is built again")
        if _others_write(found):
            raise SwinQuantError(f"{file}: others can write to it: remove it, and it is built again")
    try:
        return bool(compute_sha256(library) == read_json(record, "record of a library")["sha256"])
    except (SwinQuantError, TypeError, KeyError):
        return False


def _build(sources: Path, library: Path, what: str, built_for: Mapping[str, str]) -> None:
    """Build and test a library, then move it to its place."""
    command, start = compiler(), time.monotonic()
    try:
        made = Path(tempfile.mkdtemp(dir=library.parent))
    except OSError as error:
        raise SwinQuantError(f"{library.parent}: {reason(error)}") from error
    try:
        environment = os.environ | built_for | {"CXX": command, "PYTHON": sys.executable}
        if failure := _failure(["sh", str(sources / "build.sh"), str(made)], environment):
            raise SwinQuantError(f"{command} fails: {failure}")
        (built,) = made.glob("*.so")
        if failure := _failure([sys.executable, str(sources / "selftest.py"), str(built)], dict(os.environ)):
            library.with_suffix(".failed").write_text(f"{failure}\n")
            raise SwinQuantError(f"its self-test failed: {failure}")
        built.chmod(0o700)
        write_json(library.with_suffix(".json"), {"sha256": compute_sha256(built)})
        library.with_suffix(".json").chmod(0o600)
        built.replace(library)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else "its build wrote no library"
        raise SwinQuantError(f"{library.parent}: {why}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    log.info("%s: compiled for this CPU in %.0f s, once: %s", what, time.monotonic() - start, library)


def _failure(command: Sequence[str], environment: dict[str, str]) -> str | None:
    """The line that says why a program fails: its first error, else its last line. None if it succeeds."""
    pipe = subprocess.PIPE
    with subprocess.Popen(  # a session of its own, since a compiler starts further processes
        command, env=environment, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=_SECONDS)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return f"it took more than {_SECONDS} s"
            raise
    if process.returncode == 0:
        return None
    lines = [line.strip() for line in (errors or output).splitlines() if line.strip()]
    chosen = [line for line in lines if " error: " in line] or lines[-1:]
    return one_line(chosen[0])[:200] if chosen else f"it ended with {process.returncode}"

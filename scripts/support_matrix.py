"""Write docs/support.md, which model runs where under which policy by the code's own limits, and README's backends.

python scripts/support_matrix.py
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from swin_quant.backends.artifact import apply_for_engine
from swin_quant.backends.backend import Backend, OnnxTarget, function
from swin_quant.backends.executorch.export import FAULTS
from swin_quant.backends.fastertransformer.limits import check_limits, find_int8_mode, list_warnings
from swin_quant.backends.fastertransformer.slots import Case
from swin_quant.backends.onnx.export import choose_nodes
from swin_quant.backends.onnx.options import OnnxOptions
from swin_quant.backends.registry import backends
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import configs_dir
from swin_quant.cards.card import RunCard
from swin_quant.config import load_config
from swin_quant.config.load import shipped_configs
from swin_quant.models import build_model
from swin_quant.models.geometry import Geometry, read_geometry
from swin_quant.quant.policy import Policy, builtin_policies, load_policy
from swin_quant.quant.quantizer import named_nodes

SMS = {70: "V100", 75: "T4", 80: "A100", 86: "A10, RTX 30", 89: "L4, RTX 40", 90: "H100, H200"}
MODES = {1: "ft-mode1", 2: "ft-mode2"}
HEAD = """# What runs where

```bash
swin-quant show policies    # the first two tables
```

The tables list what the commands accept and refuse; [results](results/README.md) lists what was measured, and
[devices](devices.md) what was tested on which device. For policy, AMX, VNNI, Q/DQ and zero point see the
[glossary](glossary.md). `python scripts/support_matrix.py` writes this page from the checks in the code.

"""

ROOT = Path(__file__).resolve().parents[1]
_COMPILED = "[compiled operator](docs/custom_operators.md#window-attention-and-mlp-compiled)"
_FIRST = ["openvino", "onnxruntime", "onnx"]  # the targets that run on any CPU


# Parts of a message: its source, and the nodes of the small model.
_DETAILS = (
    r"the model: |^policy \S+: |; it differs in.*|(, and policy | of policy |, and layers).*"
    r"|(?<=has no zero points): .*|(?<= has no float8): .*|(?<=than 8 bits): .*|(?<=float8 fake-quantize): .*"
    r"|(?<=int8 by int8): .*|, which the policy has at .*"
)


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join([*described(), "", *policies_by_backend(), "", *fastertransformer(), "", *engines()]) + "\n"


def described() -> Iterator[str]:
    """Each built-in policy in the words of its file."""
    yield "## Policies\n"
    policies = (load_policy(name) for name in builtin_policies())
    rows = [[f"`{one.name}`", re.sub(r"docs/(\S+)\.md", r"[\1](\1.md)", one.description)] for one in policies]
    yield from table(["policy", "target, and what is quantized"], rows)


def policies_by_backend() -> Iterator[str]:
    """Each built-in policy on each target of `export`, by the target's own checks of a small V1."""
    targets = {name: one for name, one in backends().items() if one.exports}
    small = {"MODEL.SWIN.DEPTHS": [1, 1], "MODEL.SWIN.NUM_HEADS": [1, 2]}  # two stages show all that a policy names
    model = build_model(load_config(configs_dir() / "demo" / "swin_digits.yaml", overrides=small))
    for node in named_nodes(model).values():
        node.amax, node.bounds = 1.0, (-1.0, 1.0)
    yield "## Policies by target of `export`\n"
    yield "best: made for the target; yes: accepted; no: refused (reasons below); as INT4: only with `--int4-weights`."
    yield ""
    said: dict[str, None] = {}
    policies = [load_policy(name) for name in builtin_policies() if name != "float"]
    rows = [[f"`{one.name}`", *(_taken(model, one, target, said) for target in targets.values())] for one in policies]
    yield from table(["policy", *targets], rows)
    yield ""
    yield from (f"{number}. {text}" for number, text in enumerate(said, 1))


def _taken(model: nn.Module, policy: Policy, backend: Backend, said: dict[str, None]) -> str:
    exports = backend.exporting
    is_listed = policy.name in exports.policies[: len(exports.policies) if exports.only else 1]
    try:
        if isinstance(exports.detail, OnnxTarget):
            return "best" if is_listed else _onnx(model, policy, exports.detail)
        if backend.name == "fastertransformer":
            find_int8_mode(model, policy)
        elif backend.name == "executorch":  # an export takes a quarter of a minute
            apply_for_engine(model, RunCard("the model", {}, {}, policy=policy.to_dict()), "int8", "XNNPACK", FAULTS)
        else:
            _write(model, policy, backend)
    except SwinQuantError as error:
        text = re.sub(_DETAILS, "", str(error))
        return f"no {_numbers([text], said)}"
    return "best" if is_listed else "yes"


def _write(model: nn.Module, policy: Policy, backend: Backend) -> None:
    """Export it: the export refuses what it cannot write."""
    card = RunCard("the model", {}, {}, policy=policy.to_dict())
    with TemporaryDirectory() as folder:
        function(backend.exporting.export)(model, card, Path(folder), function(backend.exporting.options)())


def _onnx(model: nn.Module, policy: Policy, target: OnnxTarget) -> str:
    card = RunCard("the model", {}, {}, policy=policy.to_dict())
    try:
        choose_nodes(model, card, OnnxOptions(target=target.name))
    except SwinQuantError:
        if not target.int4:
            raise
        choose_nodes(model, card, OnnxOptions(target=target.name, int4_weights=True))
        return "as INT4"
    return "yes"


def fastertransformer() -> Iterator[str]:
    """Model, window and mode by GPU generation, from the limits of its kernels."""
    yield "## FasterTransformer: model and mode by GPU generation\n"
    yield "Form of attention in the kernels, at batch 128. no: refused (reasons below). sm: compute capability.\n"
    said: dict[str, None] = {}
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, file in shipped_configs().items():
        cfg = load_config(file)
        if "digits" in name or cfg.MODEL.TYPE not in ("swin", "swinv2"):
            continue
        g, version = read_geometry(cfg), 2 if cfg.MODEL.TYPE == "swinv2" else 1
        kind = f"V{version} {re.split('_', name)[1]}"
        for mode, policy in MODES.items():
            cells = tuple(_cell(g, version, sm, mode, said) for sm in SMS)
            lines.setdefault((f"window {g.window}, {g.image_size} px", policy, *cells), []).append(kind)
    policies: dict[tuple[str, ...], list[str]] = {}
    for (window, policy, *cells), kinds in lines.items():
        policies.setdefault((", ".join(dict.fromkeys(kinds)), window, *cells), []).append(f"`{policy}`")
    rows = [[models, window, ", ".join(modes), *cells] for (models, window, *cells), modes in policies.items()]
    yield from table(["model", "window", "policy", *(f"sm {sm} ({gpu})" for sm, gpu in SMS.items())], sorted(rows))
    yield ""
    yield from (f"{number}. {text}" for number, text in enumerate(said, 1))


def _cell(g: Geometry, version: int, sm: int, mode: int, said: dict[str, None]) -> str:
    """`no` or whether attention is fused, and the numbers of its notes."""
    case = Case(g, version, "int8", sm, int8_mode=mode)
    try:
        check_limits(case)
    except UsageError as error:
        return f"no {_numbers([str(error).partition(': ')[2]], said)}"
    fused = "fused" if case.fused else "unfused"
    return f"{fused} {_numbers(list_warnings(case), said)}".strip()


def _numbers(texts: Iterable[str], said: dict[str, None]) -> str:
    """A number for each sentence; sentences that differ only by GPU are one."""
    marks = []
    for text in texts:
        text = re.sub(r"^sm \d+\b", "this GPU", re.sub(r"\bon sm \d+", "on this GPU", text))
        general = re.sub(r"‹(\w+)›", lambda field: f"`--{field[1].replace('_', '-')}`", text)
        said.setdefault(general)
        marks.append(str(list(said).index(general) + 1))
    return f"({', '.join(marks)})" if marks else ""


def engines() -> Iterator[str]:
    """The artifacts and devices of each engine."""
    yield "## Engines\n"
    rows = []
    for name, backend in backends().items():
        if backend.load:
            home = {"cuda": "NVIDIA GPU", "cpu": "CPU"}.get(backend.home or "", "CPU or GPU, as torch")
            home = "NVIDIA GPU; slowly on a CPU" if backend.fast_on == "cuda" else home
            saturation = "on CPUs without VNNI" if backend.saturation else "no"
            needs = f"`{backend.needs[0]}`" if backend.needs else "-"
            emulated = "simulated" if backend.emulates else "real"
            rows.append([name, ", ".join(backend.runs), home, needs, emulated, saturation])
    yield from table(["engine", "runs files of", "on", "needs", "latency", "int8 products overflow"], rows)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A pipe table of Markdown."""
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def readme(text: str) -> str:
    """README with the table of the targets of `export` as the code describes them."""
    begin, end = text.index("## Backends\n") + len("## Backends\n\n"), text.index("\n\n[What runs where]")
    rows = [
        [f"`{name}`", one.writes, one.runs_on] for name, one in sorted(backends().items(), key=_order) if one.exports
    ]
    written = "\n".join(table(["`export --for`", "what is written", "runs on"], rows))
    return text[:begin] + written.replace("compiled operator", _COMPILED) + text[end:]


def _order(entry: tuple[str, Backend]) -> int:
    return _FIRST.index(entry[0]) if entry[0] in _FIRST else len(_FIRST)


if __name__ == "__main__":
    (ROOT / "docs" / "support.md").write_text(page(), encoding="utf-8")
    (ROOT / "README.md").write_text(readme((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")

"""The page of cpu_engines.py: docs/results/cpu_engines.json holds its runs, and this renders them, a column a machine.

    python benchmarks/cpu_page.py

`plugins/openvino/measured.yaml`, by which files for OpenVINO get compiled operators, is written from the same runs.
"""

import json
from typing import Any

from pages import RESULTS, ROOT, join_cells

from swin_quant.backends.openvino.operators import KINDS
from swin_quant.base.files import atomic_write_bytes

DATA = RESULTS / "cpu_engines.json"
PAGE = DATA.with_suffix(".md")
MEASURED = ROOT / "plugins" / "openvino" / "measured.yaml"
NNCF = "openvino int8 NNCF"
PLAIN = tuple(f"openvino int8 {policy}, ours +bfloat16" for policy in ("cpu", "cpu-amx", "qdq"))
# The file with operators that is written by default, and its likeness in runs from before that policy.
COMPILED = tuple(f"openvino int8 {policy}, ours +bfloat16, compiled attention" for policy in ("cpu-operators", "cuda"))
ATTENTION = "attention", PLAIN, COMPILED
# The rows of a run of the operators one by one.
OPERATORS = (
    "our plain file",
    "with compiled attention",
    "with compiled attention and MLP",
    "with both branches compiled",
    "with branches and merging compiled",
    "with patch embedding compiled, too",
)
# The same of a model of timm.
OPERATORS_OF_ANY = OPERATORS[0], "with compiled MLP", "with both branches compiled"
STEPS_OF_ANY = {"mlp": OPERATORS_OF_ANY[:2], "token_branch": OPERATORS_OF_ANY[1:]}
STEPS = {
    "mlp": OPERATORS[1:3],
    "attention_branch": OPERATORS[2:4],
    "patch_merging": OPERATORS[3:5],
    "patch_embedding": OPERATORS[4:],
}  # operator -> the rows without and with it
ARCHITECTURES = {"swin_tiny_patch4_window7_224": "swin", "swinv2_tiny_patch4_window8_256": "swinv2",
                 "timm:deit_small_patch16_224": "vit"}  # fmt: skip

Run = dict[str, Any]


def record(run: Run) -> None:
    """Put a run in the place of an earlier one of its model and machine, and render everything anew."""
    runs = [one for one in read() if _key(one) != _key(run)] + [run]
    lines = []
    for one in sorted(runs, key=_key):
        head = json.dumps({key: value for key, value in one.items() if key != "rows"})
        rows = ",\n  ".join(json.dumps(row) for row in one["rows"])
        lines.append(f'{head[:-1]}, "rows": [\n  {rows}]}}')
    atomic_write_bytes(DATA, "[\n{}\n]\n".format(",\n".join(lines)).encode())
    render()


def read() -> list[Run]:
    """All runs."""
    return json.loads(DATA.read_text()) if DATA.exists() else []


def render() -> None:
    """Write the page and the table of measured gains."""
    runs = read()
    atomic_write_bytes(PAGE, page(runs).encode())
    atomic_write_bytes(MEASURED, measured(runs).encode())


def page(runs: list[Run]) -> str:
    """Markdown: a table for each model and batch, then the machines."""
    parts = [
        "# Swin on CPU engines\n\n"
        "Latency of our files beside float, NNCF, ONNX Runtime's own quantization and PyTorch's own ways. Each model "
        "and machine is one interleaved run. Weights are random and pictures are noise: latencies are real, accuracies "
        "would mean nothing; SQNR says what the arithmetic loses. [cpu_engines.json](cpu_engines.json) has peak "
        "memory, file sizes and the 90th percentile, too.\n\n"
        "*ms*: the median of a batch. *x*: how many times as fast as the faster of NNCF's two files in the same run. "
        "*dB*: the least SQNR of the logits on these machines, relative to the float model.\n"
    ]
    whole = [run for run in runs if not _compares_operators(run)]
    for model in dict.fromkeys(run["model"] for run in whole):
        own = [run for run in whole if run["model"] == model]
        for batch in sorted({row["batch"] for run in own for row in run["rows"]}):
            parts.append(f"\n## {model}, batch {batch}\n\n{_table(own, batch)}")
    steps = [run for run in runs if _compares_operators(run)]
    if any_model := [run for run in steps if run.get("cpu_time")]:
        parts.append(f"\n## Compiled branches of models of timm, CPU ms a batch\n\n{_tabulate_any(any_model)}")
    if steps := [run for run in steps if not run.get("cpu_time")]:
        parts.append(f"\n## Compiled operators one by one, ms a batch\n\n{_one_by_one(steps)}")
    parts.append("\n## The runs\n\n" + "\n".join(_circumstances(run) for run in runs) + "\n")
    return "".join(parts)


def measured(runs: list[Run]) -> str:
    """YAML: ms without and with each operator, by kind of CPU, operator, architecture and batch.

    Where machines of a kind were measured, the one that gains least counts.
    """
    found: dict[str, dict[str, dict[str, dict[int, tuple[float, float]]]]] = {}
    for run in runs:
        if run["model"] not in ARCHITECTURES or run["without_amx"]:  # a CPU of that kind counts, not an imitated one
            continue
        own = STEPS_OF_ANY if ARCHITECTURES[run["model"]] == "vit" else STEPS
        steps_of = {"map_branch": OPERATORS[::3]} if run.get("size") else own
        steps = [(name, (without,), (with_,)) for name, (without, with_) in steps_of.items()]
        if run.get("limit") and not run.get("size"):  # only operators one by one
            steps.append(("attention", OPERATORS[:1], OPERATORS[1:2]))
        kind = found.setdefault(next(kind for name, kind in KINDS.items() if name in run["int8"]), {})
        plain_run = [] if ARCHITECTURES[run["model"]] == "vit" else [ATTENTION]
        for operator, without, with_ in steps if _compares_operators(run) else plain_run:
            for batch in sorted({row["batch"] for row in run["rows"]}):
                ms = {row["candidate"]: row["p50_ms"] for row in run["rows"] if row["batch"] == batch}
                if compiled := [ms[name] for name in with_ if name in ms]:
                    plain = min(ms[name] for name in without if name in ms)
                    times = kind.setdefault(operator, {}).setdefault(ARCHITECTURES[run["model"]], {})
                    pair = plain, compiled[0]
                    times[batch] = min(times.get(batch, pair), pair, key=lambda one: one[0] / one[1])
    lines = [
        "# Which compiled operators files for OpenVINO have by default: [ms without, ms with] by kind of CPU,",
        "# operator, architecture and batch; one that was not measured, or is slower at some batch, is left out. Tiny",
        "# models, two threads, bfloat16 around int8. Attention: the fastest plain policy, and cpu-operators, or cuda",
        "# where only that was measured. MLP: beside attention. attention_branch: in its place, beside the MLP.",
        "# patch_merging: beside these. patch_embedding: beside all. map_branch: with the MLP, in place of the plain",
        "# file, on maps that windows do not fill.",
        "# Written by benchmarks/cpu_page.py from docs/results/cpu_engines.json.",
    ]
    for kind, operators in sorted(found.items()):
        lines.append(f"{kind}:")
        for operator, families in sorted(operators.items()):
            lines.append(f"  {operator}:")
            for family, times in sorted(families.items()):
                pairs = [f"{batch}: [{plain:.2f}, {with_:.2f}]" for batch, (plain, with_) in sorted(times.items())]
                lines.append(f"    {family}: {{{', '.join(pairs)}}}")
    return "\n".join(lines) + "\n"


def _compares_operators(run: Run) -> bool:
    """Whether a run is of the operators one by one."""
    return bool(run.get("operators"))


def _one_by_one(runs: list[Run]) -> str:
    """Markdown: ms by operators, a line for each run and batch."""
    lines = [join_cells(("model", "machine", "batch", *OPERATORS)), "|---|---|---:" + "|---:" * len(OPERATORS) + "|"]
    for run in runs:
        for batch in sorted({row["batch"] for row in run["rows"]}):
            ms = {row["candidate"]: row["p50_ms"] for row in run["rows"] if row["batch"] == batch}
            cells = (f"{ms[name]:.1f}" if name in ms else "-" for name in OPERATORS)
            lines.append(join_cells((_network(run), _machine(run), batch, *cells)))
    return "\n".join(lines) + "\n"


def _tabulate_any(runs: list[Run]) -> str:
    """Markdown: CPU ms and SQNR of the files of models of timm, a line for each run and batch."""
    head = ["model", "machine", "batch", *OPERATORS_OF_ANY, "x", "dB", "NNCF", "x NNCF", "NNCF dB"]
    lines = [join_cells(head), "|---|---" + "|---:" * (len(head) - 2) + "|"]
    for run in runs:
        for batch in sorted({row["batch"] for row in run["rows"]}):
            rows = {row["candidate"]: row for row in run["rows"] if row["batch"] == batch}
            own = [rows[name] for name in OPERATORS_OF_ANY]
            ms = [row["p50_ms"] for row in own]
            cells = [*(f"{one:.1f}" for one in ms), f"{ms[0] / ms[-1]:.2f}"]
            decibels = " to ".join(f"{row['sqnr_db']:.1f}" for row in own)
            rivals = [(row["p50_ms"], row["sqnr_db"]) for name, row in rows.items() if name.startswith(NNCF)]
            other = ["-"] * 3
            if rivals:
                least, sqnr = min(rivals)
                other = [f"{least:.1f}", f"{least / ms[-1]:.2f}", f"{sqnr:.1f}"]
            lines.append(join_cells([_network(run), _machine(run), str(batch), *cells, decibels, *other]))
    text = (
        "*x*, *x NNCF*: how many times the CPU time of the plain file, and of the faster of NNCF's files, is that of "
        "the file with both branches; *dB*: SQNR of the three files."
    )
    return "\n".join([*lines, "", text]) + "\n"


def _table(runs: list[Run], batch: int) -> str:
    by_run = [{row["candidate"]: row for row in run["rows"] if row["batch"] == batch} for run in runs]
    bars = [
        min((row["p50_ms"] for name, row in rows.items() if name.startswith(NNCF)), default=None) for rows in by_run
    ]
    head = ["file", *(title for run in runs for title in (f"{_machine(run)}: ms", "x")), "dB"]
    lines = [join_cells(head), "|---" + "|---:" * (len(head) - 1) + "|"]
    for name in dict.fromkeys(name for rows in by_run for name in rows):
        cells = [name]
        for rows, bar in zip(by_run, bars, strict=True):
            ms = rows[name]["p50_ms"] if name in rows else None
            cells += [f"{ms:.1f}" if ms else "-", f"{bar / ms:.2f}" if ms and bar else "-"]
        decibels = [rows[name]["sqnr_db"] for rows in by_run if name in rows and rows[name]["sqnr_db"]]
        lines.append(join_cells([*cells, f"{min(decibels):.1f}" if decibels else "-"]))
    return "\n".join(lines) + "\n"


def _machine(run: Run) -> str:
    """The CPU; EPYCs of the third generation, with AVX2 alone, and of the fourth, without AVX-VNNI, are told from the
    fifth."""
    is_older = "avx512_vnni" in run["int8"] and "avx_vnni" not in run["int8"]
    older = ", AVX2 alone" if run["int8"] == ["avx2"] else ", no AVX-VNNI" if is_older else ""
    if run.get("limit"):
        return f"{run['cpu']} within {run['limit']}"
    return run["cpu"] + (", AMX hidden" if run["without_amx"] else older)


def _circumstances(run: Run) -> str:
    said = [
        f"{run['threads']} threads, {run['rounds']} rounds of {run['seconds']:g} s, a process for each row"
        if not run.get("cpu_time")
        else f"CPU time, {run['threads']} thread, {run['rounds']} rounds in one process",
        f"int8 {', '.join(run['int8'])}, bfloat16 {', '.join(run['bfloat16'])}",
        run["versions"],
        f"`{run['command']}`",
    ]
    note = f". {run['note']}" if run["note"] else ""
    return f"* {_network(run)} on {_machine(run)}, {run['date']}: {'; '.join(said)}{note}"


def _network(run: Run) -> str:
    """The model, and the size of its pictures where it is another."""
    return run["model"] + (", {} x {}".format(*run["size"]) if "size" in run else "")


def _key(run: Run) -> tuple[str, bool, str, bool]:
    return _network(run), run["without_amx"], _machine(run), _compares_operators(run)


if __name__ == "__main__":
    render()

"""Our int8 linears beside oneDNN's, as shares of a core's int8 peak, which a loop measures in the same run.

    python benchmarks/int8_gemm.py

Swin-T's linears, one thread, the best of nine by the CPU's time. Ours are those of the compiled operators
(benchmarks/branch_peak.cpp), on 96 tokens as the operators call them. OneDNN's are torch's `onednn.qlinear_pointwise`,
which torch.compile takes for int8, on so many tokens that the result has 2 MB: a call then costs little, and its memory
is not new. Both have uint8 inputs with a zero point, a scale a column and a bias, and give float32. Writes
docs/results/int8_gemm.md.
"""

import subprocess
import time
from pathlib import Path

import torch
from pages import RESULTS, ROOT

from swin_quant.backends.openvino.operators import cpu_kind, sources
from swin_quant.base.cpu import reproducible
from swin_quant.base.files import atomic_write_bytes
from swin_quant.cards.card import versions

PAGE = RESULTS / "int8_gemm.md"
NUMBERS, BEST_OF = 500_000, 9  # of a result


def main() -> None:
    reproducible()
    torch.set_num_threads(1)
    program = ROOT / "out" / "branch_peak"
    program.parent.mkdir(exist_ok=True)
    kind = (cpu_kind() or "").upper().replace("-", "_")
    source = Path(__file__).with_name("branch_peak.cpp")
    build = ["g++", "-O2", "-std=c++17", f"-DSWIN_QUANT_{kind}", f"-I{sources()}", str(source), "-o", str(program)]
    subprocess.run(build, check=True)
    peak = float(said(program, "peak"))
    rows = [ours(line, peak) for line in said(program, "linears").splitlines()]
    atomic_write_bytes(PAGE, page(rows, peak, kind).encode())
    print(PAGE.read_text())


def said(program: Path, word: str) -> str:
    return subprocess.run([program, word], check=True, capture_output=True, text=True).stdout.strip()


def ours(line: str, peak: float) -> tuple[int, int, float, float]:
    """Width, columns, and the share of the peak of ours and of oneDNN's, in percent."""
    inputs, columns, gmacs, _ = map(int, line.split())
    return inputs, columns, 100 * gmacs / peak, 100 * of_onednn(inputs, columns) / peak


def of_onednn(inputs: int, columns: int) -> float:
    """GMAC/s."""
    tokens = NUMBERS // columns
    x = torch.randint(0, 256, (tokens, inputs), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (columns, inputs), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, list(x.shape))
    scales, zeros, bias = torch.ones(columns), torch.zeros(columns, dtype=torch.int32), torch.ones(columns)
    given = x, 0.001, 128, packed, scales, zeros, bias, 1.0, 0, torch.float32, "none", [], ""
    best = float("inf")
    for _ in range(BEST_OF):
        start = time.thread_time()
        torch.ops.onednn.qlinear_pointwise(*given)
        best = min(best, time.thread_time() - start)
    return tokens * inputs * columns / best / 1e9


def page(rows: list[tuple[int, int, float, float]], peak: float, kind: str) -> str:
    lines = [f"| {inputs} x {columns} | {own:.0f} | {other:.0f} |" for inputs, columns, own, other in rows]
    found = versions()
    return (
        "# int8 linears beside oneDNN's\n\n"
        f"Percent of a core's int8 peak, {peak:.0f} GMAC/s by a loop of products ({kind}), on an {found.get('cpu')}, "
        f"torch {torch.__version__}, {time.strftime('%F')}. `python benchmarks/int8_gemm.py` writes this page, and its "
        "head says what is measured.\n\n"
        "| linear of Swin-T, in x out | ours | oneDNN's |\n|---|---:|---:|\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()

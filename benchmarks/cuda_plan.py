"""Plan the CUDA engine's best times on GPUs that are not here: writes docs/results/cuda_plan.md.

    python benchmarks/cuda_plan.py [--gpus h200 a100] [--batch 1 32]

Nothing is run: shapes and peaks are enough.
"""

from collections.abc import Iterator

from pages import RESULTS, save, script_parser

from swin_quant.backends.cuda.choose_fusions import CACHE_BYTES_US
from swin_quant.backends.cuda.fusions import ALL, APART
from swin_quant.backends.cuda.planning import AS_FP16, FP8, FP16, INT8, PLANNED, CudaPlan, Fused, cuda_plan
from swin_quant.config import load_config
from swin_quant.config.load import find_config
from swin_quant.operators.roofline import load_machine
from swin_quant.report.plan import fusion_table, plan_table
from swin_quant.report.table import Column, ReportTable, figure, markdown

PAGE = RESULTS / "cuda_plan.md"
MODELS = (
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "swin_base_patch4_window7_224",
    "swin_large_patch4_window7_224_22kto1k_finetune",
    "swinv2_tiny_patch4_window8_256",
    "swinv2_small_patch4_window8_256",
    "swinv2_base_patch4_window8_256",
)
IN_FULL = MODELS[:1] + MODELS[4:5]  # models with every launch listed, for the first GPU and the largest batch
HEAD = f"""# What the CUDA engine can at best give

`python benchmarks/cuda_plan.py` writes this page: **{PLANNED}**. Each launch of the engine takes at least as long as
its bytes at the GPU's bandwidth, its products at the peak of their type, and a launch inside a CUDA graph. Peaks come
from data sheets (`configs/machines`), and no kernel reaches them; every tensor counts as read or written once, which
caches can undercut. A sum is therefore a limit, not a forecast. The engine fuses launches where [estimates from
compiled kernels](cuda_static.md) say less, and where it has none, where this model does, with two limits for kernels
whose programs have whole rows: fewer programs than multiprocessors leave the rest idle, and each program reads all
weights from the cache, at {CACHE_BYTES_US / 1e3:.0f} GB/s a multiprocessor.

*At most*: fp16 over int8, both with the fusions of int8; *executed*: fp16 with its own fusions. *Apart*: without
fusions; *all that fit*: with every fusion whose kernel fits. *Fused, by stage*: q, a norm into qkv, fc1 or the
merging; p, a norm into proj, fc2 or behind the merging; m, one MLP; a, attention with proj and a norm; - none.

| fusion | what it saves |
| --- | --- |
| norm1 into qkv, norm2 into fc1 | the int8 tokens between the norm and the product |
| norm2 into proj | the same behind the projection, where one program owns whole rows |
| merging into its linear | the four neighbours side by side, normalised |
| one MLP | the hidden channels, four times as wide as the tokens |
| attention, proj and norm2 | the context and what is behind it: a program does all heads of its rows in turn |

"""
KERNELS = {"norm_gemm": "q", "attention_norm": "a", "gemm_norm": "p", "mlp": "m"}
SUMMARY: tuple[Column[CudaPlan], ...] = (
    Column("model", "model", lambda row: row.model),
    figure("batch", "batch", lambda row: row.batch),
    figure("launches", "launches", lambda row: len(row.launches)),
    figure("mb", "int8 MB", lambda row: sum(one.floors[INT8].bytes for one in row.launches) / 1e6, "{:.0f}"),
    figure("gop", "GOP", lambda row: sum(one.floors[INT8].operations for one in row.launches) / 1e9, "{:.0f}"),
    figure("int8", "int8 ms", lambda row: row.us(INT8) / 1e3, "{:.3f}"),
    figure("fp16", "fp16 ms", lambda row: row.us(FP16) / 1e3, "{:.3f}"),
    figure("executed", "executed fp16 ms", lambda row: _of(row, AS_FP16, FP16).us / 1e3, "{:.3f}"),
    figure("fp8", "fp8 ms", lambda row: row.us(FP8) / 1e3 if FP8 in row.precisions else None, "{:.3f}", may_lack=True),
    figure("gain", "at most", lambda row: row.gain, "{:.2f}x"),
    figure("launching", "bound by launching", lambda row: _launching(row), "{:.0%}"),
    figure("apart", "apart int8 ms", lambda row: _of(row, APART).us / 1e3, "{:.3f}"),
    figure("apart_launches", "launches", lambda row: _of(row, APART).launches),
    figure("fused", "all that fit int8 ms", lambda row: _of(row, ALL).us / 1e3, "{:.3f}"),
    figure("fused_launches", "launches", lambda row: _of(row, ALL).launches),
    Column("fusions", "fused, by stage", lambda row: _by_stage(row)),
)


def _of(row: CudaPlan, name: str, precision: str = INT8) -> Fused:
    return next(one for one in row.fusions[precision] if one.name == name)


def _by_stage(row: CudaPlan) -> str:
    """The fused kernels of each stage, including its patch merging."""
    stages: dict[str, set[str]] = {}
    for one in row.launches:
        if one.name.startswith("layers."):
            stages.setdefault(one.name.split(".")[1], set()).update(KERNELS.get(one.op, ""))
    return ", ".join(
        "".join(letter for letter in KERNELS.values() if letter in found) or "-" for found in stages.values()
    )


def _launching(row: CudaPlan) -> float:
    """The share of int8 time in launches that only the launch itself limits."""
    return sum(f.us for one in row.launches if (f := one.floors[INT8]).bound == "launch") / row.us(INT8)


def page(gpus: list[str], batches: list[int]) -> Iterator[str]:
    configs = {name: load_config(find_config(name)) for name in MODELS}
    yield HEAD
    for gpu in gpus:
        plans = [cuda_plan(cfg, load_machine(gpu), batch) for cfg in configs.values() for batch in batches]
        machine = plans[0].machine
        yield f"## {gpu}\n\n{machine.description} ({machine.source}).\n\n{markdown(ReportTable(SUMMARY, plans))}\n"
    for name in IN_FULL:
        found = cuda_plan(configs[name], load_machine(gpus[0]), batches[-1])
        yield f"## {name} on {gpus[0]}, batch {batches[-1]}, launch by launch\n\n"
        yield f"{markdown(plan_table(found))}\n{markdown(fusion_table(found))}\n"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--gpus", nargs="+", default=["h200", "a100"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    args = parser.parse_args()
    save(PAGE, "".join(page(args.gpus, args.batch)).rstrip() + "\n")
    print(PAGE)


if __name__ == "__main__":
    main()

"""The gain of passes, on held-out pictures: writes docs/results/passes.md.

    python benchmarks/passes.py --shared DIR [--work DIR] [--model NAME] [--reference] [--limit N]
    python benchmarks/passes.py --shared DIR --planted
    python benchmarks/passes.py --shared DIR --training

The micro Swin V1 and V2 of examples/checkpoints (--reference: of DIR/checkpoints too) on DIR/data/cifar10: 512
pictures of train calibrate, all of val score. Goes on from docs/results/passes.md and --work.
--planted: outlier channels in those models, made by tests/outliers.py, and the loss that remains, on 256 other pictures
of train: goes on from docs/results/planted.md and writes it; delete rows there to measure them again.
--training: 256 pictures of train calibrate and 512 others score, for choosing passes; kept in training.json.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "results" / "passes.md"
PLANTED_PAGE = PAGE.with_name("planted.md")
MICRO = ("swinv2_micro_cifar10", "swin_micro_cifar10")
POLICIES = ("ft-mode1", "ft-mode2", "qdq", "tensorrt-centred", "onnxruntime", "cpu")
VARIANTS: dict[str, object] = {
    "plain": [],
    "equalize": ["equalize"],
    "ridge": ["ridge"],
    "gptq": ["gptq"],
    "range search": ["range_search"],
    "range search, gptq": ["range_search", "gptq"],
    "reconstruct": ["reconstruct"],
    "distill": ["distill"],
    "fast": "fast",
    "best": "best",
    "best, 1,024 pictures": "best",
}
CALIBRATE = 512
MORE = {"best, 1,024 pictures": 1024}  # calibration pictures
RECIPES = ("plain", "fast", "best")
ALONE = ("equalize", "ridge", "gptq", "range search")
SLOW = ("reconstruct", "distill", *MORE)  # minutes each: only for the examples
FEWER = ((6, 6), (4, 8), (4, 4))  # bits
EMULATED = ("ft-mode1", "ft-mode2")  # with fewer bits only in fake-quant, and only for the examples
# Measurements by importance: bits, policies, variants.
PLAN = (
    *((bits, ("qdq",), RECIPES) for bits in FEWER),
    ((8, 8), ("ft-mode1", "ft-mode2", "qdq", "cpu", "tensorrt-centred"), RECIPES),
    ((4, 4), ("tensorrt-centred",), RECIPES),
    ((8, 8), ("onnxruntime",), RECIPES),
    *((bits, EMULATED, ("plain", "fast")) for bits in FEWER),
    ((8, 8), ("ft-mode1", "ft-mode2", "qdq", "cpu"), ALONE),
    *((bits, ("qdq",), ALONE) for bits in FEWER),
    *((bits, ("cpu",), RECIPES) for bits in FEWER),
    ((8, 8), ("ft-mode1", "qdq", "cpu"), SLOW),
    *((bits, ("qdq",), SLOW) for bits in FEWER),
    *((bits, ("cpu",), ALONE) for bits in FEWER),
    ((8, 8), ("ft-mode1", "cpu"), ("range search, gptq",)),
    ((4, 4), ("qdq",), ("range search, gptq",)),
    ((8, 8), ("ft-mode2",), SLOW),
    *((bits, EMULATED, ("best",)) for bits in FEWER),
    *((bits, EMULATED, ALONE) for bits in FEWER),
    *((bits, ("cpu",), SLOW[:2]) for bits in FEWER),
    *((bits, EMULATED, SLOW[:2]) for bits in FEWER),
)
PLANTED = (("swin", "norms"), ("swin", "v"), ("swin", "qk"), ("swinv2", "v"), ("swinv2", "heads"), ("swinv2", "stream"))
SHARES = (0.02, 0.02, 0.01, 0.03, 0.01, 0.02, 0.03, 0.01, 0.02, 0.03)  # share of channels, by seed
# Factor, policy, seed, by importance.
PLANTINGS = tuple(
    dict.fromkeys(
        [
            *((100, policy, seed) for policy in ("ft-mode1", "cpu") for seed in range(len(SHARES))),
            *(
                (scale, policy, seed)
                for seed in (0, 1)
                for scale in (100, 30, 10)
                for policy in ("ft-mode1", "cpu", "qdq", "ft-mode2")
            ),
        ]
    )
)
GOAL_DB = 0.5  # a cured model may be this far below the unplanted one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/passes"))
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--model", nargs="+", choices=MICRO, default=MICRO)
    parser.add_argument("--limit", type=int, help="end after so many measurements")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    args.work.mkdir(parents=True, exist_ok=True)
    wanted = (
        planted_rows(args.shared) if args.planted
        else accuracy_rows(args.shared, args.model, args.reference, args.training)
    )  # fmt: skip
    kept = args.work / f"{'planted' if args.planted else 'training' if args.training else 'accuracy'}.json"
    rows = {} if args.training else written_planted() if args.planted else written()
    rows |= json.loads(kept.read_text()) if kept.exists() else {}
    for key, measure in wanted:
        if key in rows or (args.planted and f"{key.split('|')[0]}_micro_cifar10" not in args.model):
            continue
        if args.limit == 0:
            break
        rows[key] = measure()
        kept.write_text(json.dumps(rows, indent=1))
        print(key, rows[key], flush=True)
        args.limit = args.limit and args.limit - 1
    if args.planted:
        write_planted(rows, [key for key, _ in wanted])
    elif not args.training:
        write(rows)


def accuracy_rows(shared: Path, models: Sequence[str], reference: bool, training: bool) -> list:
    places = {"example": (ROOT / "examples" / "checkpoints", "safetensors")}
    if reference:
        places["reference"] = (shared / "checkpoints", "pth")
    wanted = dict.fromkeys(
        (title, folder, suffix, name, policy, w, a, variant)
        for (w, a), policies, variants in PLAN
        for variant in variants
        for policy in policies
        for title, (folder, suffix) in places.items()
        for name in models
        if title == "example" or not (variant in SLOW or policy in EMULATED and (w, a) in FEWER)
    )
    return [
        (f"{name} ({title})|{policy}|W{w}A{a}|{variant}",
         partial(accuracy, shared, folder / f"{name}.{suffix}", policy, w, a, variant, training))
        for title, folder, suffix, name, policy, w, a, variant in wanted
    ]  # fmt: skip


def accuracy(shared: Path, file: Path, policy: str, w: int, a: int, variant: str, training: bool) -> dict:
    import swin_quant as sq
    from swin_quant.score.difference import difference

    model = sq.load(file, file.with_suffix(".yaml"))
    if training:
        both, classes = pictures(shared, file, "train", 768, seed=11)
        seen, images, labels = both[:256], both[256:], classes[256:]
        expected = answers(model, images)
    else:
        seen = pictures(shared, file, "train", MORE.get(variant, CALIBRATE))[0]
        images, labels, expected = validation(shared, file)
    start = time.process_time()
    sq.calibrate(model, seen.split(8), chosen(policy, w, a), passes=VARIANTS[variant])
    seconds = time.process_time() - start
    found = answers(model, images)
    right, before = ((logits.argmax(1) == labels).double() for logits in (found, expected))
    change = 100 * (right - before)
    far = difference(found, expected)
    return {
        "float": 100 * before.mean().item(),
        "delta": change.mean().item(),
        "se": (change.std() / len(change) ** 0.5).item(),
        "agreement": far["agreement"],
        "sqnr": far["sqnr_db"],
        "seconds": seconds,
    }


def planted_rows(shared: Path) -> list:
    return [
        (f"{kind}|{where}|{policy}|x{scale}|{seed}", partial(planted, shared, kind, where, policy, scale, seed))
        for scale, policy, seed in PLANTINGS
        for kind, where in PLANTED
    ]


def planted(shared: Path, kind: str, where: str, policy: str, scale: int, seed: int) -> dict:
    """SQNR of the logits in dB: unplanted; planted, without remedy; and planted, with `calibrate`'s automatic
    passes."""
    if ("unplanted", kind, policy) not in _cache:
        _cache["unplanted", kind, policy] = stressed(shared, kind, policy, [])[0]
    lost, _ = stressed(shared, kind, policy, [], where, scale, seed)
    cured, seconds = stressed(shared, kind, policy, None, where, scale, seed)
    return {"unplanted": _cache["unplanted", kind, policy], "planted": lost, "cured": cured, "seconds": seconds}


def stressed(
    shared: Path, kind: str, policy: str, passes: object, where: str = "", scale: int = 1, seed: int = 0
) -> tuple[float, float]:
    """SQNR of a calibrated model against its own float model, and CPU seconds of its calibration."""
    import swin_quant as sq
    from swin_quant.score.difference import difference
    from tests.outliers import plant

    file = ROOT / "examples" / "checkpoints" / f"{kind}_micro_cifar10.safetensors"
    shown, _ = pictures(shared, file, "train", 256, seed=1)
    model = sq.load(file, file.with_suffix(".yaml"))
    with torch.inference_mode():
        expected = model.module(shown)
    if where:
        plant(model.module, where, scale, SHARES[seed], seed)
    start = time.process_time()
    sq.calibrate(model, pictures(shared, file, "train", 80)[0].split(8), policy, passes=passes)
    seconds = time.process_time() - start
    return difference(answers(model, shown), expected)["sqnr_db"], seconds


def chosen(policy: str, w: int, a: int) -> object:
    import swin_quant as sq

    found = sq.policy(policy)
    return found if (w, a) == (8, 8) else found.bits("role:gemm_weight", w).bits("role:activation", a)


def answers(model: object, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(batch) for batch in images.split(200)])


_cache: dict = {}


def validation(shared: Path, file: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if ("val", file) not in _cache:
        import swin_quant as sq

        images, labels = pictures(shared, file, "val", None)
        _cache["val", file] = images, labels, answers(sq.load(file, file.with_suffix(".yaml")), images)
    return _cache["val", file]


def pictures(shared: Path, file: Path, split: str, count: int | None, seed: int = 0):
    """(images, labels) of a split, preprocessed: all, or a seeded sample."""
    key = (split, count, seed)
    if key not in _cache:
        from swin_quant.config import load_config
        from swin_quant.data.loader import load_batches
        from swin_quant.data.preprocess import Preprocess
        from swin_quant.data.sampling import chunks, sample
        from swin_quant.data.sources import open_pictures

        cfg = load_config(file.with_suffix(".yaml"))
        opened = open_pictures(str(shared / "data/cifar10"), split, zip_mode=True, cache_mode="no", num_classes=10)
        indices = list(range(len(opened))) if count is None else sample(len(opened), count, seed)
        batches = list(load_batches(opened, Preprocess.from_config(cfg), chunks(indices, 200)))
        _cache[key] = torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])
    return _cache[key]


HEAD = """# What passes win back

CIFAR-10, {calibrate} training pictures calibrate, unless a row says another number, and none of their labels is used;
all 5,000 of `val` score. Δ: top-1 in points against float, ± paired standard error; agreement of the top class and SQNR
of the logits with float; CPU seconds of calibration and passes, on one shared core, of an Intel Xeon in some rows and
of an AMD EPYC in others: good for orders of magnitude. Fewer than 8 bits by the calibrator mse; FasterTransformer's
kernels have 8 alone, and its modes fewer in fake-quant only. The epoch of the examples was chosen on these 5,000
pictures, which flatters float there, and so counts a little against every row. Written by
`python benchmarks/passes.py`, which goes on where it was cut off: combinations that are not here were not measured.
"""
PLANTED_HEAD = """# Planted outliers

Some channels times s, what reads them divided by s: the same float function (`tests/outliers.py`). 80 training pictures
calibrate the micro models of examples/checkpoints. SQNR of the logits in dB on 256 others: unplanted; planted, with
nothing done; planted, with what `calibrate` does unasked, and its CPU seconds on one shared core. Written by
`python benchmarks/passes.py --planted`, which goes on where it was cut off.
"""


def written() -> dict:
    """The rows of the page, with its exact figures."""
    rows: dict = {}
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        if line.startswith("## "):
            title, before = line[3:].removesuffix(" %").split(", float ")
        elif line.startswith("| W"):
            bits, policy, variant, change, agreement, sqnr, seconds = (cell.strip() for cell in line.split("|")[1:-1])
            delta, se = change.split(" ±")
            said = {"float": before, "delta": delta, "se": se, "agreement": agreement, "sqnr": sqnr, "seconds": seconds}
            rows[f"{title}|{policy}|{bits}|{variant}"] = {key: float(value) for key, value in said.items()}
    return rows


def write(rows: dict) -> None:
    page = [HEAD.format(calibrate=CALIBRATE)]
    titles = sorted({key.split("|")[0] for key in rows})
    for title in titles:
        mine = {tuple(key.split("|")[1:]): row for key, row in rows.items() if key.startswith(title + "|")}
        base = next(iter(mine.values()))["float"]
        page += [f"## {title}, float {base:.2f} %", "", "| bits | policy | passes | Δ acc@1 | agree % | SQNR dB | s |",
                 "|---|---|---|---:|---:|---:|---:|"]  # fmt: skip
        variants = list(VARIANTS)
        bits_of = sorted({f"W{w}A{a}" for (w, a), _, _ in PLAN})
        for policy, bits, variant in sorted(
            mine, key=lambda key: (-bits_of.index(key[1]), POLICIES.index(key[0]), variants.index(key[2]))
        ):
            row = mine[policy, bits, variant]
            page.append(
                f"| {bits} | {policy} | {variant} | {row['delta']:+.2f} ±{row['se']:.2f} | {row['agreement']:.2f} | "
                f"{row['sqnr']:.1f} | {row['seconds']:.0f} |"
            )
        page.append("")
    PAGE.write_text("\n".join(page))


def write_planted(rows: dict, wanted: list[str]) -> None:
    page = [PLANTED_HEAD, *told_of_planted(rows, wanted), "",
            "| model | where | policy | s | seed | share | unplanted | planted | cured | CPU s |",
            "|---|---|---|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for key in (key for key in wanted if key in rows):
        kind, where, policy, scale, seed = key.split("|")
        row = rows[key]
        found = " | ".join(f"{row[name]:.1f}" for name in ("unplanted", "planted", "cured"))
        where_and_how = f"{kind} | {where} | {policy} | {scale[1:]} | {seed} | {SHARES[int(seed)]:.0%}"
        page.append(f"| {where_and_how} | {found} | {row['seconds']:.0f} |")
    PLANTED_PAGE.write_text("\n".join(page) + "\n")


def written_planted() -> dict:
    """The rows in the page of planted outliers."""
    rows = {}
    for line in PLANTED_PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if cells[0] in dict(PLANTED):
            kind, where, policy, scale, seed, _, *numbers = cells
            said = dict(zip(("unplanted", "planted", "cured", "seconds"), map(float, numbers), strict=True))
            rows[f"{kind}|{where}|{policy}|x{scale}|{seed}"] = said
    return rows


def told_of_planted(rows: dict, wanted: list[str]) -> list[str]:
    """How many cases were measured and reached the goal, and which were not measured."""
    lost = {key: round(row["cured"], 1) - round(row["unplanted"], 1) for key, row in rows.items()}
    worst = min(lost, key=lost.__getitem__)
    near = sum(round(change, 1) >= -GOAL_DB for change in lost.values())
    missing: dict[str, int] = {}
    for key in wanted:
        if key not in rows:
            _, _, policy, scale, seed = key.split("|")
            title = f"{policy} s = {scale[1:]} seed {seed}"
            missing[title] = missing.get(title, 0) + 1
    left = "; ".join(f"{title} ({count})" for title, count in missing.items())
    return [
        f"{len(rows)} of {len(wanted)} cases were measured: {near} end within {GOAL_DB} dB of the unplanted model or",
        f"above it, the worst {-lost[worst]:.1f} dB below it ({worst.replace('|', ', ')}).",
        f"Not measured: {left or 'none'}.",
    ]


if __name__ == "__main__":
    main()

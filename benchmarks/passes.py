"""The gain of passes, on held-out pictures: writes docs/results/passes.csv and the page beside it.

    python benchmarks/passes.py --shared DIR [--work DIR] [--model NAME] [--reference] [--limit N]
    python benchmarks/passes.py --shared DIR --planted

The micro Swin V1 and V2 of examples/checkpoints (--reference: of DIR/checkpoints too) on DIR/data/cifar10: 512
pictures of train calibrate, all of val score. Goes on from docs/results/passes.csv and --work.
--planted: outlier channels in those models, made by tests/outliers.py, and the loss that remains, on 256 other pictures
of train: goes on from docs/results/planted.csv and writes it and its page; delete rows there to measure them again.
"""

import json
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean

import torch
from pages import EXAMPLES, RESULTS, ROOT, cifar10, read_table, script_parser, write_table

sys.path.insert(0, str(ROOT))
PAGE = RESULTS / "passes.md"
PLANTED_PAGE = PAGE.with_name("planted.md")
MICRO = ("swinv2_micro_cifar10", "swin_micro_cifar10")
POLICIES = ("ft-mode1", "ft-mode2", "qdq", "tensorrt-centred", "onnxruntime", "cpu")
VARIANTS: dict[str, object] = {
    "plain": [],
    "equalize": ["equalize"],
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
ALONE = ("equalize", "gptq", "range search")
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
PLANTINGS = [(100, policy, seed) for policy in ("ft-mode1", "cpu") for seed in range(len(SHARES))]
PLANTINGS += product((100, 30, 10), ("ft-mode1", "cpu", "qdq", "ft-mode2"), (0,))
PLANTINGS += product((100, 30, 10), ("ft-mode1", "cpu", "qdq", "ft-mode2"), (1,))
PLANTINGS = list(dict.fromkeys(PLANTINGS))
GOAL_DB = 0.5  # a cured model may be this far below the unplanted one


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("out/passes"))
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--model", nargs="+", choices=MICRO, default=MICRO)
    parser.add_argument("--limit", type=int, help="end after so many measurements")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    args.work.mkdir(parents=True, exist_ok=True)
    wanted = planted_rows(args.shared) if args.planted else accuracy_rows(args.shared, args.model, args.reference)
    kept = args.work / f"{'planted' if args.planted else 'accuracy'}.json"
    rows = written_planted() if args.planted else written()
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
    else:
        write(rows)


def accuracy_rows(shared: Path, models: Sequence[str], reference: bool) -> list:
    places = {"example": (EXAMPLES, "safetensors")}
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
         partial(accuracy, shared, folder / f"{name}.{suffix}", policy, w, a, variant))
        for title, folder, suffix, name, policy, w, a, variant in wanted
    ]  # fmt: skip


def accuracy(shared: Path, file: Path, policy: str, w: int, a: int, variant: str) -> dict:
    import swin_quant as sq
    from swin_quant.score.run_engines import difference

    model = sq.load(file, file.with_suffix(".yaml"))
    seen = pictures(shared, file, "train", MORE.get(variant, CALIBRATE))[0]
    images, labels = pictures(shared, file, "val", None)
    if file not in _expected:
        _expected[file] = answers(model, images)
    expected = _expected[file]
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
    unplanted, _ = stressed(shared, kind, policy, ())
    lost, _ = stressed(shared, kind, policy, (), where, scale, seed)
    cured, seconds = stressed(shared, kind, policy, None, where, scale, seed)
    return {"unplanted": unplanted, "planted": lost, "cured": cured, "seconds": seconds}


@cache
def stressed(
    shared: Path, kind: str, policy: str, passes: tuple[()] | None, where: str = "", scale: int = 1, seed: int = 0
) -> tuple[float, float]:
    """SQNR of a calibrated model against its own float model, and CPU seconds of its calibration."""
    import swin_quant as sq
    from swin_quant.score.run_engines import difference
    from tests.outliers import plant

    file = EXAMPLES / f"{kind}_micro_cifar10.safetensors"
    shown, _ = pictures(shared, file, "train", 256, seed=1)
    model = sq.load(file, file.with_suffix(".yaml"))
    with torch.inference_mode():
        expected = model.module(shown)
    if where:
        plant(model.module, where, scale, SHARES[seed], seed)
    start = time.process_time()
    sq.calibrate(model, pictures(shared, file, "train", 80)[0].split(8), policy, passes=None if passes is None else [])
    seconds = time.process_time() - start
    return difference(answers(model, shown), expected)["sqnr_db"], seconds


def chosen(policy: str, w: int, a: int) -> object:
    import swin_quant as sq

    found = sq.policy(policy)
    return found if (w, a) == (8, 8) else found.bits("role:gemm_weight", w).bits("role:activation", a)


def answers(model: object, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(batch) for batch in images.split(200)])


_expected: dict = {}  # logits of the float model


@cache
def pictures(shared: Path, file: Path, split: str, count: int | None, seed: int = 0):
    """(images, labels) of a split, preprocessed: all, or a seeded sample."""
    from swin_quant.config import load_config
    from swin_quant.data.loader import load_batches
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.data.sampling import chunks, sample

    opened = cifar10(shared / "data/cifar10", split)
    indices = list(range(len(opened))) if count is None else sample(len(opened), count, seed)
    preprocess = Preprocess.from_config(load_config(file.with_suffix(".yaml")))
    batches = list(load_batches(opened, preprocess, chunks(indices, 200)))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


HEAD = PAGE.read_text().partition("## ")[0].rstrip() + "\n"
PLANTED_HEAD = """# Planted outliers

Some channels times s, their readers divided by s: the same float function (`tests/outliers.py`). 80 training pictures
calibrate the micro models of examples/checkpoints; 256 others give the SQNR of the logits in dB: unplanted; planted,
with nothing done; cured by what `calibrate` does unasked. [planted.csv](planted.csv) has every case, with its CPU
seconds on one shared core. `python benchmarks/passes.py --planted` writes both, and goes on where it was cut off.
"""
COLUMNS = ("float", "delta", "se", "agreement", "sqnr", "seconds")
PLANTED_COLUMNS = ("unplanted", "planted", "cured", "seconds")
BANDS = (float("inf"), 30, 25, 20, 15, 10, float("-inf"))  # dB


def written() -> dict:
    """The rows of the table, as exactly as it says them."""
    return {
        f"{row['model']}|{row['policy']}|{row['bits']}|{row['passes']}": {key: float(row[key]) for key in COLUMNS}
        for row in read_table(PAGE.with_suffix(".csv"))
    }


def write(rows: dict) -> None:
    bits_of = [f"W{w}A{a}" for w, a in ((8, 8), *FEWER)]
    variants = list(dict.fromkeys([*VARIANTS, *(key.split("|")[3] for key in rows)]))

    def place(key: str) -> tuple:
        title, policy, bits, variant = key.split("|")
        return title, bits_of.index(bits), POLICIES.index(policy), variants.index(variant)

    rows = {key: rows[key] for key in sorted(rows, key=place)}
    cells = []
    for key, row in rows.items():
        title, policy, bits, variant = key.split("|")
        numbers = [f"{row['float']:.2f}", f"{row['delta']:+.2f}", *(f"{row[name]:.2f}" for name in ("se", "agreement"))]
        cells.append([title, bits, policy, variant, *numbers, f"{row['sqnr']:.1f}", f"{row['seconds']:.0f}"])
    write_table(PAGE.with_suffix(".csv"), ("model", "bits", "policy", "passes", *COLUMNS), cells)
    page = [HEAD, *by_sqnr(rows.values())]
    for title in dict.fromkeys(key.split("|")[0] for key in rows):
        page += ["", *by_recipe(title, rows)]
    PAGE.write_text("\n".join(page) + "\n")


def by_sqnr(rows: Iterable[dict]) -> list[str]:
    """The loss of top-1 that goes with an SQNR, over all rows."""
    page = ["## SQNR and top-1", "", "| SQNR dB | combinations | mean Δ | worst Δ |", "|---|---:|---:|---:|"]
    for high, low in pairwise(BANDS):
        if deltas := [row["delta"] for row in rows if low <= row["sqnr"] < high]:
            band = (
                f"{low} and more" if high == BANDS[0] else f"below {high}" if low == BANDS[-1] else f"{low} to {high}"
            )
            page.append(f"| {band} | {len(deltas)} | {fmean(deltas):+.2f} | {min(deltas):+.2f} |")
    return page


def by_recipe(title: str, rows: dict) -> list[str]:
    """Plain calibration beside the recipes, for one model: a row for bits and policy."""
    mine = {tuple(key.split("|")[1:]): row for key, row in rows.items() if key.startswith(title + "|")}
    base = next(iter(mine.values()))["float"]
    head = " | ".join(f"{name}: Δ, dB" for name in RECIPES)
    page = [f"## {title}, float {base:.2f} %", "", f"| bits | policy | {head} |", "|---|---|" + "---:|" * len(RECIPES)]
    for policy, bits in dict.fromkeys(key[:2] for key in mine):
        found = (mine.get((policy, bits, name)) for name in RECIPES)
        cells = (f"{row['delta']:+.2f} ±{row['se']:.2f}, {row['sqnr']:.1f}" if row else "" for row in found)
        page.append(f"| {bits} | {policy} | {' | '.join(cells)} |")
    return page


def write_planted(rows: dict, wanted: list[str]) -> None:
    cells = []
    for key in (key for key in wanted if key in rows):
        kind, where, policy, scale, seed = key.split("|")
        found = [f"{rows[key][name]:.1f}" for name in PLANTED_COLUMNS[:3]]
        how = [kind, where, policy, scale[1:], seed, f"{SHARES[int(seed)]:.0%}"]
        cells.append([*how, *found, f"{rows[key]['seconds']:.0f}"])
    head = ("model", "where", "policy", "scale", "seed", "share", *PLANTED_COLUMNS)
    write_table(PLANTED_PAGE.with_suffix(".csv"), head, cells)
    page = [PLANTED_HEAD, *summarise_planted(rows, wanted), "",
            "| model | where | policy | cases | unplanted | planted | cured | worst cured - unplanted |",
            "|---|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for place, policy in product(PLANTED, dict.fromkeys(policy for _, policy, _ in PLANTINGS)):
        some = [row for key, row in rows.items() if key.startswith("|".join((*place, policy, "x")))]
        ranges = (f"{min(of):.1f} to {max(of):.1f}" for of in ([row[n] for row in some] for n in PLANTED_COLUMNS[1:3]))
        worst = min(row["cured"] - row["unplanted"] for row in some)
        before = f"{some[0]['unplanted']:.1f}"
        page.append(
            f"| {' | '.join((*place, policy))} | {len(some)} | {before} | {' | '.join(ranges)} | {worst:+.1f} |"
        )
    PLANTED_PAGE.write_text("\n".join(page) + "\n")


def written_planted() -> dict:
    """The rows of the table of planted outliers."""
    return {
        "|".join((row["model"], row["where"], row["policy"], f"x{row['scale']}", row["seed"])): {
            key: float(row[key]) for key in PLANTED_COLUMNS
        }
        for row in read_table(PLANTED_PAGE.with_suffix(".csv"))
    }


def summarise_planted(rows: dict, wanted: list[str]) -> list[str]:
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

"""The cost of float8 beside int8, by fake-quant on real pictures: writes docs/results/fp8.md.

    python benchmarks/fp8.py --data-path DIR [--pictures 5000]

DIR is CIFAR-10 as zip files and maps. 80 training pictures calibrate once for each method, and that calibration serves
every policy, int8 and float8. All policies are scored on the same pictures of `val`; 5,000 take about four minutes a
model on a core.
"""

from pathlib import Path

from pages import EXAMPLES, RESULTS, batches_of, cifar10, float_model, line_of, save, script_parser

PAGE = RESULTS / "fp8.md"
MODELS = ("swin_micro_cifar10", "swinv2_micro_cifar10")
BY_PERCENTILE = ("qdq", "tensorrt", "tensorrt-fp8", "cuda-fp8", "tensorrt, fixed", "cuda-fp8, in int8")
BY_MAX = ("tensorrt", "tensorrt-fp8")
COLUMNS = ("model", "ranges", "policy", "acc@1", "Δ acc@1", "±", "agree %", "SQNR dB")
HEAD = """# Float8 beside int8

Micro Swins of examples/checkpoints, fake-quant in torch, {pictures} pictures of `val`. Written by
`python benchmarks/fp8.py`. 80 training pictures calibrate; the same ranges serve int8 and float8 (E4M3). Δ and ±
(paired standard error) are points of top-1 against the float model on the same pictures, as are agreement and SQNR of
the logits. *fixed*: the range behind softmax is 1, as in `tensorrt-fp8`; `cuda-fp8` leaves that product float. *in
int8*: the nodes of `cuda-fp8` in int8.
"""


def policies():
    """The scored policies by name."""
    from swin_quant.quant.policy import Rule, load_policy, policy_from_dict

    def named(name, policy):
        return policy_from_dict({**policy.to_dict(), "name": name}, name)

    made = {
        "tensorrt, fixed": load_policy("tensorrt").and_then(Rule(nodes=("role:softmax_output",), amax=1.0)),
        "cuda-fp8, in int8": load_policy("cuda-fp8").and_then(Rule(nodes=("*",), format="int8")),
    }
    return {name: named(name, made[name]) if name in made else load_policy(name) for name in BY_PERCENTILE}


def scored(name: str, data_path: Path, count: int) -> list[list[str]]:
    """The rows of a model."""
    import torch

    from swin_quant.data.sampling import sample
    from swin_quant.quant.calibration import Method, observe, set_ranges
    from swin_quant.score.engine import torch_engines
    from swin_quant.score.metrics import evaluate

    cfg, model = float_model(EXAMPLES / f"{name}.yaml", EXAMPLES / f"{name}.safetensors")
    model.eval()
    train, val = (cifar10(data_path, split) for split in ("train", "val"))
    calibrating = batches_of(train, cfg, sample(len(train), 80, 0), 8)
    calibration = observe(model, [batch.images for batch in calibrating])
    shown = batches_of(val, cfg, range(0, len(val), max(1, len(val) // count))[:count], 100)
    rows = []
    for method, names in (("percentile", BY_PERCENTILE), ("max", BY_MAX)):
        set_ranges(model, calibration, Method(method))
        engines = torch_engines(model, torch.device("cpu"), None, [policies()[each] for each in names])
        with torch.inference_mode():
            scores = evaluate(engines, shown, torch.device("cpu"))
        for (_, engine), score in zip(engines.items(), scores.values(), strict=True):
            if engine.policy is None and method == "max":
                continue
            delta = ["", "", "", ""] if engine.policy is None else [
                f"{score.delta_acc1:+.2f}", f"{score.delta_acc1_se:.2f}", f"{score.agreement:.2f}",
                f"{score.sqnr_db:.1f}",
            ]  # fmt: skip
            row = [name, method if engine.policy else "", engine.policy or "float32", f"{score.acc1:.2f}", *delta]
            rows.append(row)
            print(*row, sep=" | ", flush=True)
    return rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=5000)
    args = parser.parse_args()
    rows = [row for name in MODELS for row in scored(name, args.data_path, args.pictures)]
    table = [line_of(COLUMNS), "|---" * len(COLUMNS) + "|", *(line_of(row) for row in rows)]
    save(PAGE, "\n".join([HEAD.format(pictures=args.pictures), *table, ""]))


if __name__ == "__main__":
    main()

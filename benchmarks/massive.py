"""A massive channel of the residual stream, and its remedies: writes docs/results/massive.md.

    python benchmarks/massive.py --shared DIR

The rows of one channel in each proj and fc2 of the first stage are 20 times as large (1: the unchanged model), in the
micro Swin V1 and V2 of examples/checkpoints. 80 training pictures of DIR/data/cifar10 calibrate, 256 others score.
"""

import logging
from pathlib import Path

import torch
from pages import EXAMPLES, RESULTS, save, script_parser
from passes import answers, pictures

PAGE = RESULTS / "massive.md"
CHANNEL, CALIBRATE, SCORE = 3, 80, 256
WAYS = {
    "`ft-mode1`": ("ft-mode1", {}),
    "`ft-mode1`, calibrator auto": ("ft-mode1", {"method": "auto"}),
    "`ft-mode1`, calibrator max": ("ft-mode1", {"method": "max"}),
    "`ft-mode1`, passes fast": ("ft-mode1", {"passes": "fast"}),
    "`ft-mode2`": ("ft-mode2", {}),
    "`qdq`": ("qdq", {}),
    "`cpu`": ("cpu", {}),
}
HEAD = f"""# A massive channel of the residual stream

In the micro models of examples/checkpoints the rows of one channel in each proj and fc2 of the first stage are
`times` as large; the changed float model is the reference. {CALIBRATE} training pictures calibrate; SQNR of the
logits in dB and top-1 agreement on {SCORE} others. Mode 1 rounds these layers' outputs with one int8 scale, so the
other channels keep few steps. No factor moves the channel, because the stream adds it up, and no range wins it back;
policies that leave these outputs float do. `calibrate` names the channel and the policies. `python
benchmarks/massive.py --shared DIR` writes this page.

| way | V1, times 1 | V1, times 20 | V2, times 1 | V2, times 20 |
|---|---:|---:|---:|---:|
"""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    shared = parser.parse_args().shared
    logging.basicConfig(level=logging.ERROR)
    lines = []
    for way, (policy, how) in WAYS.items():
        cells = [measured(shared, kind, times, policy, how) for kind in ("swin", "swinv2") for times in (1, 20)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    save(PAGE, HEAD + "\n".join(lines) + "\n")


def measured(shared: Path, kind: str, times: int, policy: str, how: dict[str, str]) -> str:
    import swin_quant as sq
    from swin_quant.score.difference import difference

    file = EXAMPLES / f"{kind}_micro_cifar10.safetensors"
    shown, _ = pictures(shared, file, "train", CALIBRATE + SCORE, seed=1)
    model = sq.load(file, file.with_suffix(".yaml"))
    with torch.no_grad():
        for block in model.module.layers[0].blocks:
            for producer in (block.attn.proj, block.mlp.fc2):
                producer.weight[CHANNEL] *= times
                producer.bias[CHANNEL] *= times
    expected = answers(model, shown[CALIBRATE:])
    sq.calibrate(model, shown[:CALIBRATE].split(8), policy, **how)
    found = difference(answers(model, shown[CALIBRATE:]), expected)
    return f"{found['sqnr_db']:.1f} dB, {found['agreement']:.1f} %"


if __name__ == "__main__":
    main()

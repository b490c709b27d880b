"""Run `analyze` on full-size models: writes docs/results/analyze.md.

    python benchmarks/analyze.py [--machine t4] [--timm resnet50 ...]

Only shapes: there are no weights, so no precision risks; limits are computed from the machine's peaks.
"""

import torch
from pages import RESULTS, save, script_parser

from swin_quant.base.compat import import_timm
from swin_quant.config import load_config
from swin_quant.config.load import find_config
from swin_quant.operators.analysis import analyze_module
from swin_quant.operators.roofline import load_machine
from swin_quant.report.graph import analysis_markdown
from swin_quant.verbs.analyze import MACHINE, analyze_checkpoint

PAGE = RESULTS / "analyze.md"
OURS = ("swin_tiny_patch4_window7_224", "swinv2_tiny_patch4_window8_256")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--machine", default=MACHINE)
    parser.add_argument("--timm", nargs="*", default=["resnet50"], help="models of timm, at 224 pixels")
    args = parser.parse_args()
    found = [analyze_checkpoint(load_config(find_config(name)), machine=args.machine) for name in OURS]
    for name in args.timm:
        with torch.device("meta"):
            model = import_timm().create_model(name)
        found.append(analyze_module(model.eval(), (1, 3, 224, 224), name, load_machine(args.machine)))
    text = "# Before quantization\n\nWritten by `python benchmarks/analyze.py`; [what it means](../analyze.md).\n\n"
    save(PAGE, text + "\n".join(map(analysis_markdown, found)))


if __name__ == "__main__":
    main()

"""QAT: calibrated checkpoint + pictures -> fine-tuned checkpoint + run card (the same as `swin-quant finetune`)."""

import sys

from swin_quant.cli import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))

"""FasterTransformer's front door: --calib, --eval, --throughput, with its flags."""

import sys

from swin_quant.cli.session import FRONT_DOOR, run_command

if __name__ == "__main__":
    sys.exit(run_command(FRONT_DOOR, sys.argv[1:]))

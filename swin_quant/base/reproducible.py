"""The setting for results that are the same to the bit, made before the first matrix product."""

import os


def reproducible() -> None:
    """Let a matrix product depend neither on the number of threads nor on the other rows of the batch, on Intel CPUs.

    MKL reads its variable once, at its first product, so call this first. The commands do; in a process of your own it
    is your choice, since it makes MKL a little slower. Without it, the last bits of ranges may depend on the number of
    threads. A value that is set already stays. Calibration itself depends on no batch and no number of ranks either way
    (`quant.batch_invariance`).
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

"""What a process needs for results that are the same to the bit, set before the first matrix product."""

import os


def reproducible() -> None:
    """Let a matrix product depend neither on the number of threads nor on the other rows of the batch, on Intel CPUs.

    MKL reads its variable once, at its first product, so call this first. The commands do; in a process of your own it
    is your choice, since MKL is a little slower so. Without it, ranges may differ in the last bits between numbers of
    threads. A value that is set already stays. Calibration itself depends on no batch and no number of ranks either way
    (`quant.alone`).
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

"""The options that an engine runs with; parsers of the command line import them without torch."""

from dataclasses import dataclass

from swin_quant.base.errors import UsageError

DEVICES = ("cpu", "cuda")
MOST_THREADS = 1024  # a library starts as many threads as it is told to, until the process dies


@dataclass(frozen=True)
class EngineOptions:
    """How an artifact is run; an engine refuses an option that it does not have.

    `threads`: None leaves the number to the library. `float_type`: float32, bfloat16 or float16 for all that is not
    int8, in engines that offer a choice; None is float32, so that no engine is faster by a type that nobody chose.
    `device`: cpu, or cuda for torch's current GPU. `optimize`: whether the library may rewrite the graph. `extensions`:
    libraries with the user's own operators. `graphs`: how many graphs an engine keeps that compiles one for each size
    of batch; 2 are for full batches and the last one. UsageError for an impossible number or another device.
    """

    threads: int | None = None
    float_type: str | None = None
    device: str = "cpu"
    optimize: bool = True
    extensions: tuple[str, ...] = ()
    graphs: int = 2

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"‹threads› {self.threads}: must be at least 1, at most {MOST_THREADS}")
        if self.device not in DEVICES:
            raise UsageError(
                f"‹device› {self.device!r:.40}: must be {' or '.join(DEVICES)}; CUDA_VISIBLE_DEVICES or "
                "torch.cuda.set_device choose the GPU"
            )

"""What the caller of an engine may choose; an engine refuses what it does not have."""

from dataclasses import dataclass

from swin_quant.base.errors import UsageError

DEVICES = ("cpu", "cuda")
MOST_THREADS = 1024  # libraries start as many as they are told to, until the process dies of it


@dataclass(frozen=True)
class EngineOptions:
    """How an artifact is run.

    `threads` None: the library's own choice. `float_type` (float32, bfloat16, float16) is the type of what is not int8,
    for engines that choose it themselves; None: float32, so that no engine is faster by a type that nobody asked for.
    `device`: cpu or cuda, torch's current GPU. `optimize`: whether the library may rewrite the graph. `extensions`:
    libraries with operators of the user's own, for engines that load such. `graphs`: how many an engine keeps that
    compiles one for each size of batch: 2 are that of full batches and that of the last one. UsageError for an
    impossible number or another device.
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
                f"‹device› {self.device!r:.40}: must be {' or '.join(DEVICES)}; which GPU is said by "
                "CUDA_VISIBLE_DEVICES or torch.cuda.set_device"
            )

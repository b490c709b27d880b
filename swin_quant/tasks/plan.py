"""What the CUDA engine can at best give on a GPU that need not be there."""

from yacs.config import CfgNode

from swin_quant.backends.cuda.planning import CudaPlan, cuda_plan
from swin_quant.operators.roofline import load_machine

GPU, BATCH = "h200", 32


def plan(cfg: CfgNode, gpu: str = GPU, batch: int = BATCH) -> CudaPlan:
    """Plan the Swin that `cfg` describes for `batch` pictures on `gpu`: a shipped machine by name, or a YAML file."""
    return cuda_plan(cfg, load_machine(gpu), batch)

"""A whole AdamW or AMSGrad update as one kernel, for PyTorch.

``AdamW`` is a drop-in for ``torch.optim.AdamW``; ``adamw_step`` is the same update as a function; importing
the package registers the ops ``torch.ops.fused_adamw.*``, which ``fused_adamw.torch_library`` documents.
"""

from importlib.metadata import version

from fused_adamw._requirements import check_requirements

check_requirements()

from fused_adamw._C import cpu_capabilities, cpu_capability, set_cpu_capability  # noqa: E402
from fused_adamw.amp import GradScaler  # noqa: E402
from fused_adamw.cuda_kernels import cuda_compiler, set_cuda_compiler  # noqa: E402
from fused_adamw.errors import CompilerError, NonfiniteGradientError, StaleMasterError  # noqa: E402
from fused_adamw.functional import (  # noqa: E402
    AdamWState,
    Entry,
    GuardedUpdate,
    Update,
    adamw_step,
    guarded_adamw_step,
)
from fused_adamw.optimizer import AdamW, StepStats  # noqa: E402
from fused_adamw.options import AdamWOptions, GradientGuardOptions, StepControl  # noqa: E402
from fused_adamw.stats import GradientStats, gradient_stats, merge_stats  # noqa: E402
from fused_adamw.stats_plan import StatsPlan  # noqa: E402

__version__ = version("fused_adamw")

__all__ = [
    "AdamW",
    "AdamWOptions",
    "AdamWState",
    "CompilerError",
    "Entry",
    "GradScaler",
    "GradientGuardOptions",
    "GradientStats",
    "GuardedUpdate",
    "NonfiniteGradientError",
    "StaleMasterError",
    "StatsPlan",
    "StepControl",
    "StepStats",
    "Update",
    "__version__",
    "adamw_step",
    "cpu_capabilities",
    "cpu_capability",
    "cuda_compiler",
    "gradient_stats",
    "guarded_adamw_step",
    "merge_stats",
    "set_cpu_capability",
    "set_cuda_compiler",
]

"""A whole AdamW or AMSGrad update as one kernel, for PyTorch.

``AdamW`` is a drop-in for ``torch.optim.AdamW``; ``adamw_step`` is the same update as a function; importing
the package registers the ops ``torch.ops.fused_adamw.*``, which ``fused_adamw.torch_library`` documents.
"""

from importlib.metadata import version

from fused_adamw._requirements import check_requirements

check_requirements()

from fused_adamw._C import cpu_capabilities, cpu_capability, set_cpu_capability  # noqa: E402
from fused_adamw.functional import AdamWState, Update, adamw_step  # noqa: E402
from fused_adamw.optimizer import AdamW  # noqa: E402
from fused_adamw.options import AdamWOptions, StepControl  # noqa: E402

__version__ = version("fused_adamw")

__all__ = [
    "AdamW",
    "AdamWOptions",
    "AdamWState",
    "StepControl",
    "Update",
    "__version__",
    "adamw_step",
    "cpu_capabilities",
    "cpu_capability",
    "set_cpu_capability",
]

"""The operators ``torch.ops.fused_adamw.*``: importing this package registers them.

One file per op holds its schema, its fake (the shapes, dtypes and strides that it returns), its
implementation and its documentation. ``checks.py`` holds every refusal.
"""

from fused_adamw.torch_library import (
    adamw_scaled,
    analyze_gradient,
    merge_gradient_stats,
    merge_gradient_stats_chunks,
    step,
    step_inplace,
)

__all__ = [
    "adamw_scaled",
    "analyze_gradient",
    "merge_gradient_stats",
    "merge_gradient_stats_chunks",
    "step",
    "step_inplace",
]

"""A gradient scaler that leaves unscaling and the finite check to the step."""

from __future__ import annotations

from typing import Any

import torch

from fused_adamw.optimizer import AdamW


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` without its pass over the gradients of a ``fused_adamw.AdamW``.

    torch's scaler reads and writes every gradient to look for infinities, even for an optimizer that unscales
    for itself. Here the optimizer's own analysis, which reads each gradient once and is used for clipping as
    well, tells whether to skip. Arguments, ``state_dict`` and the treatment of other optimizers are those of
    ``torch.amp.GradScaler``; after an explicit ``unscale_`` a step does not unscale again.
    """

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        if not isinstance(optimizer, AdamW) or not optimizer.fused_step:
            return super()._check_inf_per_device(optimizer)
        scale = self._get_scale_async()
        own_scale = getattr(optimizer, "grad_scale", None)
        stats = optimizer.analyze_gradients(scale if own_scale is None else scale * own_scale)
        found_inf = stats.report[2]
        per_device = {found_inf.device: found_inf}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = per_device
        return per_device

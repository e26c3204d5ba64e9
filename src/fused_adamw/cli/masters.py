"""16-bit parameters as one trains them with ``torch.optim.AdamW``, which keeps no master weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MasterCopies:
    """float32 copies of 16-bit parameters, for an optimizer to update in their place.

    Gradients are copied before its step and weights after it; all in storage that stays, so that a CUDA
    graph may contain both.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = [param.detach() for param in params]
        self.masters = [nn.Parameter(param.float()) for param in self._params]
        self._grads = [torch.empty_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self._grads, strict=True):
            master.grad = grad

    def take_gradients(self, grads: Iterable[Tensor | None]) -> None:
        """Copies the gradients of the parameters, all of which have one."""
        torch._foreach_copy_(self._grads, [grad for grad in grads if grad is not None])

    def give_weights(self) -> None:
        """Rounds the weights to the parameters."""
        torch._foreach_copy_(self._params, [master.detach() for master in self.masters])

"""What a CUDA graph could not replay is refused while it is captured; here as if one were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from cases import Snapshot, call_step, normal_sample
from fused_adamw import AdamW, guarded_adamw_step
from fused_adamw.torch_library import checks
from training import make_gradients, make_params, refusal, set_gradients, tensors_of


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CUDA graph were being captured, on any device."""
    monkeypatch.setattr(checks, "is_capturing", lambda device: True)


def warm_optimizer(**options: Any) -> AdamW:
    """After a step, with numbers in tensors where the options say nothing else."""
    params = make_params()
    tensors = {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.99))}
    optimizer = AdamW([{"params": params[0::2]}, {"params": params[1::2]}], **{**tensors, **options})
    set_gradients([*params[0::2], *params[1::2]], make_gradients([*params[0::2], *params[1::2]], 1)[0])
    optimizer.step()
    return optimizer


HOST_SETTINGS: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.1},
    "betas": {"betas": (0.9, 0.99)},
    "nonfinite": {"nonfinite": "error"},
    "fused_step": {"max_grad_norm": 1.0, "fused_step": False},
}


def test_settings_that_a_replay_could_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is written; numbers are allowed as constants, where asked for."""
    optimizers = {name: warm_optimizer(**options) for name, options in HOST_SETTINGS.items()}
    allowed = [
        warm_optimizer(lr=0.1, betas=(0.9, 0.99), capturable=True),
        warm_optimizer(fused_step=False),  # which needs no pass of its own
    ]
    monkeypatch.setattr(checks, "is_capturing", lambda device: True)
    messages = []
    for optimizer in optimizers.values():
        before = Snapshot(tensors_of(optimizer))
        messages.append(refusal(optimizer.step))
        before.assert_unchanged()
    for optimizer in allowed:
        optimizer.step()
    assert_expected_inline(
        "\n".join(messages),
        """\
RuntimeError: fused_adamw.AdamW: lr of group 0 is the number 0.1, which a CUDA graph would keep for
all replays; a tensor on the parameters' device (torch.tensor(0.1, device='cuda')), or
capturable=True to keep it, is required
RuntimeError: fused_adamw.AdamW: beta1 of group 0 is the number 0.9, which a CUDA graph would keep
for all replays; a tensor on the parameters' device (torch.tensor(0.9, device='cuda')), or
capturable=True to keep it, is required
RuntimeError: fused_adamw.AdamW: nonfinite is 'error', which reads on the host, and a CUDA graph is
being captured; 'skip' or None is required
RuntimeError: fused_adamw.AdamW: fused_step is False, which reads on the host, and a CUDA graph is
being captured; True is required""",
    )


@pytest.mark.usefixtures("capturing")
def test_a_count_that_a_replay_could_not_raise() -> None:
    sample = normal_sample(5)
    messages = [refusal(lambda: call_step(sample, scalars="numbers"))]
    messages.append(refusal(lambda: guarded_adamw_step([(sample.param, sample.grad)])))
    call_step(sample, scalars="tensors")
    assert_expected_inline(
        "\n".join(messages),
        """\
RuntimeError: fused_adamw::step: step is the number 5, which a CUDA graph would keep for all
replays, and the bias correction with it; a tensor on the parameters' device, which the graph counts
up, is required
RuntimeError: guarded_adamw_step reads the report of its gradients on the host, which a traced
program or a CUDA graph cannot do; use fused_adamw.AdamW or torch.ops.fused_adamw.adamw_scaled there""",
    )

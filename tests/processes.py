"""Tasks on several CPU processes that talk through gloo, and the model that they train."""

from __future__ import annotations

import faulthandler
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn

WORLD_SIZE = 2
STEPS = 5

# What a process does with the mesh of all, and returns.
Task = Callable[[Any], dict[str, Any]]


def make_model() -> nn.Module:
    """Some parts are uneven; the last bias is on the first process alone."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def make_batches() -> Tensor:
    return torch.randn(STEPS, 8, 5, generator=torch.Generator().manual_seed(1))


def results_of(tasks: Sequence[Task], folder: Path) -> list[dict[str, Any]]:
    """What every process returned, by task."""
    torch.multiprocessing.spawn(_run_process, (tuple(tasks), str(folder)), nprocs=WORLD_SIZE)
    return [torch.load(folder / f"results{rank}.pt") for rank in range(WORLD_SIZE)]


def _run_process(rank: int, tasks: Sequence[Task], folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    faulthandler.enable()
    warnings.simplefilter("error")
    # The first import of Inductor brings it.
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    results = {task.__name__: task(mesh) for task in tasks}
    torch.save(results, f"{folder}/results{rank}.pt")
    # A thread of gloo's may still hold the tensors of the last collective, also beyond
    # destroy_process_group(): device meshes keep their groups. Were it to drop them while the interpreter is
    # taken down, the process would crash (seen with torch 2.13: ProcessGroupGloo::runLoop, ~AsyncScatterWork,
    # take_gil, terminate). So the process ends at once, and none hangs up while another still talks.
    torch.distributed.barrier()
    os._exit(0)

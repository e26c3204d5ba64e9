"""What the first CUDA step of a process waits for: kernels compiled by NVRTC, or read from the cache.

    python benchmarks/first_use.py [--output benchmarks/results/first_use-h200.json]

Each figure is the median of new processes; the plain step needs one kernel, the clipped one needs two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

import fused_adamw
from fused_adamw import _C, kernel_cache, nvrtc
from measure import write_json

PROCESSES = 5

PROGRAM = """
import json, sys, time
import torch
from fused_adamw.cuda_kernels import StepVariant, kernels
torch.zeros(1, device="cuda")
seconds = {}
for name, load in {
    "step": lambda: kernels(0).step(StepVariant(in_place=True, amsgrad=False, weights="float32")),
    "statistics": lambda: kernels(0).stats(),
}.items():
    start = time.perf_counter()
    load()
    seconds[name] = time.perf_counter() - start
print(json.dumps(seconds))
"""


def first_use(cache: str) -> dict[str, float]:
    # NVRTC keeps code in the driver's cache, too: without this only the first process would compile.
    environment = {**os.environ, kernel_cache.ENVIRONMENT_VARIABLE: cache, "CUDA_CACHE_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    output = parser.parse_args().output
    compiled, cached = [], []
    for _ in range(PROCESSES):
        with tempfile.TemporaryDirectory() as cache:
            compiled.append(first_use(cache))
            cached.append(first_use(cache))
    found = {
        "conditions": {
            "date": date.today().isoformat(),
            "card": torch.cuda.get_device_name(),
            "driver": _C.cuda_driver_version(),
            "nvrtc": ".".join(map(str, nvrtc.version())),
            "torch": torch.__version__,
            "fused_adamw": fused_adamw.__version__,
        },
        "seconds": {"compiled": medians(compiled), "from the cache": medians(cached)},
    }
    print(json.dumps(found, indent=2))
    if output is not None:
        write_json(output, found)


if __name__ == "__main__":
    main()

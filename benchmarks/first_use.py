"""What the first CUDA step of a process waits for: kernels compiled by NVRTC, or read from the cache.

    python benchmarks/first_use.py [--output benchmarks/results/first_use-h200.json]

Each figure is the median of new processes. A clipped step needs its kernel and those of the statistics, which
are compiled at once, in threads.
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

PROCESSES = 3

LOADS = {
    "step": "kernels(0).step(variant)",
    "statistics": "kernels(0).stats()",
    "clipped step": "kernels(0).stats(lambda: [variant]); kernels(0).step(variant)",
}

PROGRAM = """
import time
import torch
from fused_adamw.cuda_kernels import StepVariant, kernels
variant = StepVariant(in_place=True, amsgrad=False, weights="float32")
torch.zeros(1, device="cuda")
start = time.perf_counter()
{load}
print(time.perf_counter() - start)
"""


def first_use(load: str, cache: str) -> float:
    # NVRTC keeps code in the driver's cache, too: without this only the first process would compile.
    environment = {**os.environ, kernel_cache.ENVIRONMENT_VARIABLE: cache, "CUDA_CACHE_DISABLE": "1"}
    program = PROGRAM.format(load=load)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    output = parser.parse_args().output
    compiled: dict[str, list[float]] = {name: [] for name in LOADS}
    cached: dict[str, list[float]] = {name: [] for name in LOADS}
    for name, load in list(LOADS.items()) * PROCESSES:
        with tempfile.TemporaryDirectory() as cache:
            compiled[name].append(first_use(load, cache))
            cached[name].append(first_use(load, cache))
    found = {
        "conditions": {
            "date": date.today().isoformat(),
            "card": torch.cuda.get_device_name(),
            "driver": _C.cuda_driver_version(),
            "nvrtc": ".".join(map(str, nvrtc.version())),
            "torch": torch.__version__,
            "fused_adamw": fused_adamw.__version__,
            "processors": os.cpu_count(),
        },
        "seconds": {
            name: {"compiled": statistics.median(compiled[name]), "cached": statistics.median(cached[name])}
            for name in LOADS
        },
    }
    print(json.dumps(found, indent=2))
    if output is not None:
        write_json(output, found)


if __name__ == "__main__":
    main()

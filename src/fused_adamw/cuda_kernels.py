"""The CUDA kernels of a device: compiled at first use, or taken from the cache."""

from __future__ import annotations

import functools
from pathlib import Path

from fused_adamw import _C, kernel_cache, nvrtc

# Beside the compiled module, which an editable install keeps apart from this file.
SOURCES = Path(_C.__file__).parent / "csrc"
HEADERS = (
    "adamw_update.h",
    "update_scalars.h",
    "gradient_stats.h",
    "cuda/launch_parameters.h",
    "cuda/device_support.cuh",
)
STEP = "cuda/adamw_step.cu"
STATS = "cuda/gradient_stats.cu"


def step_definitions(*, in_place: bool, amsgrad: bool) -> tuple[str, ...]:
    """The options that choose a variant of the step."""
    tensor = "InPlaceTensor" if in_place else "OutOfPlaceTensor"
    return (f"-DFUSED_ADAMW_TENSOR={tensor}", f"-DFUSED_ADAMW_AMSGRAD={str(amsgrad).lower()}")


def cubin(source: str, architecture: int, definitions: tuple[str, ...] = ()) -> bytes:
    """Machine code of a source file for a compute capability (90 for 9.0), through the cache."""
    text = (SOURCES / source).read_text()
    headers = {Path(name).name: (SOURCES / name).read_text() for name in HEADERS}
    key = repr((text, headers, definitions, nvrtc.OPTIONS, architecture, nvrtc.version()))

    def compiled() -> bytes:
        return nvrtc.compile_to_cubin(source, text, headers, architecture, definitions)[0]

    return kernel_cache.get_or_make(key, compiled)


class Kernels:
    """The kernels of one device; each is loaded when it is first asked for."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._load = functools.cache(self._load_module)

    def step(self, *, in_place: bool, amsgrad: bool) -> _C.CudaModule:
        """The module of a step."""
        return self._load(STEP, step_definitions(in_place=in_place, amsgrad=amsgrad))

    def stats(self) -> _C.CudaModule:
        """The module of the statistics."""
        return self._load(STATS, ())

    def _load_module(self, source: str, definitions: tuple[str, ...]) -> _C.CudaModule:
        architecture = _C.cuda_compute_capability(self._device)
        return _C.CudaModule(self._device, cubin(source, architecture, definitions))


@functools.cache
def kernels(device: int) -> Kernels:
    """The kernels of the CUDA device with this index."""
    return Kernels(device)

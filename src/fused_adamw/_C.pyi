"""The compiled kernels. They check nothing that ``torch_library/checks.py`` checks: call those first."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

def initialize(exchange_api: Any, tensor_type: type, parameter_type: type) -> None:
    """Tells the module how to read tensors: once, before any TensorTable is made."""

def only_plain_tensors(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether no tensor is of a subclass other than Parameter."""

def same_objects(found: list[Any], expected: list[Any]) -> bool:
    """Whether two lists hold the same objects."""

def planned_grads(params: list[Tensor], without_grad: list[bool]) -> list[Tensor] | None:
    """The gradients of the parameters that have one.

    None unless ``params[i].grad`` is None exactly where ``without_grad[i]`` is True.
    """

def parts_of_dicts(dicts: dict[Any, dict[Any, Any]]) -> list[Any]:
    """All objects that a dict of dicts consists of, and the number of entries of each dict."""

def are_parts_of_dicts(dicts: dict[Any, dict[Any, Any]], parts: list[Any]) -> bool:
    """Whether a dict of dicts consists of these very objects, in this order."""

class HeldTensors:
    """Keeps tensors alive, whatever storage they have, and makes reading them faster while it lives.

    Tensors of subclasses, and what is no tensor, are left out.
    """

    def __init__(self, objects: Sequence[Any]) -> None: ...

class TensorTable:
    """The tensors of one call, read through DLPack; valid while the caller holds the tensors.

    ``op`` names the checks that the layout must pass, ``written[i]`` says that the tensors of ``lists[i]``
    are written to; ``rounding_seeds`` are those of a step. Raises what torch raises for a tensor without
    readable storage.
    """

    def __init__(
        self,
        op: str,
        lists: Sequence[Sequence[Tensor]],
        written: Sequence[bool],
        rounding_seeds: Sequence[int] = ...,
    ) -> None: ...
    @property
    def weights(self) -> str:
        """How a step's weights are kept, the same for all its tensors: one of ``WEIGHT_FORMS``."""

    def layout_known(self) -> bool:
        """Whether the same op, dtypes, devices, shapes and strides were remembered before."""

    def remember_layout(self) -> None: ...
    @property
    def device_index(self) -> int:
        """The index of the device that the first tensor is on."""

    def list_size(self, index: int) -> int:
        """The number of tensors in a list; 0 where there is no such list."""

    def count_rows(self, index: int) -> int:
        """The number of rows that the gradients in a list make."""

WEIGHT_FORMS: list[str]
"""The forms of ``csrc/low_precision.h``: "float32", "master", "stochastic", "split"."""

class StepOptions:
    """The options of one group of tensors, as numbers."""

    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        grad_scale: float,
        clip: float,
        maximize: bool,
    ) -> None: ...

def find_overlap(
    tables: Sequence[TensorTable], elementwise: bool
) -> tuple[tuple[int, int, int], tuple[int, int, int]] | None:
    """The (table, list, index) of a written tensor and of another that shares memory with it.

    ``elementwise``: a read tensor may be exactly a written one of the same table and index.
    """

def find_bad_step(tables: Sequence[TensorTable]) -> tuple[int, int] | None:
    """The (table, index) of the first step counter that holds no count."""

def adamw_step_in_place(tables: Sequence[TensorTable], options: Sequence[StepOptions], threads: int) -> None:
    """One update of every table's tensors, and of their step counters, in one parallel region."""

def adamw_step(
    olds: Sequence[TensorTable],
    updateds: Sequence[TensorTable],
    options: Sequence[StepOptions],
    steps: Sequence[int],
    threads: int,
) -> None:
    """One update of the one tensor of each table, written to other storage, in one parallel region.

    ``steps[k]`` updates of entry k came before.
    """

ELEMENTS_PER_ROW: int
ROWS_PER_MERGE: int

def analyze_gradients(table: TensorTable, grad_scale: float, threads: int) -> None:
    """Lists: gradients, [rows]. One row per ELEMENTS_PER_ROW elements of each gradient."""

def analyze_and_merge(
    tables: Sequence[TensorTable], stats: TensorTable, grad_scale: float, hierarchical: bool, threads: int
) -> None:
    """The gradients of a step's tables into rows, and these into a report.

    Lists of ``stats``: [rows], [scratch], [report].
    """

def merge_rows(table: TensorTable) -> None:
    """Lists: [rows], [merged]. One row per ROWS_PER_MERGE rows."""

def merge_all_rows(table: TensorTable, hierarchical: bool) -> None:
    """Lists: [rows], [scratch], [report]. All rows into one."""

def clip_coefficient(report: Sequence[float], max_norm: float, epsilon: float) -> float:
    """``min(1, max_norm / (norm + epsilon))`` of a report's norm."""

class CudaDriverError(RuntimeError):
    """The CUDA driver is missing, or a call to it failed."""

def cuda_compute_capability(device: int) -> int:
    """Major * 10 + minor."""

def cuda_driver_version() -> int:
    """1000 * major + 10 * minor."""

class CudaRelaxedCapture:
    """In its ``with`` block, what concerns no captured stream is allowed while this thread captures."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

CUDA_LAYOUT: dict[str, int]
"""Where the members of the kernels' parameters lie: "Struct.member" in bytes; sizes; constants."""

class CudaLauncher:
    """What the functions below launch through."""

class CudaRecorder(CudaLauncher):
    """Keeps what would be launched: kernel, number of blocks and bytes of parameters.

    As on a device that has room for so many blocks of a step at once; by default as Triton's kernels take it.
    """

    def __init__(self, resident_blocks: int = 0) -> None: ...
    @property
    def launches(self) -> list[tuple[str, int, bytes]]: ...

class CudaModule(CudaLauncher):
    """Kernels of one cubin, loaded on one device for the life of the process.

    ``rounds``: of every step's blocks (``StepParameters`` in csrc); 0 for as many as suit the step.
    """

    def __init__(self, device: int, cubin: bytes, rounds: int = 0) -> None: ...

class CudaUploadingModule(CudaLauncher):
    """Kernels that take their parameters by pointer; ``allocate`` returns a tensor of so many bytes."""

    def __init__(self, device: int, allocate: Callable[[int], Tensor]) -> None: ...
    def add(self, kernel: str, cubin: bytes, entry: str, threads: int, shared_bytes: int) -> None: ...

class CudaGroupSettings:
    """The options of one group: numbers, or tensors of one element on the device.

    Valid while the caller holds the tensors.
    """

    def __init__(
        self,
        lr: float | Tensor,
        beta1: float | Tensor,
        beta2: float | Tensor,
        weight_decay: float,
        eps: float,
        maximize: bool,
    ) -> None: ...

class CudaStepSettings:
    """What all groups of a step share. ``max_norm`` below 0: no clipping."""

    def __init__(
        self,
        grad_scale: float | Tensor,
        found_inf: float | Tensor,
        clip: float,
        report: Tensor | None,
        max_norm: float,
        norm_epsilon: float,
    ) -> None: ...

# The counterparts of the functions above on the current stream of the module's device.
def cuda_step_in_place(
    launcher: CudaLauncher,
    tables: Sequence[TensorTable],
    groups: Sequence[CudaGroupSettings],
    settings: CudaStepSettings,
    after_analysis: bool = ...,
) -> None:
    """``after_analysis``: nothing was launched on the stream since ``cuda_analyze_and_merge``."""

def cuda_step_out_of_place(
    launcher: CudaLauncher,
    olds: Sequence[TensorTable],
    updateds: Sequence[TensorTable],
    steps: Sequence[float | Tensor],
    group: CudaGroupSettings,
    settings: CudaStepSettings,
) -> None: ...
def cuda_analyze_gradients(
    launcher: CudaLauncher, table: TensorTable, grad_scale: float | Tensor
) -> None: ...
def cuda_analyze_and_merge(
    analysis: CudaLauncher,
    merge: CudaLauncher,
    tables: Sequence[TensorTable],
    stats: TensorTable,
    grad_scale: float | Tensor,
    hierarchical: bool,
) -> None: ...
def cuda_merge_rows(launcher: CudaLauncher, table: TensorTable) -> None: ...
def cuda_merge_all_rows(launcher: CudaLauncher, table: TensorTable, hierarchical: bool) -> None: ...
def has_openmp_runtime() -> bool: ...
def cpu_capabilities() -> list[str]: ...
def cpu_capability() -> str: ...
def set_cpu_capability(name: str) -> None:
    """Raises ValueError, which names the choices, where the processor lacks it."""

"""How a step's elements are spread over CUDA blocks, seen through a recorder of launches, without a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fused_adamw import _C

# An H200 has 132 multiprocessors.
RESIDENT_BLOCKS = 132 * 6
ROUND = _C.CUDA_LAYOUT["kElementsPerRound"]


def blocks_of_step(
    sizes: list[int],
    resident_blocks: int,
    grad_dtype: torch.dtype = torch.float32,
    *,
    amsgrad: bool = False,
    weights: str = "float32",
) -> list[int]:
    """The number of blocks of each launch of a step of tensors of so many elements."""

    def make(dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(size, dtype=dtype) for size in sizes]

    maxima = make(torch.float32) if amsgrad else []
    steps = [torch.zeros(()) for _ in sizes]
    rounded = weights != "float32"
    params = make(torch.bfloat16 if rounded else torch.float32)
    masters = make(torch.int16 if weights == "split" else torch.float32) if rounded else []
    seeds = list(range(len(sizes))) if weights == "stochastic" else []
    lists = [params, make(grad_dtype), make(torch.float32), make(torch.float32), maxima, steps, masters]
    table = _C.TensorTable("test", lists, [True, False, True, True, True, True, True], seeds)
    assert table.weights == weights
    recorder = _C.CudaRecorder(resident_blocks)
    group = _C.CudaGroupSettings(1e-3, 0.9, 0.999, 0.01, 1e-8, False)
    settings = _C.CudaStepSettings(1.0, 0.0, 1.0, None, -1.0, 1e-6)
    _C.cuda_step_in_place(recorder, [table], [group], settings)
    return [blocks for _, blocks, _ in recorder.launches]


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [
        pytest.param([1], 1, id="one element"),
        pytest.param([ROUND * RESIDENT_BLOCKS], 1, id="as many as fit at once"),
        pytest.param([ROUND * RESIDENT_BLOCKS + 1], 2, id="one more"),
        pytest.param([2052] * 200, 1, id="200 tensors"),
        pytest.param([2052] * 400, 4, id="400 tensors, whose second blocks do not fit"),
        pytest.param([4 * ROUND * RESIDENT_BLOCKS], 4, id="four times as many as fit"),
        pytest.param([4 * ROUND * RESIDENT_BLOCKS + 1], 1, id="many times as many as fit"),
        pytest.param([768] * 400 + [768 * 768] * 12, 1, id="a model's"),
    ],
)
def test_few_elements_are_left_to_blocks_that_fit_at_once(sizes: list[int], rounds: int) -> None:
    blocks = sum(math.ceil(size / (rounds * ROUND)) for size in sizes)
    assert blocks_of_step(sizes, RESIDENT_BLOCKS) == [blocks]
    if rounds > 1:
        assert blocks <= RESIDENT_BLOCKS


MANY = [2 * ROUND * RESIDENT_BLOCKS] * 3


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("weights", "amsgrad", "rounds"),
    [
        ("float32", False, 1),
        ("float32", True, 1),
        ("master", False, 1),
        ("split", False, 2),
        ("split", True, 1),
        ("stochastic", False, 2),
        ("stochastic", True, 1),
    ],
)
def test_scalars_serve_two_rounds_of_what_takes_much_work(
    grad_dtype: torch.dtype, weights: str, amsgrad: bool, rounds: int
) -> None:
    blocks = blocks_of_step(MANY, RESIDENT_BLOCKS, grad_dtype, amsgrad=amsgrad, weights=weights)
    assert blocks == [3 * 2 * RESIDENT_BLOCKS // rounds]


def test_empty_tensors_have_no_blocks() -> None:
    assert blocks_of_step([0, 5, 0], RESIDENT_BLOCKS) == [1]


def test_all_launches_of_a_step_are_alike() -> None:
    # 1000 blocks of one round do not fit at once, 500 of two do; a launch takes 448 tensors.
    blocks = blocks_of_step([2 * ROUND] * 500, RESIDENT_BLOCKS)
    assert blocks == [448, 52]


def test_triton_has_programs_of_one_size() -> None:
    assert blocks_of_step([2 * ROUND * 5], 0) == [5]
    assert blocks_of_step([2 * ROUND * 5 + 1], 0) == [6]

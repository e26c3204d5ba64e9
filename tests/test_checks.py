"""Every refusal: its type, its words, and that nothing has been written.

Each case spoils one argument of a call that is otherwise right, and collects what is raised. A list is
spoiled at its beginning, middle and end, the call is made before and after a right one of the same layout and
repeated, and the words must be the same each time, those of the fake too where it can know.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from cases import (
    LISTS,
    SCALARS,
    Sample,
    Snapshot,
    assert_same_state,
    call_step,
    first_sample,
    lists_of,
    normal_sample,
    scalar,
    step_inplace_op,
    step_op,
)
from fused_adamw.torch_library import checks, step_inplace
from fused_adamw.torch_library.step_options import split_options

SHAPE = (2, 3, 4, 5)
FIELDS = dict(
    zip(("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "state_step"), LISTS, strict=True)
)
Spoil = Callable[[Tensor], Any]


def fill(text: str) -> str:
    return textwrap.fill(text, 105, subsequent_indent="    ", break_long_words=False)


def words(error: BaseException, device: torch.device, index: int | None = None) -> str:
    """What was raised, without the device's name; with ``index``, params[index] as param."""
    text = str(error).replace(f"{device},", "<device>,").replace(f"on {device};", "on <device>;")
    if index is not None:
        for field, name in FIELDS.items():
            text = text.replace(f"{name}[{index}]", field)
    return f"{type(error).__name__}: {text}"


def all_of(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return [tensor for tensors in lists for tensor in tensors]


def refusal(
    call: Callable[[], Any], tensors: Iterable[Any], device: torch.device, index: int | None = None
) -> str:
    """What ``call`` raises, twice in the same words, with all tensors unchanged."""
    before = Snapshot(tensors)
    found = set()
    for _ in range(2):
        with pytest.raises(Exception) as error:  # noqa: PT011 (the words are locked by the caller)
            call()
        found.add(words(error.value, device, index))
        before.assert_unchanged()
    return only(found)


def only(found: set[str]) -> str:
    assert len(found) == 1, found
    return found.pop()


def same_words(in_place: str, out_of_place: str) -> str:
    """The words that both ops use, each with its own name."""
    assert in_place == out_of_place.replace("fused_adamw::step", "fused_adamw::step_")
    return in_place.replace("fused_adamw::step_", "<op>")


def make_lists(device: torch.device) -> list[list[Any]]:
    return lists_of([normal_sample(SHAPE, amsgrad=True, seed=i, device=device) for i in range(3)])


def list_refusal(device: torch.device, spoil: dict[str, Spoil], fake: bool) -> str:
    """What ``step_`` raises where one of three parameters has spoiled tensors; its fake must say the same."""
    found = set()
    for index in range(3):
        for warm in (False, True):
            lists = make_lists(device)
            if warm:
                step_inplace_op(*lists)
            for field, change in spoil.items():
                tensors = lists[LISTS.index(FIELDS[field])]
                tensors[index] = change(tensors[index])
            found.add(refusal(partial(step_inplace_op, *lists), all_of(lists), device, index))
        if fake:
            found.add(fake_refusal(step_inplace_op, lists, {}, device, index))
    return only(found)


def tensor_refusal(device: torch.device, spoil: dict[str, Spoil], fake: bool) -> str:
    """What ``step.amsgrad`` raises for a sample with spoiled tensors; its fake must say the same."""
    sample = normal_sample(SHAPE, amsgrad=True, device=device)
    sample = replace(sample, **{field: change(getattr(sample, field)) for field, change in spoil.items()})
    found = {refusal(lambda: call_step(sample), sample.tensors, device)}
    if fake:
        arguments = (sample.param, sample.grad, *sample.moments, sample.step)
        found.add(fake_refusal(step_op.amsgrad, arguments, {}, device))
    return only(found)


def fake_refusal(
    op: Any, arguments: Any, options: dict[str, Any], device: torch.device, index: int | None = None
) -> str:
    mode = FakeTensorMode()
    arguments, options = tree_map_only(Tensor, mode.from_tensor, (arguments, options))
    with mode, pytest.raises(Exception) as error:  # noqa: PT011
        op(*arguments, **options)
    return words(error.value, device, index)


def refusals(device: torch.device, spoil: Spoil, fields: Iterable[str] = FIELDS, *, fake: bool = True) -> str:
    """What both ops raise where ``spoil`` changed one tensor of a parameter: the fields, then the words."""
    by_words: dict[str, list[str]] = {}
    for field in fields:
        text = list_refusal(device, {field: spoil}, fake)
        if field != "state_step":
            text = same_words(text, tensor_refusal(device, {field: spoil}, fake))
        text = re.sub(rf"\b{field} ", "<name> ", text)
        by_words.setdefault(text, []).append(field)
    return "\n".join(fill(f"{', '.join(fields)}: {text}") for text, fields in by_words.items())


def refusal_of_all(device: torch.device, spoil: Spoil) -> str:
    """What both ops raise where ``spoil`` changed a parameter and its gradient and moments alike."""
    changes = dict.fromkeys(list(FIELDS)[:5], spoil)
    in_place = list_refusal(device, changes, fake=True)
    return fill(same_words(in_place, tensor_refusal(device, changes, fake=True)))


# --- dtype and layout.


def test_float64(device: torch.device) -> None:
    assert_expected_inline(
        refusals(device, Tensor.double),
        """\
param, grad: TypeError: <op>: <name> has dtype torch.float64; torch.float32, torch.float16 or
    torch.bfloat16 is required
exp_avg, exp_avg_sq, max_exp_avg_sq: TypeError: <op>: <name> has dtype torch.float64; torch.float32 is
    required
state_step: TypeError: fused_adamw::step_: <name> has dtype torch.float64; torch.float32 is required""",
    )


def test_complex(device: torch.device) -> None:
    assert_expected_inline(
        refusals(device, lambda t: t.to(torch.complex64)),
        """\
param, grad: TypeError: <op>: <name> has dtype torch.complex64; torch.float32, torch.float16 or
    torch.bfloat16 is required
exp_avg, exp_avg_sq, max_exp_avg_sq: TypeError: <op>: <name> has dtype torch.complex64; torch.float32 is
    required
state_step: TypeError: fused_adamw::step_: <name> has dtype torch.complex64; torch.float32 is required""",
    )


def test_16_bit_parameters_and_states(device: torch.device) -> None:
    fields = [field for field in FIELDS if field != "grad"]
    assert_expected_inline(
        refusals(device, Tensor.bfloat16, fields),
        """\
param: TypeError: <op>: <name> has dtype torch.bfloat16 and no master weight; torch.float32, or a master
    weight, is required
exp_avg, exp_avg_sq, max_exp_avg_sq: TypeError: <op>: <name> has dtype torch.bfloat16; torch.float32 is
    required
state_step: TypeError: fused_adamw::step_: <name> has dtype torch.bfloat16; torch.float32 is required""",
    )
    assert_expected_inline(
        refusals(device, Tensor.half, fields),
        """\
param: TypeError: <op>: <name> has dtype torch.float16 and no master weight; torch.float32, or a master
    weight, is required
exp_avg, exp_avg_sq, max_exp_avg_sq: TypeError: <op>: <name> has dtype torch.float16; torch.float32 is
    required
state_step: TypeError: fused_adamw::step_: <name> has dtype torch.float16; torch.float32 is required""",
    )


def test_integers(device: torch.device) -> None:
    assert_expected_inline(
        refusals(device, Tensor.long),
        """\
param, grad: TypeError: <op>: <name> has dtype torch.int64; torch.float32, torch.float16 or
    torch.bfloat16 is required
exp_avg, exp_avg_sq, max_exp_avg_sq: TypeError: <op>: <name> has dtype torch.int64; torch.float32 is
    required
state_step: TypeError: fused_adamw::step_: <name> has dtype torch.int64; torch.float32 is required""",
    )
    assert_expected_inline(
        refusals(device, Tensor.bool, ["grad"]),
        """\
grad: TypeError: <op>: <name> has dtype torch.bool; torch.float32, torch.float16 or torch.bfloat16 is
    required""",
    )


def test_sparse(device: torch.device) -> None:
    # The fake mode has a refusal of its own for sparse tensors.
    assert_expected_inline(
        refusals(device, Tensor.to_sparse, fake=False),
        """\
param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq: TypeError: <op>: <name> has layout torch.sparse_coo; a
    dense tensor (torch.strided) is required
state_step: TypeError: fused_adamw::step_: <name> has layout torch.sparse_coo; a dense tensor
    (torch.strided) is required""",
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_compressed(device: torch.device) -> None:
    def to_csr(tensor: Tensor) -> Tensor:
        return tensor.reshape(6, 20).to_sparse_csr()

    assert_expected_inline(
        refusals(device, to_csr, ["param", "grad"], fake=False),
        """\
param, grad: TypeError: <op>: <name> has layout torch.sparse_csr; a dense tensor (torch.strided) is
    required""",
    )


# --- Shapes and strides.

LIKE_PARAM = ("grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
STRIDED = ("param", *LIKE_PARAM)


def test_another_shape(device: torch.device) -> None:
    assert_expected_inline(
        refusals(device, lambda t: t.new_zeros(2, 3, 5, 4)),
        """\
param: ValueError: <op>: grad has shape (2, 3, 4, 5); (2, 3, 5, 4), the parameter's, is required
grad, exp_avg, exp_avg_sq, max_exp_avg_sq: ValueError: <op>: <name> has shape (2, 3, 5, 4); (2, 3, 4, 5),
    the parameter's, is required
state_step: ValueError: fused_adamw::step_: <name> has shape (2, 3, 5, 4); shape () or (1,) is required""",
    )


def test_shapes_that_would_broadcast(device: torch.device) -> None:
    assert_expected_inline(
        refusals(device, lambda t: t[:1].clone(), LIKE_PARAM),
        """\
grad, exp_avg, exp_avg_sq, max_exp_avg_sq: ValueError: <op>: <name> has shape (1, 3, 4, 5); (2, 3, 4, 5),
    the parameter's, is required""",
    )
    assert_expected_inline(
        refusals(device, lambda t: t[0, 0, 0].clone(), LIKE_PARAM),
        """\
grad, exp_avg, exp_avg_sq, max_exp_avg_sq: ValueError: <op>: <name> has shape (5,); (2, 3, 4, 5), the
    parameter's, is required""",
    )
    assert_expected_inline(
        refusals(device, lambda t: t[0, 0, 0, 0].clone(), LIKE_PARAM),
        """\
grad, exp_avg, exp_avg_sq, max_exp_avg_sq: ValueError: <op>: <name> has shape (); (2, 3, 4, 5), the
    parameter's, is required""",
    )


def test_another_shape_in_many_dimensions(device: torch.device) -> None:
    """The layout of a tensor is remembered in parts of 16 numbers: of 7 dimensions, then of 8 each."""
    for dims in (6, 7, 8, 14, 15, 16, 30):
        ones = [1] * (dims - 2)
        lists = lists_of([normal_sample([*ones, 2, 3], seed=i, device=device) for i in range(3)])
        assert step_inplace_op(*lists) is None
        for shape in ([*ones, 3, 2], [3, *ones, 2], [*ones[:-1], 2, 1, 3], [1, *ones, 2, 3]):
            lists[1][1] = torch.ones(shape, device=device)
            text = refusal(lambda lists=lists: step_inplace_op(*lists), all_of(lists), device)  # type: ignore[misc]
            assert text.startswith("ValueError: fused_adamw::step_: grads[1] has shape"), text


def test_as_many_elements_in_another_shape(device: torch.device) -> None:
    assert_expected_inline(
        refusals(device, lambda t: t.view(6, 20), LIKE_PARAM),
        """\
grad, exp_avg, exp_avg_sq, max_exp_avg_sq: ValueError: <op>: <name> has shape (6, 20); (2, 3, 4, 5), the
    parameter's, is required""",
    )


def test_empty_tensors_of_another_shape(device: torch.device) -> None:
    sample = replace(normal_sample((3, 0), device=device), grad=torch.zeros((0, 3), device=device))
    lists = lists_of([sample])
    in_place = refusal(lambda: step_inplace_op(*lists), all_of(lists), device, 0)
    out_of_place = refusal(lambda: call_step(sample), sample.tensors, device)
    assert_expected_inline(
        same_words(in_place, out_of_place),
        """ValueError: <op>: grad has shape (0, 3); (3, 0), the parameter's, is required""",
    )


def test_strides_that_differ(device: torch.device) -> None:
    def channels_last(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last)

    assert_expected_inline(
        refusals(device, channels_last, STRIDED),
        """\
param: ValueError: <op>: grad has strides (60, 20, 5, 1); (60, 1, 15, 3), the parameter's, are required
grad, exp_avg, exp_avg_sq, max_exp_avg_sq: ValueError: <op>: <name> has strides (60, 1, 15, 3); (60, 20,
    5, 1), the parameter's, are required""",
    )


def test_a_transposed_gradient_of_a_square_parameter(device: torch.device) -> None:
    sample = normal_sample((7, 7), device=device)
    sample = replace(sample, grad=sample.grad.t())
    lists = lists_of([sample])
    in_place = refusal(lambda: step_inplace_op(*lists), all_of(lists), device, 0)
    out_of_place = refusal(lambda: call_step(sample), sample.tensors, device)
    assert_expected_inline(
        same_words(in_place, out_of_place),
        """ValueError: <op>: grad has strides (1, 7); (7, 1), the parameter's, are required""",
    )


def test_holes(device: torch.device) -> None:
    def with_holes(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor], dim=-1)[..., 0]

    assert_expected_inline(
        refusals(device, with_holes, STRIDED),
        """\
param: ValueError: <op>: <name> has shape (2, 3, 4, 5) and strides (120, 40, 10, 2); strides without
    holes or overlap (contiguous, or a permutation of it) are required
grad, exp_avg, exp_avg_sq, max_exp_avg_sq: ValueError: <op>: <name> has strides (120, 40, 10, 2); (60,
    20, 5, 1), the parameter's, are required""",
    )
    assert_expected_inline(
        refusal_of_all(device, with_holes),
        """\
ValueError: <op>: param has shape (2, 3, 4, 5) and strides (120, 40, 10, 2); strides without holes or
    overlap (contiguous, or a permutation of it) are required""",
    )


def test_expanded(device: torch.device) -> None:
    def expanded(tensor: Tensor) -> Tensor:
        return tensor[:, :1].clone().expand(SHAPE)

    assert_expected_inline(
        refusals(device, expanded, STRIDED),
        """\
param: ValueError: <op>: <name> has shape (2, 3, 4, 5) and strides (20, 0, 5, 1); strides without holes
    or overlap (contiguous, or a permutation of it) are required
grad, exp_avg, exp_avg_sq, max_exp_avg_sq: ValueError: <op>: <name> has strides (20, 0, 5, 1); (60, 20,
    5, 1), the parameter's, are required""",
    )
    assert_expected_inline(
        refusal_of_all(device, expanded),
        """\
ValueError: <op>: param has shape (2, 3, 4, 5) and strides (20, 0, 5, 1); strides without holes or
    overlap (contiguous, or a permutation of it) are required""",
    )


def test_overlap_within_a_tensor(device: torch.device) -> None:
    def overlapping(tensor: Tensor) -> Tensor:
        return tensor.flatten().as_strided((5, 4), (2, 1))

    assert_expected_inline(
        refusal_of_all(device, overlapping),
        """\
ValueError: <op>: param has shape (5, 4) and strides (2, 1); strides without holes or overlap
    (contiguous, or a permutation of it) are required""",
    )


def test_negated_views() -> None:
    # The dispatcher reads negated gradients right and refuses the others itself; the checks are for callers
    # who go around it.
    found = []
    for position, name in enumerate(LISTS):
        for index in range(3):
            lists = make_lists(torch.device("cpu"))
            lists[position][index] = torch._neg_view(lists[position][index])
            with pytest.raises(ValueError, match="negated") as error:
                checks.check_step_lists("op", checks.StepLists(*lists))
            found.append(fill(words(error.value, torch.device("cpu"), index)))
            if name != "grads":
                with pytest.raises(RuntimeError, match="negation"):
                    step_inplace_op(*lists)
    assert_expected_inline(
        "\n".join(dict.fromkeys(found)),
        """\
ValueError: op: param is a lazily negated view; a plain tensor, as resolve_neg() makes, is required
ValueError: op: grad is a lazily negated view; a plain tensor, as resolve_neg() makes, is required
ValueError: op: exp_avg is a lazily negated view; a plain tensor, as resolve_neg() makes, is required
ValueError: op: exp_avg_sq is a lazily negated view; a plain tensor, as resolve_neg() makes, is required
ValueError: op: max_exp_avg_sq is a lazily negated view; a plain tensor, as resolve_neg() makes, is
    required
ValueError: op: state_step is a lazily negated view; a plain tensor, as resolve_neg() makes, is required""",
    )


def test_a_negated_gradient_of_one_element_in_a_known_layout() -> None:
    # z.conj().imag is a view that only its neg bit tells from z.imag: where the layout is known from an
    # earlier call, a caller who goes around the dispatcher (the optimizer) must not get the wrong sign.
    options, amp = split_options(1e-3)

    def update(sample: Sample, grad: Tensor) -> None:
        lists = checks.StepLists(*lists_of([replace(sample, grad=grad)]))
        step_inplace.apply([step_inplace.StepGroup(lists, options)], amp)

    found = set()
    for shape in ((), (1,), (1, 1)):
        sample = normal_sample(shape, amsgrad=True)
        z = torch.complex(torch.ones(shape), torch.ones(shape))
        update(sample, z.imag)
        negated = z.conj().imag
        assert negated.is_neg()
        assert negated.stride() == z.imag.stride()
        call = partial(update, sample, negated)
        found.add(refusal(call, sample.state, torch.device("cpu"), 0))
    assert_expected_inline(
        fill(only(found)),
        """\
ValueError: fused_adamw::step_: grad is a lazily negated view; a plain tensor, as resolve_neg() makes, is
    required""",
    )


# --- Devices.


def test_another_device(device: torch.device) -> None:
    assert_expected_inline(
        refusals(device, lambda t: t.to("meta"), list(FIELDS)[1:]),
        """\
grad, exp_avg, exp_avg_sq, max_exp_avg_sq: ValueError: <op>: <name> is on meta; <device>, where the
    parameters are, is required
state_step: ValueError: fused_adamw::step_: <name> is on meta; <device>, where the parameters are, is
    required""",
    )
    # The first parameter says where all others must be.
    found = []
    for index in range(3):
        lists = make_lists(device)
        lists[0][index] = lists[0][index].to("meta")
        found.append(refusal(partial(step_inplace_op, *lists), all_of(lists), device))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step_: grads[0] is on <device>; meta, where the parameters are, is required
ValueError: fused_adamw::step_: params[1] is on meta; <device>, where the parameters are, is required
ValueError: fused_adamw::step_: params[2] is on meta; <device>, where the parameters are, is required""",
    )


def test_scalars_on_another_device(device: torch.device) -> None:
    sample = normal_sample(5, device=device)
    meta = torch.empty((), device="meta")
    right = {name: scalar(0.5, device) for name in ("lr", "beta1", "beta2")}
    found = []
    for name in ("lr", "beta1", "beta2", "grad_scale", "found_inf"):
        options = {**right, name: meta}
        found.append(refuse_options(sample, device, **options))
    found.append(
        refusal(lambda: step_op.tensor(*sample.tensors, meta.long(), **right), sample.tensors, device)
    )
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: <op>: lr is on meta; <device>, where the parameters are, is required
ValueError: <op>: beta1 is on meta; <device>, where the parameters are, is required
ValueError: <op>: beta2 is on meta; <device>, where the parameters are, is required
ValueError: <op>: grad_scale is on meta; <device>, where the parameters are, is required
ValueError: <op>: found_inf is on meta; <device>, where the parameters are, is required
ValueError: fused_adamw::step: step is on meta; <device>, where the parameters are, is required""",
    )


def test_a_device_without_kernels() -> None:
    with pytest.raises(ValueError, match="required") as error:
        checks.check_backend("op", torch.device("meta"))
    assert str(error.value).startswith("op: the parameters are on meta; a device of type ")


def test_meta_tensors_alone_are_only_described() -> None:
    new = call_step(normal_sample(SHAPE, amsgrad=True).map(lambda t: t.to("meta")))
    assert {(t.device.type, t.shape, t.dtype) for t in new.state} == {("meta", SHAPE, torch.float32)}
    lists = lists_of([normal_sample(SHAPE).map(lambda t: t.to("meta"))])
    assert step_inplace_op(*lists) is None


# --- The number of tensors, and what is no tensor.


def test_list_lengths(device: torch.device) -> None:
    found = []
    for position in range(len(LISTS)):
        for change in (
            lambda tensors: tensors[:2],
            lambda tensors: [*tensors, torch.zeros(SHAPE, device=device)],
        ):
            lists = make_lists(device)
            lists[position] = change(lists[position])
            found.append(refusal(partial(step_inplace_op, *lists), all_of(lists), device))
            assert fake_refusal(step_inplace_op, lists, {}, device) == found[-1]
    for position in range(len(LISTS)):
        lists = make_lists(device)
        lists[position] = []
        if LISTS[position] == "max_exp_avg_sqs":
            continue
        found.append(refusal(partial(step_inplace_op, *lists), all_of(lists), device))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step_: grads has 3 tensors; 2, as params, is required
ValueError: fused_adamw::step_: grads has 3 tensors; 4, as params, is required
ValueError: fused_adamw::step_: grads has 2 tensors; 3, as params, is required
ValueError: fused_adamw::step_: grads has 4 tensors; 3, as params, is required
ValueError: fused_adamw::step_: exp_avgs has 2 tensors; 3, as params, is required
ValueError: fused_adamw::step_: exp_avgs has 4 tensors; 3, as params, is required
ValueError: fused_adamw::step_: exp_avg_sqs has 2 tensors; 3, as params, is required
ValueError: fused_adamw::step_: exp_avg_sqs has 4 tensors; 3, as params, is required
ValueError: fused_adamw::step_: max_exp_avg_sqs has 2 tensors; 3, as params, is required
ValueError: fused_adamw::step_: max_exp_avg_sqs has 4 tensors; 3, as params, is required
ValueError: fused_adamw::step_: state_steps has 2 tensors; 3, as params, is required
ValueError: fused_adamw::step_: state_steps has 4 tensors; 3, as params, is required
ValueError: fused_adamw::step_: grads has 3 tensors; 0, as params, is required
ValueError: fused_adamw::step_: grads has 0 tensors; 3, as params, is required
ValueError: fused_adamw::step_: exp_avgs has 0 tensors; 3, as params, is required
ValueError: fused_adamw::step_: exp_avg_sqs has 0 tensors; 3, as params, is required
ValueError: fused_adamw::step_: state_steps has 0 tensors; 3, as params, is required""",
    )


def test_a_gradient_without_parameters(device: torch.device) -> None:
    grad = torch.ones(3, device=device)
    text = refusal(lambda: step_inplace_op([], [grad], [], [], [], []), [grad], device)
    assert_expected_inline(
        text, """ValueError: fused_adamw::step_: grads has 1 tensors; 0, as params, is required"""
    )


@pytest.mark.parametrize(
    "thing", [None, 1.0, "tensor", [torch.zeros(SHAPE)]], ids=["None", "float", "str", "list"]
)
def test_what_is_no_tensor(device: torch.device, thing: Any) -> None:
    for position, name in enumerate(LISTS):
        for index in range(3):
            lists = make_lists(device)
            lists[position][index] = thing
            before = Snapshot(all_of(lists))
            with pytest.raises(RuntimeError, match=rf"Expected a value of type 'List\[Tensor\]'.*'{name}'"):
                step_inplace_op(*lists)
            before.assert_unchanged()


def test_what_is_no_tensor_around_the_dispatcher() -> None:
    lists = make_lists(torch.device("cpu"))
    lists[1][1] = 1.0
    options, amp = split_options(1e-3)
    group = step_inplace.StepGroup(checks.StepLists(*lists), options)
    before = Snapshot(all_of(lists))
    with pytest.raises(RuntimeError, match="Expected a value of type"):
        step_inplace.apply([group], amp)
    before.assert_unchanged()


def test_a_part_of_the_state(device: torch.device) -> None:
    found = []
    for missing in (["exp_avg"], ["exp_avg_sq"], ["max_exp_avg_sq"], ["exp_avg", "exp_avg_sq"]):
        spoil = dict.fromkeys(missing, lambda _: None)
        found.append(fill(tensor_refusal(device, spoil, fake=True)))
    sample = replace(normal_sample(5, device=device), exp_avg=None)
    found.append(fill(refusal(lambda: call_step(sample), sample.tensors, device)))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step: exp_avg_sq, max_exp_avg_sq given without exp_avg; all of the state, or
    None for all before the first update, is required
ValueError: fused_adamw::step: exp_avg, max_exp_avg_sq given without exp_avg_sq; all of the state, or
    None for all before the first update, is required
ValueError: fused_adamw::step: exp_avg, exp_avg_sq given without max_exp_avg_sq; all of the state, or
    None for all before the first update, is required
ValueError: fused_adamw::step: max_exp_avg_sq given without exp_avg, exp_avg_sq; all of the state, or
    None for all before the first update, is required
ValueError: fused_adamw::step: exp_avg_sq given without exp_avg; all of the state, or None for all before
    the first update, is required""",
    )


# --- Options and scalars.


def refuse_options(sample: Sample, device: torch.device, *, fake: bool = False, **options: Any) -> str:
    """What both ops raise for these options; with ``fake``, where their values are not known either."""
    tensors = any(isinstance(options.get(name), Tensor) for name in ("lr", "beta1", "beta2"))
    in_place, out_of_place, step = (
        (step_inplace_op.tensor, step_op.tensor, scalar(sample.step, device, torch.int64))
        if tensors
        else (step_inplace_op.default, step_op.default, sample.step)
    )
    lists = lists_of([sample])
    arguments = all_of(lists) + list(options.values())
    found = same_words(
        refusal(lambda: in_place(*lists, **options), arguments, device, 0),
        refusal(lambda: out_of_place(*sample.tensors, step, **options), arguments, device),
    )
    if fake:
        for op, given in ((in_place, lists), (out_of_place, (*sample.tensors, step))):
            by_fake = fake_refusal(op, given, options, device, 0)
            assert by_fake.replace(op.name().partition(".")[0], "<op>") == found
    return fill(found)


BAD = (-1e-3, float("nan"), float("inf"), float("-inf"))


def test_options_out_of_range(device: torch.device) -> None:
    sample = normal_sample(5, device=device)
    found = []
    for name in ("lr", "weight_decay", "eps"):
        found += [refuse_options(sample, device, **{name: value}) for value in BAD]
    for name in ("beta1", "beta2"):
        found += [refuse_options(sample, device, **{name: value}) for value in (*BAD, 1.0, 1.5)]
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: <op>: lr is -0.001; a finite number of at least 0 is required
ValueError: <op>: lr is nan; a finite number of at least 0 is required
ValueError: <op>: lr is inf; a finite number of at least 0 is required
ValueError: <op>: lr is -inf; a finite number of at least 0 is required
ValueError: <op>: weight_decay is -0.001; a finite number of at least 0 is required
ValueError: <op>: weight_decay is nan; a finite number of at least 0 is required
ValueError: <op>: weight_decay is inf; a finite number of at least 0 is required
ValueError: <op>: weight_decay is -inf; a finite number of at least 0 is required
ValueError: <op>: eps is -0.001; a finite number of at least 0 is required
ValueError: <op>: eps is nan; a finite number of at least 0 is required
ValueError: <op>: eps is inf; a finite number of at least 0 is required
ValueError: <op>: eps is -inf; a finite number of at least 0 is required
ValueError: <op>: beta1 is -0.001; a number of at least 0 and below 1 is required
ValueError: <op>: beta1 is nan; a number of at least 0 and below 1 is required
ValueError: <op>: beta1 is inf; a number of at least 0 and below 1 is required
ValueError: <op>: beta1 is -inf; a number of at least 0 and below 1 is required
ValueError: <op>: beta1 is 1.0; a number of at least 0 and below 1 is required
ValueError: <op>: beta1 is 1.5; a number of at least 0 and below 1 is required
ValueError: <op>: beta2 is -0.001; a number of at least 0 and below 1 is required
ValueError: <op>: beta2 is nan; a number of at least 0 and below 1 is required
ValueError: <op>: beta2 is inf; a number of at least 0 and below 1 is required
ValueError: <op>: beta2 is -inf; a number of at least 0 and below 1 is required
ValueError: <op>: beta2 is 1.0; a number of at least 0 and below 1 is required
ValueError: <op>: beta2 is 1.5; a number of at least 0 and below 1 is required""",
    )


def test_tensor_options_out_of_range(readable_device: torch.device) -> None:
    device = readable_device
    sample = normal_sample(5, device=device)
    right = {name: scalar(0.5, device) for name in ("lr", "beta1", "beta2")}
    for name in right:
        for value in (*BAD, 1.0) if name != "lr" else BAD:
            for shape in ((), (1,)):
                text = refuse_options(sample, device, **{**right, name: scalar(value, device, shape=shape)})
                assert text == refuse_options(sample, device, **{name: value})


def test_scalar_tensors_of_another_shape_or_dtype(device: torch.device) -> None:
    sample = normal_sample(5, device=device)
    right = {name: scalar(0.5, device) for name in ("lr", "beta1", "beta2")}
    found = []
    for name in ("lr", "beta1", "beta2", "grad_scale", "found_inf"):
        for shape in ((0,), (2,), (1, 1)):
            wrong = {name: scalar(0.5, device, shape=shape)}
            found.append(refuse_options(sample, device, fake=True, **{**right, **wrong}))
        for dtype in (torch.float16, torch.int64, torch.complex64):
            wrong = {name: scalar(1, device, dtype)}
            found.append(refuse_options(sample, device, fake=True, **{**right, **wrong}))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: <op>: lr has shape (0,); shape () or (1,) is required
ValueError: <op>: lr has shape (2,); shape () or (1,) is required
ValueError: <op>: lr has shape (1, 1); shape () or (1,) is required
TypeError: <op>: lr has dtype torch.float16; torch.float32 or torch.float64 is required
TypeError: <op>: lr has dtype torch.int64; torch.float32 or torch.float64 is required
TypeError: <op>: lr has dtype torch.complex64; torch.float32 or torch.float64 is required
ValueError: <op>: beta1 has shape (0,); shape () or (1,) is required
ValueError: <op>: beta1 has shape (2,); shape () or (1,) is required
ValueError: <op>: beta1 has shape (1, 1); shape () or (1,) is required
TypeError: <op>: beta1 has dtype torch.float16; torch.float32 or torch.float64 is required
TypeError: <op>: beta1 has dtype torch.int64; torch.float32 or torch.float64 is required
TypeError: <op>: beta1 has dtype torch.complex64; torch.float32 or torch.float64 is required
ValueError: <op>: beta2 has shape (0,); shape () or (1,) is required
ValueError: <op>: beta2 has shape (2,); shape () or (1,) is required
ValueError: <op>: beta2 has shape (1, 1); shape () or (1,) is required
TypeError: <op>: beta2 has dtype torch.float16; torch.float32 or torch.float64 is required
TypeError: <op>: beta2 has dtype torch.int64; torch.float32 or torch.float64 is required
TypeError: <op>: beta2 has dtype torch.complex64; torch.float32 or torch.float64 is required
ValueError: <op>: grad_scale has shape (0,); shape () or (1,) is required
ValueError: <op>: grad_scale has shape (2,); shape () or (1,) is required
ValueError: <op>: grad_scale has shape (1, 1); shape () or (1,) is required
TypeError: <op>: grad_scale has dtype torch.float16; torch.float32 or torch.float64 is required
TypeError: <op>: grad_scale has dtype torch.int64; torch.float32 or torch.float64 is required
TypeError: <op>: grad_scale has dtype torch.complex64; torch.float32 or torch.float64 is required
ValueError: <op>: found_inf has shape (0,); shape () or (1,) is required
ValueError: <op>: found_inf has shape (2,); shape () or (1,) is required
ValueError: <op>: found_inf has shape (1, 1); shape () or (1,) is required
TypeError: <op>: found_inf has dtype torch.float16; torch.float32, torch.float64 or torch.bool is
    required
TypeError: <op>: found_inf has dtype torch.int64; torch.float32, torch.float64 or torch.bool is required
TypeError: <op>: found_inf has dtype torch.complex64; torch.float32, torch.float64 or torch.bool is
    required""",
    )


def test_a_step_tensor_of_another_shape_or_dtype(device: torch.device) -> None:
    sample = normal_sample(5, device=device)
    right = {name: scalar(0.5, device) for name in ("lr", "beta1", "beta2")}
    found = []
    for step in (
        *(scalar(1, device, torch.int64, shape) for shape in ((0,), (2,), (1, 1))),
        *(scalar(1, device, dtype) for dtype in (torch.int32, torch.float16, torch.bool)),
    ):
        text = refusal(partial(step_op.tensor, *sample.tensors, step, **right), sample.tensors, device)
        found.append(fill(text))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step: step has shape (0,); shape () or (1,) is required
ValueError: fused_adamw::step: step has shape (2,); shape () or (1,) is required
ValueError: fused_adamw::step: step has shape (1, 1); shape () or (1,) is required
TypeError: fused_adamw::step: step has dtype torch.int32; torch.float32, torch.float64 or torch.int64 is
    required
TypeError: fused_adamw::step: step has dtype torch.float16; torch.float32, torch.float64 or torch.int64
    is required
TypeError: fused_adamw::step: step has dtype torch.bool; torch.float32, torch.float64 or torch.int64 is
    required""",
    )


def test_step_counters_of_another_shape(device: torch.device) -> None:
    found = [
        refusals(device, lambda t, s=shape: t.new_zeros(s), ["state_step"]) for shape in ((0,), (2,), (1, 1))
    ]
    assert_expected_inline(
        "\n".join(found),
        """\
state_step: ValueError: fused_adamw::step_: <name> has shape (0,); shape () or (1,) is required
state_step: ValueError: fused_adamw::step_: <name> has shape (2,); shape () or (1,) is required
state_step: ValueError: fused_adamw::step_: <name> has shape (1, 1); shape () or (1,) is required""",
    )


NO_COUNTS = (-1.0, 0.5, 1e-40, float("nan"), float("inf"), float("-inf"), 2.0**63, 2.0**100)


def test_step_counters_that_are_no_counts(readable_device: torch.device) -> None:
    device = readable_device
    found = [
        refusals(device, lambda t, v=value: t.new_tensor(v), ["state_step"], fake=False)
        for value in NO_COUNTS
    ]
    assert_expected_inline(
        "\n".join(found),
        """\
state_step: ValueError: fused_adamw::step_: <name> is -1.0; a whole number of at least 0 and below 2^63 -
    1 is required
state_step: ValueError: fused_adamw::step_: <name> is 0.5; a whole number of at least 0 and below 2^63 -
    1 is required
state_step: ValueError: fused_adamw::step_: <name> is 9.99994610111476e-41; a whole number of at least 0
    and below 2^63 - 1 is required
state_step: ValueError: fused_adamw::step_: <name> is nan; a whole number of at least 0 and below 2^63 -
    1 is required
state_step: ValueError: fused_adamw::step_: <name> is inf; a whole number of at least 0 and below 2^63 -
    1 is required
state_step: ValueError: fused_adamw::step_: <name> is -inf; a whole number of at least 0 and below 2^63 -
    1 is required
state_step: ValueError: fused_adamw::step_: <name> is 9.223372036854776e+18; a whole number of at least 0
    and below 2^63 - 1 is required
state_step: ValueError: fused_adamw::step_: <name> is 1.2676506002282294e+30; a whole number of at least
    0 and below 2^63 - 1 is required""",
    )


def test_steps_that_are_no_counts(readable_device: torch.device) -> None:
    device = readable_device
    sample = normal_sample(5, device=device)
    found = []
    for step in (-1, -(2**63), 2**63 - 1):
        given = replace(sample, step=step)
        texts = {
            refusal(partial(call_step, given, scalars=scalars), sample.tensors, device) for scalars in SCALARS
        }
        found.append(fill(only(texts)))
    right = {name: scalar(0.5, device) for name in ("lr", "beta1", "beta2")}
    for value in NO_COUNTS:
        step = scalar(value, device)
        text = refusal(partial(step_op.tensor, *sample.tensors, step, **right), sample.tensors, device)
        found.append(fill(text))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step: step is -1; a whole number of at least 0 and below 2^63 - 1 is required
ValueError: fused_adamw::step: step is -9223372036854775808; a whole number of at least 0 and below 2^63
    - 1 is required
ValueError: fused_adamw::step: step is 9223372036854775807; a whole number of at least 0 and below 2^63 -
    1 is required
ValueError: fused_adamw::step: step is -1.0; a whole number of at least 0 and below 2^63 - 1 is required
ValueError: fused_adamw::step: step is 0.5; a whole number of at least 0 and below 2^63 - 1 is required
ValueError: fused_adamw::step: step is 1e-40; a whole number of at least 0 and below 2^63 - 1 is required
ValueError: fused_adamw::step: step is nan; a whole number of at least 0 and below 2^63 - 1 is required
ValueError: fused_adamw::step: step is inf; a whole number of at least 0 and below 2^63 - 1 is required
ValueError: fused_adamw::step: step is -inf; a whole number of at least 0 and below 2^63 - 1 is required
ValueError: fused_adamw::step: step is 9.223372036854776e+18; a whole number of at least 0 and below 2^63
    - 1 is required
ValueError: fused_adamw::step: step is 1.2676506002282294e+30; a whole number of at least 0 and below
    2^63 - 1 is required""",
    )


def test_a_step_of_another_type(device: torch.device) -> None:
    sample = normal_sample(5, device=device)
    for step in (1.5, 2**63, "1", None):
        with pytest.raises(RuntimeError, match="Expected a value of type 'int' for argument 'step'"):
            step_op.default(*sample.tensors, step)


BAD_SCALES = (0.0, -0.0, -1.0, float("inf"), float("nan"), 1e-39, 2.0**-128, 1e39)


def test_grad_scale(readable_device: torch.device) -> None:
    device = readable_device
    sample = normal_sample(5, device=device)
    found = [refuse_options(sample, device, grad_scale=scalar(value, device)) for value in BAD_SCALES]
    for value in BAD_SCALES[:-1]:
        for shape in ((), (1,)):
            # Also where the step would be skipped.
            refuse_options(sample, device, grad_scale=scalar(value, device, torch.float32, shape))
            refuse_options(
                sample,
                device,
                grad_scale=scalar(value, device, torch.float32, shape),
                found_inf=scalar(1.0, device),
            )
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: <op>: grad_scale is 0.0; a positive finite number whose reciprocal is finite in float32 is
    required
ValueError: <op>: grad_scale is -0.0; a positive finite number whose reciprocal is finite in float32 is
    required
ValueError: <op>: grad_scale is -1.0; a positive finite number whose reciprocal is finite in float32 is
    required
ValueError: <op>: grad_scale is inf; a positive finite number whose reciprocal is finite in float32 is
    required
ValueError: <op>: grad_scale is nan; a positive finite number whose reciprocal is finite in float32 is
    required
ValueError: <op>: grad_scale is 1e-39; a positive finite number whose reciprocal is finite in float32 is
    required
ValueError: <op>: grad_scale is 2.938735877055719e-39; a positive finite number whose reciprocal is
    finite in float32 is required
ValueError: <op>: grad_scale is 1e+39; a positive finite number whose reciprocal is finite in float32 is
    required""",
    )


def test_the_least_grad_scale(device: torch.device) -> None:
    # 2^-128 has the reciprocal 2^128, which is infinite in float32; the next float32 has a finite one.
    least = checks.LEAST_GRAD_SCALE
    assert torch.tensor(least).item() == least
    assert (1.0 / torch.tensor(least)).isfinite()
    assert (1.0 / torch.tensor(2.0**-128)).isinf()
    call_step(normal_sample(5, device=device), grad_scale=scalar(least, device))


def test_a_skipped_step_is_checked_too(device: torch.device) -> None:
    sample = normal_sample(5, device=device)
    found_inf = scalar(1.0, device)
    found = [
        refuse_options(sample, device, lr=-1.0, found_inf=found_inf),
        refuse_options(replace(sample, grad=sample.grad.double()), device, found_inf=found_inf),
    ]
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: <op>: lr is -1.0; a finite number of at least 0 is required
TypeError: <op>: grad has dtype torch.float64; torch.float32, torch.float16 or torch.bfloat16 is required""",
    )


# --- Shared memory.

WHY = (
    "; a tensor that is written may share memory with no other tensor (a gradient that is exactly a tensor "
    "of its own parameter may)"
)


def refuse_lists(device: torch.device, lists: list[list[Tensor]]) -> str:
    text = refusal(lambda: step_inplace_op(*lists), all_of(lists), device)
    assert text.endswith(WHY)
    return text.removesuffix(WHY)


def test_overlap_with_a_written_tensor(device: torch.device) -> None:
    def overlapping(shift: int) -> list[list[Tensor]]:
        lists = lists_of([normal_sample(64, amsgrad=True, seed=i, device=device) for i in range(3)])
        base = torch.rand(200, device=device)
        lists[0][1] = base[64:128]
        lists[1][1] = base[64 + shift : 128 + shift]
        return lists

    found = {refuse_lists(device, overlapping(shift)) for shift in (-63, -17, -1, 1, 17, 63)}
    assert_expected_inline(
        only(found), """ValueError: fused_adamw::step_: params[1] and grads[1] share memory"""
    )
    for shift in (-64, 0, 64):
        assert step_inplace_op(*overlapping(shift)) is None


def test_a_gradient_over_part_of_a_written_tensor(device: torch.device) -> None:
    found = []
    for position, name in enumerate(LISTS[:5]):
        if name == "grads":
            continue
        lists = lists_of([normal_sample(64, amsgrad=True, seed=i, device=device) for i in range(3)])
        # 16-bit gradients of 64 elements in the first half of 64 float32.
        lists[1][2] = lists[position][2].view(torch.float16)[:64]
        found.append(refuse_lists(device, lists))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step_: params[2] and grads[2] share memory
ValueError: fused_adamw::step_: exp_avgs[2] and grads[2] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[2] and grads[2] share memory
ValueError: fused_adamw::step_: max_exp_avg_sqs[2] and grads[2] share memory""",
    )


def test_a_gradient_that_is_a_tensor_of_another_parameter(device: torch.device) -> None:
    found = []
    for position, name in enumerate(LISTS[:5]):
        if name == "grads":
            continue
        for i, j in ((0, 2), (2, 0), (1, 0)):
            lists = make_lists(device)
            lists[1][j] = lists[position][i]
            found.append(refuse_lists(device, lists))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step_: params[0] and grads[2] share memory
ValueError: fused_adamw::step_: params[2] and grads[0] share memory
ValueError: fused_adamw::step_: params[1] and grads[0] share memory
ValueError: fused_adamw::step_: exp_avgs[0] and grads[2] share memory
ValueError: fused_adamw::step_: exp_avgs[2] and grads[0] share memory
ValueError: fused_adamw::step_: exp_avgs[1] and grads[0] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[0] and grads[2] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[2] and grads[0] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[1] and grads[0] share memory
ValueError: fused_adamw::step_: max_exp_avg_sqs[0] and grads[2] share memory
ValueError: fused_adamw::step_: max_exp_avg_sqs[2] and grads[0] share memory
ValueError: fused_adamw::step_: max_exp_avg_sqs[1] and grads[0] share memory""",
    )


def test_a_gradient_that_comes_to_share_memory(device: torch.device) -> None:
    """What shared nothing in the calls before is remembered."""
    lists = make_lists(device)
    right = list(lists[1])
    found = []
    for wrong in (lists[0][0], lists[3][2]):
        for grads in (right, right, [grad.clone() for grad in right], right):
            lists[1][:] = grads
            assert step_inplace_op(*lists) is None
        lists[1][1] = wrong
        found += [refuse_lists(device, lists), refuse_lists(device, lists)]
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step_: params[0] and grads[1] share memory
ValueError: fused_adamw::step_: params[0] and grads[1] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[2] and grads[1] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[2] and grads[1] share memory""",
    )


def test_two_written_tensors_that_share_memory(device: torch.device) -> None:
    written = [position for position, name in enumerate(LISTS[:5]) if name != "grads"]
    found = []
    for n, position in enumerate(written):
        for other in written[n + 1 :]:
            lists = make_lists(device)
            lists[other][1] = lists[position][1]
            found.append(refuse_lists(device, lists))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step_: params[1] and exp_avgs[1] share memory
ValueError: fused_adamw::step_: params[1] and exp_avg_sqs[1] share memory
ValueError: fused_adamw::step_: params[1] and max_exp_avg_sqs[1] share memory
ValueError: fused_adamw::step_: exp_avgs[1] and exp_avg_sqs[1] share memory
ValueError: fused_adamw::step_: exp_avgs[1] and max_exp_avg_sqs[1] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[1] and max_exp_avg_sqs[1] share memory""",
    )


def test_duplicates(device: torch.device) -> None:
    found = []
    for position, name in enumerate(LISTS):
        if name == "grads":
            continue
        for i, j in ((0, 1), (0, 2), (1, 2)):
            lists = make_lists(device)
            lists[position][j] = lists[position][i].view(lists[position][i].shape)
            found.append(refuse_lists(device, lists))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step_: params[0] and params[1] share memory
ValueError: fused_adamw::step_: params[0] and params[2] share memory
ValueError: fused_adamw::step_: params[1] and params[2] share memory
ValueError: fused_adamw::step_: exp_avgs[0] and exp_avgs[1] share memory
ValueError: fused_adamw::step_: exp_avgs[0] and exp_avgs[2] share memory
ValueError: fused_adamw::step_: exp_avgs[1] and exp_avgs[2] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[0] and exp_avg_sqs[1] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[0] and exp_avg_sqs[2] share memory
ValueError: fused_adamw::step_: exp_avg_sqs[1] and exp_avg_sqs[2] share memory
ValueError: fused_adamw::step_: max_exp_avg_sqs[0] and max_exp_avg_sqs[1] share memory
ValueError: fused_adamw::step_: max_exp_avg_sqs[0] and max_exp_avg_sqs[2] share memory
ValueError: fused_adamw::step_: max_exp_avg_sqs[1] and max_exp_avg_sqs[2] share memory
ValueError: fused_adamw::step_: state_steps[0] and state_steps[1] share memory
ValueError: fused_adamw::step_: state_steps[0] and state_steps[2] share memory
ValueError: fused_adamw::step_: state_steps[1] and state_steps[2] share memory""",
    )


def test_a_step_counter_in_other_memory(device: torch.device) -> None:
    found = []
    for position in (0, 1, 2):
        lists = make_lists(device)
        lists[position][0].zero_()
        lists[5][1] = lists[position][0].view(-1)[-1]
        found.append(refuse_lists(device, lists))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step_: params[0] and state_steps[1] share memory
ValueError: fused_adamw::step_: state_steps[1] and grads[0] share memory
ValueError: fused_adamw::step_: exp_avgs[0] and state_steps[1] share memory""",
    )


def test_a_scalar_in_the_memory_of_a_written_tensor(device: torch.device) -> None:
    right = {name: scalar(0.5, device, torch.float32) for name in ("lr", "beta1", "beta2")}
    found = []
    for name in ("lr", "beta1", "beta2", "grad_scale", "found_inf"):
        for position in (0, 5):
            lists = make_lists(device)
            shared = lists[position][1].fill_(1.0 if name == "grad_scale" else 0.0).view(-1)[-1]
            options = {**right, name: shared}
            text = refusal(partial(step_inplace_op.tensor, *lists, **options), all_of(lists), device)
            assert text.endswith(WHY)
            found.append(text.removesuffix(WHY))
    assert_expected_inline(
        "\n".join(found),
        """\
ValueError: fused_adamw::step_: params[1] and lr share memory
ValueError: fused_adamw::step_: state_steps[1] and lr share memory
ValueError: fused_adamw::step_: params[1] and beta1 share memory
ValueError: fused_adamw::step_: state_steps[1] and beta1 share memory
ValueError: fused_adamw::step_: params[1] and beta2 share memory
ValueError: fused_adamw::step_: state_steps[1] and beta2 share memory
ValueError: fused_adamw::step_: params[1] and grad_scale share memory
ValueError: fused_adamw::step_: state_steps[1] and grad_scale share memory
ValueError: fused_adamw::step_: params[1] and found_inf share memory
ValueError: fused_adamw::step_: state_steps[1] and found_inf share memory""",
    )


def test_freed_storage(device: torch.device) -> None:
    # What sharded training does between uses; a kernel that read there would crash.
    found = []
    for position in range(len(LISTS)):
        lists = make_lists(device)
        rest = [tensor for tensor in all_of(lists) if tensor is not lists[position][1]]
        lists[position][1].untyped_storage().resize_(0)
        found.append(refusal(partial(step_inplace_op, *lists), rest, device))
    sample = normal_sample(5, device=device)
    rest = [sample.param, *sample.moments]
    sample.grad.untyped_storage().resize_(0)
    found.append(refusal(partial(call_step, sample), rest, device))
    assert_expected_inline(
        "\n".join(dict.fromkeys(found)),
        """\
ValueError: fused_adamw::step_: params[1] has elements but no storage for them, which is required
ValueError: fused_adamw::step_: grads[1] has elements but no storage for them, which is required
ValueError: fused_adamw::step_: exp_avgs[1] has elements but no storage for them, which is required
ValueError: fused_adamw::step_: exp_avg_sqs[1] has elements but no storage for them, which is required
ValueError: fused_adamw::step_: max_exp_avg_sqs[1] has elements but no storage for them, which is required
ValueError: fused_adamw::step_: state_steps[1] has elements but no storage for them, which is required
ValueError: fused_adamw::step: grad has elements but no storage for them, which is required""",
    )


# --- Autograd.


def test_requires_grad(device: torch.device) -> None:
    def leaf(tensor: Tensor) -> Tensor:
        return tensor.clone().requires_grad_()

    assert_expected_inline(
        refusals(device, leaf),
        """\
param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq: RuntimeError: <op> has no derivative, by design, and
    <name> requires grad; call it under torch.no_grad(), or pass detached tensors
state_step: RuntimeError: fused_adamw::step_ has no derivative, by design, and <name> requires grad; call
    it under torch.no_grad(), or pass detached tensors""",
    )
    assert_expected_inline(
        refusals(device, lambda t: leaf(t) * 2.0, ["param"], fake=False),
        """\
param: RuntimeError: <op> has no derivative, by design, and <name> requires grad; call it under
    torch.no_grad(), or pass detached tensors""",
    )


def test_requires_grad_of_scalars(device: torch.device) -> None:
    sample = normal_sample(5, device=device)
    right = {name: scalar(0.5, device) for name in ("lr", "beta1", "beta2")}
    found = []
    for name in ("lr", "beta1", "beta2", "grad_scale", "found_inf"):
        wrong = {name: scalar(0.5, device).requires_grad_()}
        found.append(refuse_options(sample, device, fake=True, **{**right, **wrong}))
    step = scalar(3.0, device).requires_grad_()
    text = refusal(lambda: step_op.tensor(*sample.tensors, step, **right), sample.tensors, device)
    found.append(fill(text))
    assert_expected_inline(
        "\n".join(found),
        """\
RuntimeError: <op> has no derivative, by design, and lr requires grad; call it under torch.no_grad(), or
    pass detached tensors
RuntimeError: <op> has no derivative, by design, and beta1 requires grad; call it under torch.no_grad(),
    or pass detached tensors
RuntimeError: <op> has no derivative, by design, and beta2 requires grad; call it under torch.no_grad(),
    or pass detached tensors
RuntimeError: <op> has no derivative, by design, and grad_scale requires grad; call it under
    torch.no_grad(), or pass detached tensors
RuntimeError: <op> has no derivative, by design, and found_inf requires grad; call it under
    torch.no_grad(), or pass detached tensors
RuntimeError: fused_adamw::step has no derivative, by design, and step requires grad; call it under
    torch.no_grad(), or pass detached tensors""",
    )


def test_requires_grad_is_fine_under_no_grad(device: torch.device) -> None:
    expected = call_step(normal_sample(5, amsgrad=True, device=device))
    sample = normal_sample(5, amsgrad=True, device=device).map(Tensor.requires_grad_)
    with torch.no_grad():
        new = call_step(sample)
    assert_same_state(new, expected)
    assert not any(tensor.requires_grad for tensor in new.state)


def test_requires_grad_before_the_first_update(device: torch.device) -> None:
    sample = first_sample(5, device=device)
    sample.param.requires_grad_()
    assert_expected_inline(
        fill(refusal(lambda: call_step(sample), sample.tensors, device)),
        """\
RuntimeError: fused_adamw::step has no derivative, by design, and param requires grad; call it under
    torch.no_grad(), or pass detached tensors""",
    )

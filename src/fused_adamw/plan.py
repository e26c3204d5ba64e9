"""The tensors of a step, list by list, and how they are kept from one step to the next."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fused_adamw import _C
from fused_adamw.torch_library.checks import ROUNDED_DTYPES, StepLists


class Part(NamedTuple):
    """Tensors of a group that one op call can take, and the places of their parameters in the group."""

    lists: StepLists
    places: list[int]


def split(whole: Part) -> list[Part]:
    """The parts of a group, by device and by the form of their master weights.

    ``whole.lists.masters`` has as many entries as there are 16-bit parameters.
    """
    params, masters = whole.lists.params, _masters_by_place(whole.lists)
    forms = [
        (param.device, None if master is None else master.dtype)
        for param, master in zip(params, masters, strict=True)
    ]
    different = list(dict.fromkeys(forms))
    if len(different) == 1:
        return [whole]
    parts = []
    for form in different:
        own = [i for i, found in enumerate(forms) if found == form]
        others = whole.lists._replace(masters=())
        lists = StepLists(*([tensors[i] for i in own] if tensors else [] for tensors in others))
        of_form = [masters[i] for i in own]
        lists = lists._replace(masters=[master for master in of_form if master is not None])  # all, or none
        parts.append(Part(lists, [whole.places[i] for i in own]))
    return parts


def _masters_by_place(lists: StepLists) -> list[Tensor | None]:
    masters: list[Tensor | None] = []
    taken = 0
    for param in lists.params:
        rounded = param.dtype in ROUNDED_DTYPES
        masters.append(lists.masters[taken] if rounded else None)
        taken += int(rounded)
    return masters


class Plan:
    """What an update needs besides the gradients, kept from one step to the next.

    Looking up the states of hundreds of parameters anew costs more than the kernel. The plan compares object
    identities instead, so that any change of a group, of the state or of an entry is noticed. What lies
    behind an object (its storage, shape, dtype) is read anew in each step.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        wholes: list[Part],
        last: Plan | None = None,
    ) -> None:
        # Other parameters may have gradients in each step, which leaves the states what they were.
        self._state: _PlannedState = (
            last._state if last is not None and last._state.holds(state) else _PlannedState(state)
        )
        self._groups = [_GroupPlan(group, own) for group, own in zip(groups, wholes, strict=True)]

    def parts(
        self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]
    ) -> list[list[Part]] | None:
        """Each group's parts with the gradients of now, or None where the plan no longer holds."""
        if len(groups) != len(self._groups) or not self._state.holds(state):
            return None
        all_parts = []
        for plan, group in zip(self._groups, groups, strict=True):
            parts = plan.parts(group)
            if parts is None:
                return None
            all_parts.append(parts)
        return all_parts


class _PlannedState:
    """The part of a plan that belongs to the states of all parameters."""

    def __init__(self, state: dict[Tensor, dict[str, Any]]) -> None:
        # Comparing keys by identity spares the calls of Tensor.__hash__ that looking them up costs.
        self._parts = _C.parts_of_dicts(state)
        # Not the parameters: torch.utils.swap_tensors refuses tensors that C++ holds.
        self._held = _C.HeldTensors(
            [value for own in state.values() if isinstance(own, dict) for value in own.values()]
        )

    def holds(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether the state is made of the same objects."""
        return _C.are_parts_of_dicts(state, self._parts)


class _GroupPlan:
    """The part of a plan that belongs to one group."""

    def __init__(self, group: dict[str, Any], whole: Part) -> None:
        self._options = _options(group)
        self._params = list(group["params"])
        self._without_grad = [param.grad is None for param in self._params]
        # A plan must not keep gradients alive.
        self._whole = Part(whole.lists._replace(grads=()), whole.places)
        self._parts = len(split(whole)) if whole.lists.params else 0

    def parts(self, group: dict[str, Any]) -> list[Part] | None:
        """The parts with the gradients of now, or None where the plan no longer holds."""
        if _options(group) != self._options or not _C.same_objects(group["params"], self._params):
            return None
        grads = _C.planned_grads(self._params, self._without_grad)
        if grads is None:
            return None
        lists, places = self._whole
        whole = Part(lists._replace(grads=grads), places)
        if self._parts == 1:
            return [whole]
        return split(whole)


def _options(group: dict[str, Any]) -> tuple[bool, bool]:
    """What decides which states a parameter has."""
    return group["amsgrad"], group.get("rounding_seed") is not None

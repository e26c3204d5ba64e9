"""The tensors of a step, list by list, and how they are kept from one step to the next."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_adamw import _C
from fused_adamw.state import MASTER, REMAINDER
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
        self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]], wholes: list[Part]
    ) -> None:
        # Comparing keys by identity spares the calls of Tensor.__hash__ that looking them up costs.
        self._state_keys = list(state)
        self._state_values = list(state.values())
        self._groups = [_GroupPlan(group, state, own) for group, own in zip(groups, wholes, strict=True)]

    def parts(
        self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]
    ) -> list[list[Part]] | None:
        """Each group's parts with the gradients of now, or None where the plan no longer holds."""
        if (
            len(groups) != len(self._groups)
            or not _C.same_objects(list(state), self._state_keys)
            or not _C.same_objects(list(state.values()), self._state_values)
        ):
            return None
        all_parts = []
        for plan, group in zip(self._groups, groups, strict=True):
            parts = plan.parts(group)
            if parts is None:
                return None
            all_parts.append(parts)
        return all_parts


class _GroupPlan:
    """The part of a plan that belongs to one group."""

    def __init__(self, group: dict[str, Any], state: dict[Tensor, dict[str, Any]], whole: Part) -> None:
        lists = whole.lists
        self._options = _options(group)
        self._params = list(group["params"])
        self._without_grad = [param.grad is None for param in self._params]
        self._whole = Part(lists._replace(grads=()), whole.places)  # a plan must not keep gradients alive
        self._parts = len(split(whole)) if lists.params else 0
        states = [state[param] for param in lists.params]
        moments = [
            ("step", lists.state_steps),
            ("exp_avg", lists.exp_avgs),
            ("exp_avg_sq", lists.exp_avg_sqs),
        ]
        if group["amsgrad"]:
            moments.append(("max_exp_avg_sq", lists.max_exp_avg_sqs))
        # The dicts, the key, and what each of the dicts must hold under it.
        self._entries = [(states, key, list(tensors)) for key, tensors in moments]
        masters = _masters_by_place(lists)
        for key, dtype in ((MASTER, torch.float32), (REMAINDER, torch.int16)):
            own = [
                (states[i], master)
                for i, master in enumerate(masters)
                if master is not None and master.dtype is dtype
            ]
            if own:
                self._entries.append(([state for state, _ in own], key, [master for _, master in own]))

    def parts(self, group: dict[str, Any]) -> list[Part] | None:
        """The parts with the gradients of now, or None where the plan no longer holds."""
        grads = [param.grad for param in group["params"]]
        if (
            _options(group) != self._options
            or not _C.same_objects(group["params"], self._params)
            or not _C.same_nones(grads, self._without_grad)
            or not all(_C.same_entries(*entries) for entries in self._entries)
        ):
            return None
        lists, places = self._whole
        if len(lists.params) < len(grads):
            grads = [grad for grad in grads if grad is not None]
        whole = Part(lists._replace(grads=grads), places)
        if self._parts == 1:
            return [whole]
        return split(whole)


def _options(group: dict[str, Any]) -> tuple[bool, bool]:
    """What decides which states a parameter has."""
    return group["amsgrad"], group.get("rounding_seed") is not None

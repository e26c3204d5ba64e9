"""The optimizer: ``torch.optim.AdamW`` with the whole update as one kernel."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fused_adamw import _C, tracing
from fused_adamw.distributed import local_groups, refuse_local_statistics
from fused_adamw.errors import NonfiniteGradientError, StaleMasterError
from fused_adamw.hooks import P, R, with_hooks
from fused_adamw.options import (
    DEFAULT_GUARD,
    DEFAULT_OPTIONS,
    NONFINITE_CHOICES,
    STALE_MASTER_CHOICES,
    GradientGuardOptions,
    Nonfinite,
    Scalar,
    StaleMaster,
)
from fused_adamw.plan import Part, Plan, split
from fused_adamw.rounding import tensor_seed
from fused_adamw.state import (
    ParamVersions,
    complete_state,
    keep_float32,
    master_key,
    master_param,
    normalise_state,
    round_to_masters,
    set_master_param,
    show_masters,
)
from fused_adamw.stats import GradientStats, analyze, merge_stats
from fused_adamw.torch_library import adamw_scaled, checks, step_inplace
from fused_adamw.torch_library.checks import StepLists
from fused_adamw.torch_library.step_inplace import StepGroup
from fused_adamw.torch_library.step_options import AmpTensors, StepOptions, moved

ParamsT: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_OP = "fused_adamw.AdamW"


class AdamW(torch.optim.Optimizer):
    """AdamW and AMSGrad, a drop-in for ``torch.optim.AdamW``.

    The formula is that of ``csrc/adamw_update.h``; one launch updates all parameters of all groups. State and
    ``state_dict`` are those of ``torch.optim.AdamW``, in both directions: train with one, go on with the
    other.

    Args:
        params: Parameters, named parameters or parameter groups: float32, float16 or bfloat16, strided, on
            the CPU or on CUDA. Gradients may be of any of these dtypes, with the parameter's shape and
            strides. A 16-bit parameter has its moments and a master weight in float32, and becomes the
            rounding of that in the same pass.
        lr: Learning rate, at least 0; a number or a tensor of one element (float32 or float64) on the
            parameters' device. A number too may change from step to step in a compiled step: its first
            change compiles once more, the others do not.
        betas: Decay rates of the two moments, each in [0, 1); numbers or tensors like ``lr``.
        eps: Added to the denominator, at least 0. With 0, an element whose gradients were all 0 becomes NaN,
            as in torch.
        weight_decay: Decoupled weight decay, at least 0.
        amsgrad: Divide by the running maximum of the second moment.
        maximize: Ascend instead of descend.
        capturable: Accept numbers while a CUDA graph is captured, as constants of the graph. Not needed where
            ``lr`` and ``betas`` are tensors: counters are always on the device.
        foreach: Accepted so that calls written for ``torch.optim.AdamW`` work; there is one implementation.
        fused: Accepted likewise.
        differentiable: Must be False.
        max_grad_norm: Clip the gradients of all groups together to this norm, as ``clip_grad_norm_`` does,
            but inside the step: the gradients stay as they are and are read once more, nothing else is.
            None: no clipping.
        nonfinite: What a NaN or an infinity in a gradient does, as it is or after unscaling: "skip" the step
            (no value is read back), or raise an "error" that names the parameters (reads 12 bytes back).
            None: "skip" where ``max_grad_norm`` is given; else gradients are not looked at, as in torch.
        fused_step: Unscale, clip and check inside the step. False: in passes of their own, which change the
            gradients, as a scaler's ``unscale_`` and ``clip_grad_norm_`` do.
        hierarchical_stats: Merge the rows of gradient statistics 1024 at a time, or one after another.
        stochastic_rounding: Round master weights to 16-bit parameters by chance, up or down, so that a
            parameter is its master weight on average. Groups then have a ``rounding_seed``, which is
            ``torch.initial_seed()`` unless a group brings its own; it is in the ``state_dict``, and replicas
            need the same one. Random bits are a function of it, of the parameter's place in the optimizer,
            of the element and of the number of the update. False: round to the nearest number.
        split_masters: Keep the master weight of a bfloat16 parameter, where it is not rounded by chance, as
            the 16 bits by which it differs from the parameter: exact, and 2 bytes less to keep and 4 to move.
            The parameter is then, of two nearest numbers, the one of greater magnitude. False: in float32,
            and the parameter is, of two nearest numbers, the even one. A ``state_dict`` has float32 anyway.
        stale_master: What is done where someone else wrote to a 16-bit parameter: by "resync" its new value
            counts (with float32 master weights, element by element where it is no rounding of them; a
            remainder, less than half a unit in the last place, stays); an "error" names the parameter, unless
            it was written to through ``param.data``. Reads version counters on the host.

    Raises:
        ValueError: An option is out of range, or ``differentiable`` is asked for.
        TypeError: A parameter is sparse, complex or of another dtype than float32, float16 or bfloat16.

    ``step`` checks everything before it writes anything and raises as ``torch_library/checks.py`` says.
    Works with ``torch.amp.GradScaler``, which leaves it to the step to divide out the scale and to skip.
    """

    @staticmethod
    def profile_hook_step(func: Callable[P, R]) -> Callable[P, R]:
        """What torch.optim wraps ``step`` in, of each class when its first optimizer is made."""
        return with_hooks(func)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells torch.amp.GradScaler to hand over grad_scale and found_inf instead of unscaling first."""
        return self.fused_step

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = DEFAULT_OPTIONS.lr,
        betas: tuple[Scalar, Scalar] = DEFAULT_OPTIONS.betas,
        eps: float = DEFAULT_OPTIONS.eps,
        weight_decay: float = DEFAULT_OPTIONS.weight_decay,
        amsgrad: bool = DEFAULT_OPTIONS.amsgrad,
        *,
        maximize: bool = DEFAULT_OPTIONS.maximize,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        max_grad_norm: float | None = None,
        nonfinite: Nonfinite | None = None,
        fused_step: bool = True,
        hierarchical_stats: bool = True,
        stochastic_rounding: bool = False,
        split_masters: bool = True,
        stale_master: StaleMaster = "resync",
    ) -> None:
        if differentiable:
            raise ValueError(
                f"{_OP}: differentiable is True; the update has no derivative, False is required"
            )
        checks.check_guard(_OP, max_grad_norm, DEFAULT_GUARD.epsilon)
        checks.check_choice(_OP, "nonfinite", nonfinite, (None, *NONFINITE_CHOICES))
        checks.check_choice(_OP, "stale_master", stale_master, STALE_MASTER_CHOICES)
        self.max_grad_norm = max_grad_norm
        self.nonfinite = nonfinite
        self.fused_step = fused_step
        self.hierarchical_stats = hierarchical_stats
        self.split_masters = split_masters
        self.stale_master = stale_master
        self._forget()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": capturable,
            **_TORCH_SWITCHES,
        }
        if stochastic_rounding:
            defaults["rounding_seed"] = torch.initial_seed()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """Drops what is kept from step to step and belongs to no ``state_dict``."""
        self._name = tracing.register(self)
        self._plan: Plan | None = None
        self._record = _StatsRecord()
        self._versions = ParamVersions()
        self._to_nearest: list[bool] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as ``torch.optim`` does, after checking its options and parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickle, a copy or a loaded ``state_dict``, one of ``torch.optim.AdamW`` included."""
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            # How another implementation was told to compute does not concern this one.
            group.update(_TORCH_SWITCHES)
            for param in group["params"]:
                if self.state.get(param):
                    normalise_state(self.state[param], param, group["amsgrad"])

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim``; a 16-bit parameter has its master weight as ``master_param``, in float32."""
        hook = self.register_state_dict_post_hook(show_masters, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``, but moments and master weights of 16-bit parameters stay float32.

        A state without ``master_param``, of ``torch.optim.AdamW`` say, goes on from the parameters' values.
        """
        hook = self.register_load_state_dict_pre_hook(keep_float32)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def splits_masters(self, group: dict[str, Any]) -> bool:
        """Whether master weights of a group's bfloat16 parameters are kept as their remainders."""
        return self.split_masters and group.get("rounding_seed") is None

    def settle_roundings(self) -> None:
        """Rounds to the nearest number what was rounded otherwise: by chance before, or in a checkpoint."""
        to_nearest = [group.get("rounding_seed") is None for group in self.param_groups]
        before = self._to_nearest
        for i, group in enumerate(self.param_groups):
            if to_nearest[i] and not (i < len(before) and before[i]):
                for param in group["params"]:
                    round_to_masters(self.state.get(param, {}), param)
        self._to_nearest = to_nearest

    @torch.no_grad()
    def master_param(self, param: Tensor) -> Tensor:
        """The float32 weight of a parameter: itself, or the master weight of a 16-bit one.

        A master weight that is kept as a remainder is returned as a copy; to change one, use
        ``set_master_param``. Where someone else wrote to the parameter, a float32 master weight is the old
        one until the next step.
        """
        return master_param(self.state.get(param, {}), param)

    @torch.no_grad()
    def set_master_param(self, param: Tensor, weight: Tensor) -> None:
        """Sets the float32 weight of a parameter, and rounds it to the parameter.

        Raises:
            ValueError: The shapes differ, or the optimizer has no such parameter.
        """
        if weight.shape != param.shape:
            raise ValueError(
                f"{_OP}: weight has shape {tuple(weight.shape)}; {tuple(param.shape)}, the parameter's, is "
                "required"
            )
        groups = [group for group in self.param_groups if any(param is own for own in group["params"])]
        if not groups:
            raise ValueError(f"{_OP}: param is in no group; a parameter of this optimizer is required")
        state = self.state[param]
        complete_state(state, param, groups[0]["amsgrad"], self.splits_masters(groups[0]))
        set_master_param(state, param, weight)
        self._versions.record([param])

    @torch.no_grad()
    def resync_masters(self) -> None:
        """Makes the value of each 16-bit parameter its master weight, as after loading a model's weights."""
        for param, state in self.state.items():
            if state and param.dtype in checks.ROUNDED_DTYPES:
                self.set_master_param(param, param.to(torch.float32))

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle or a copy holds: what ``torch.optim`` puts there, and the settings of this class."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _SETTINGS}}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``torch.optim``, and a compiled program may contain it."""
        if not (torch.compiler.is_compiling() and set_to_none):
            super().zero_grad(set_to_none)  # which breaks the graph
            return
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @overload
    def step(self, closure: None = None, *, stats: GradientStats | None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, stats: GradientStats | None = None) -> float: ...
    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, stats: GradientStats | None = None
    ) -> float | None:
        """Updates all parameters that have a gradient.

        Args:
            closure: Evaluated first, with gradients enabled; its result is returned.
            stats: Statistics to clip and to skip by, in place of those of this optimizer's own gradients: of
                a model that is spread over ranks, say (``merge_stats``).

        Raises:
            TypeError, ValueError: A tensor or option is refused; nothing has been written then.
            NonfiniteGradientError: ``nonfinite`` is "error" and a gradient holds a NaN or an infinity;
                nothing has been written then.
            StaleMasterError: ``stale_master`` is "error" and a parameter was written to since the last step;
                nothing has been written then.
        """
        if torch.compiler.is_compiling() and self._reads_on_host():
            return self._step_outside_of_graph(closure, stats)
        loss = None
        if closure is not None:
            self._record.next = None  # of gradients that the closure makes anew
            with torch.enable_grad():
                loss = closure()
        groups = self._step_groups()
        record = self._record
        next_stats, record.next = record.next, None
        if not groups:
            return loss
        self._check_capture(groups)
        if self.stale_master == "error":
            self._refuse_stale_masters(groups)
        # Set by GradScaler for the length of this call.
        amp = AmpTensors(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        record.found_inf = amp.found_inf
        self._update(groups, amp, stats, next_stats)
        if self.stale_master == "error":
            self._versions.record(_rounded_params(groups))
        return loss

    def _update(
        self, groups: list[StepGroup], amp: AmpTensors, stats: GradientStats | None, next_stats: _Taken | None
    ) -> None:
        """Takes the statistics, unless they are given, and updates by them."""
        record = self._record
        if stats is not None:
            record.last = _Taken(stats.report, stats.rows, [])
        elif next_stats is not None:
            record.last = next_stats
        elif self._is_guarded():
            if self._can_step_at_once(groups):
                self._analyze_and_step(groups, amp)
                return
            record.last = self._analyze(groups, amp.grad_scale)
        else:
            record.last = None
        groups = local_groups(_OP, groups)
        if record.last is None or (stats is None and not self._is_guarded()):
            step_inplace.apply(groups, amp)
            return
        if self.nonfinite == "error":
            self._refuse_nonfinite()
        if self.fused_step:
            adamw_scaled.apply(groups, record.last.report, self._guard(), amp)
        else:
            self._clip_and_step(groups, amp)

    def analyze_gradients(self, grad_scale: Scalar | None = None) -> GradientStats:
        """Reads the gradients now; the next ``step`` uses the statistics instead of reading them again.

        Args:
            grad_scale: The factor that the gradients were multiplied by.
        """
        with torch.no_grad():
            taken = self._analyze(self._step_groups(), grad_scale)
        self._record.next = taken
        return _gradient_stats(taken)

    @property
    def last_stats(self) -> StepStats | None:
        """The statistics of the last step's gradients, read from the device now; None where it took none."""
        last = self._record.last
        if last is None:
            return None
        gradients = _gradient_stats(last)
        found_inf = self._record.found_inf is not None and bool(self._record.found_inf)
        names = _parameter_names(self.param_groups)
        params = last.params()
        bad = gradients.nonfinite_gradients() if gradients.sizes and not gradients.finite else []
        coefficient = 1.0
        if self.max_grad_norm is not None:
            coefficient = _C.clip_coefficient(
                gradients.report.tolist(), self.max_grad_norm, DEFAULT_GUARD.epsilon
            )
        return StepStats(
            norm=gradients.norm,
            clip_coefficient=coefficient,
            skipped=found_inf or not gradients.finite,
            nonfinite_parameters=[names[id(params[i])] for i in bad],
            gradients=gradients,
        )

    def _check_capture(self, groups: list[StepGroup]) -> None:
        """Refuses what a replay of the CUDA graph that is being captured could not do."""
        if torch.compiler.is_compiling() or not checks.is_capturing(groups[0].lists.params[0].device):
            return
        checks.refuse_host_reads(
            _OP,
            nonfinite=self.nonfinite,
            fused_step=self.fused_step or not self._is_guarded(),
            stale_master=self.stale_master,
        )
        for i, group in enumerate(self.param_groups):
            if group["params"] and not group["capturable"]:
                beta1, beta2 = group["betas"]
                options = {"lr": group["lr"], "beta1": beta1, "beta2": beta2}
                checks.refuse_frozen_options(_OP, i, options, group["params"][0].device)

    def _refuse_stale_masters(self, groups: list[StepGroup]) -> None:
        changed = self._versions.changed(_rounded_params(groups))
        if changed:
            self._forget_scaler()
            names = _parameter_names(self.param_groups)
            raise StaleMasterError.naming(_OP, [names[id(param)] for param in changed])

    def _reads_on_host(self) -> bool:
        return (
            self.nonfinite == "error"
            or self.stale_master == "error"
            or (self._is_guarded() and not self.fused_step)
        )

    @_disable_dynamo
    def _step_outside_of_graph(
        self, closure: Callable[[], float] | None, stats: GradientStats | None
    ) -> float | None:
        """The eager step: where it reads on the host, a compiler has nothing to gain from the rest."""
        return AdamW.step(self, closure, stats=stats)

    def _is_guarded(self) -> bool:
        return self.max_grad_norm is not None or self.nonfinite is not None

    def _guard(self) -> GradientGuardOptions:
        return GradientGuardOptions(max_norm=self.max_grad_norm)

    def _analyze(self, groups: list[StepGroup], grad_scale: Scalar | None) -> _Taken:
        refuse_local_statistics(_OP, groups)
        # Device by device; the groups of one device are next to each other in what is returned.
        if not groups:
            stats = analyze([], None, hierarchical=self.hierarchical_stats)
            return _Taken(stats.report, stats.rows, [])
        devices = step_inplace.by_device(groups)
        params = [group.lists.params for _, own in devices for group in own]
        all_stats = []
        for device, own in devices:
            grads = [grad for group in own for grad in group.lists.grads]
            scale = AmpTensors(grad_scale, None).on(device).grad_scale
            all_stats.append(analyze(grads, scale, hierarchical=self.hierarchical_stats))
        if len(all_stats) == 1:
            return _Taken(all_stats[0].report, all_stats[0].rows, params)
        first = all_stats[0].report.device
        reports, rows = (
            [moved(tensor, first) for tensor in tensors]
            for tensors in ([stats.report for stats in all_stats], [stats.rows for stats in all_stats])
        )
        return _Taken(merge_stats(torch.stack(reports)).report, torch.cat(rows), params)

    def _can_step_at_once(self, groups: list[StepGroup]) -> bool:
        """Whether nothing comes between the statistics and the step, and nothing must see the ops."""
        return (
            self.fused_step
            and self.nonfinite != "error"
            and not step_inplace.must_dispatch(groups)
            and len(list(step_inplace.by_device(groups))) == 1
        )

    def _analyze_and_step(self, groups: list[StepGroup], amp: AmpTensors) -> None:
        device = groups[0].lists.params[0].device
        report, rows = adamw_scaled.analyze_and_update(
            groups, self._guard(), amp.on(device), hierarchical=self.hierarchical_stats
        )
        self._record.last = _Taken(report, rows, [group.lists.params for group in groups])

    def _refuse_nonfinite(self) -> None:
        last = self.last_stats
        if last is not None and not last.gradients.finite:
            self._forget_scaler()
            raise NonfiniteGradientError.naming(_OP, last.nonfinite_parameters or ["the statistics given"])

    def _forget_scaler(self) -> None:
        """Deletes what a scaler handed over, which it does itself only after a step that returned."""
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                delattr(self, name)

    def _clip_and_step(self, groups: list[StepGroup], amp: AmpTensors) -> None:
        step_inplace.check(groups, amp)  # before the gradients change
        last = self.last_stats
        if last is None or last.skipped:
            return
        if last.clip_coefficient < 1.0:
            for group in groups:
                torch._foreach_mul_(list(group.lists.grads), last.clip_coefficient)
        step_inplace.apply(groups, amp)

    def _step_groups(self) -> list[StepGroup]:
        groups = []
        first = 0  # the place of a group's first parameter among all
        for group, parts in zip(self.param_groups, self._parts_of_groups(), strict=True):
            for lists, places in parts:
                options = _step_options(group).on(lists.params[0].device)
                seeds: list[int] = []
                if group.get("rounding_seed") is not None and lists.masters:
                    seed_of = tensor_seed if torch.compiler.is_compiling() else _remembered_tensor_seed
                    seeds = [seed_of(group["rounding_seed"], first + place) for place in places]
                groups.append(StepGroup(lists, options, seeds))
            first += len(group["params"])
        return groups

    def _parts_of_groups(self) -> list[list[Part]]:
        """The tensors of each group's update, part by part; from the plan where that still holds."""
        if self._plan is not None and not torch.compiler.is_compiling():
            planned = self._plan.parts(self.param_groups, self.state)
            if planned is not None:
                return planned
        traces_backward = tracing.traces_backward()
        if torch.compiler.is_compiling():
            tracing.prepare(self._name, states=traces_backward)
        else:
            self.settle_roundings()
        wholes = []
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in StepLists._fields]
            places: list[int] = []
            (self._collect if traces_backward else self._init_group)(group, places, *lists)
            if traces_backward and self._is_guarded():
                lists[1] = tracing.computed_once(lists[1])
            wholes.append(Part(StepLists(*lists), places))
        if not torch.compiler.is_compiling():
            self._plan = Plan(self.param_groups, self.state, wholes, self._plan)
        return [split(whole) for whole in wholes]

    def _init_group(self, group: dict[str, Any], places: list[int], *lists: list[Tensor]) -> None:
        """Fills the lists of a group's update, and makes the states that are missing.

        The name and the form are those of ``torch.optim``: Dynamo runs a method of this name instead of
        tracing it, and takes what it put into the lists as inputs at static addresses.
        """
        self._collect(group, places, *lists)

    def _collect(
        self,
        group: dict[str, Any],
        places: list[int],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        masters: list[Tensor],
    ) -> None:
        splits = self.splits_masters(group)
        for place, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            state = self.state[param]
            complete_state(state, param, group["amsgrad"], splits)
            places.append(place)
            params.append(param)
            grads.append(param.grad)
            exp_avgs.append(state["exp_avg"])
            exp_avg_sqs.append(state["exp_avg_sq"])
            if group["amsgrad"]:
                max_exp_avg_sqs.append(state["max_exp_avg_sq"])
            state_steps.append(state["step"])
            master = master_key(param, splits)
            if master is not None:
                masters.append(state[master])


_remembered_tensor_seed = functools.cache(tensor_seed)


# The keys of torch.optim.AdamW's groups that choose among its implementations, so that it can load ours.
_TORCH_SWITCHES = {"foreach": None, "fused": None, "differentiable": False, "decoupled_weight_decay": True}


# The attributes that a pickle carries besides torch's.
_SETTINGS = (
    "max_grad_norm",
    "nonfinite",
    "fused_step",
    "hierarchical_stats",
    "split_masters",
    "stale_master",
)


@dataclass(frozen=True)
class StepStats:
    """What a step found in its gradients.

    Attributes:
        norm: The norm of all gradients together, after unscaling and before clipping.
        clip_coefficient: What they were multiplied by, at most 1.
        skipped: Whether the step was skipped.
        nonfinite_parameters: The names of the parameters whose gradients hold a NaN or an infinity: the names
            that the optimizer was given, or the place in ``param_groups``.
        gradients: The statistics in full.
    """

    norm: float
    clip_coefficient: float
    skipped: bool
    nonfinite_parameters: list[str]
    gradients: GradientStats


class _Taken(NamedTuple):
    """Statistics that were taken, and the parameters whose gradients they are of."""

    report: Tensor
    rows: Tensor
    param_lists: Sequence[Sequence[Tensor]]

    def params(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(self.param_lists))


class _StatsRecord:
    """The statistics of the step to come, where a scaler took them, and of the last step.

    An object of its own, for Dynamo forgets what a traced step assigns to attributes of the optimizer.
    """

    def __init__(self) -> None:
        self.next: _Taken | None = None
        self.last: _Taken | None = None
        self.found_inf: Tensor | None = None


def _gradient_stats(taken: _Taken) -> GradientStats:
    return GradientStats(taken.report, taken.rows, tuple(param.numel() for param in taken.params()))


def _rounded_params(groups: list[StepGroup]) -> list[Tensor]:
    """The parameters that have master weights."""
    return [param for group in groups if group.lists.masters for param in group.lists.params]


def _parameter_names(groups: list[dict[str, Any]]) -> dict[int, str]:
    """The names of parameters by their id."""
    names = {}
    for g, group in enumerate(groups):
        given = group.get("param_names")
        for i, param in enumerate(group["params"]):
            names[id(param)] = given[i] if given else f"param_groups[{g}]['params'][{i}]"
    return names


def _check_group(group: dict[str, Any]) -> None:
    for i, param in enumerate(group["params"]):
        checks.check_param_kind(_OP, f"params[{i}]", param)
    seed = group.get("rounding_seed")
    if not isinstance(seed, int | None):
        raise TypeError(f"{_OP}: rounding_seed is {seed!r}; a whole number, or None, is required")
    beta1, beta2 = group["betas"]
    for name, value in (("lr", group["lr"]), ("beta1", beta1), ("beta2", beta2)):
        if isinstance(value, Tensor):
            checks.check_scalar_tensor(_OP, name, value, checks.SCALAR_DTYPES)
    checks.check_options(
        _OP,
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


def _step_options(group: dict[str, Any]) -> StepOptions:
    beta1, beta2 = group["betas"]
    return StepOptions(group["lr"], beta1, beta2, group["weight_decay"], group["eps"], group["maximize"])

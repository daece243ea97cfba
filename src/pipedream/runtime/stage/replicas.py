"""Keeps the replicas of a stage equal: averages BatchNorm's statistics, and rejects any other difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipedream.core.errors import CaptureError
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.channel import Group, Waiting
from pipedream.runtime.stage.part import PassFacts, RunLayers, StageFacts, StagePart
from pipedream.runtime.stage.stage_module import StageModule
from pipedream.runtime.stage.versions import Versions, WeightSet
from pipedream.runtime.update.all_reduce import all_reduce_many
from pipedream.runtime.update.reducer import Reducer


class EqualReplicas(StagePart):
    """One replica of a stage; all make the same calls, at drains."""

    def __init__(self, module: StageModule, versions: Versions, group: Group, replicas: int, reducer: Reducer) -> None:
        self._reducer = reducer
        self._module = module
        self._versions = versions
        self._group = group
        self._replicas = replicas
        self._initial_counts: list[int] = []
        self._recorded: dict[str, _TensorRecord] = {}

    @classmethod
    def make(cls, facts: PassFacts, program: Program) -> StagePart | None:
        if not isinstance(facts, StageFacts) or facts.replica_group is None:
            return None
        optimizer = facts.optimizer
        return cls(facts.module, facts.versions, facts.replica_group, optimizer.rule.replicas, optimizer.reducer)

    def begin(self) -> None:
        norms = self._list_norms()
        self._initial_counts = [int(norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None]
        self._recorded = {name: _TensorRecord(tensor) for name, tensor in self._list_untrained()}

    def end(self) -> Waiting[None]:
        yield from self.average_statistics()
        yield from self.check_equal(weights=not self._reducer.updates)  # between two averages they differ

    def average_statistics(self) -> Waiting[None]:
        """Averages BatchNorm's statistics over the replicas, and sums their counts."""
        norms = self._list_norms()
        if not norms:
            return
        statistics = [b for n in norms for b in (n.running_mean, n.running_var) if b is not None]
        counts = [n.num_batches_tracked for n in norms if n.num_batches_tracked is not None]
        new_counts = [count - before for count, before in zip(counts, self._initial_counts, strict=True)]
        sums = yield from all_reduce_many(self._group, [*statistics, *new_counts])
        with torch.no_grad():
            for buffer, total in zip(statistics, sums, strict=False):
                buffer.copy_(total / self._replicas)
            for count, before, total in zip(counts, self._initial_counts, sums[len(statistics) :], strict=True):
                count.copy_(before + total)

    def before_update(self) -> None:
        """Raises a `CaptureError` if a forward has changed a buffer, which the other replicas have not."""
        for name, tensor in self._list_untrained() if self._recorded else ():
            before = self._recorded.get(name)
            if before is not None and before.mark != (id(tensor), tensor._version):
                record = self._recorded[name] = _TensorRecord(tensor)
                if record.shape == before.shape and record.numbers != before.numbers:  # others are caches
                    raise CaptureError(describe_difference(name))

    def check_equal(self, *, weights: bool) -> Waiting[None]:
        """Raises a `CaptureError` if the weights or buffers of another replica differ.

        Args:
            weights: False leaves out the weights, because the replicas differ until their next average.
        """
        tensors = {**(self._versions.handles if weights else {}), **dict(self._list_untrained())}
        local_sums = torch.tensor([(*_sum_numbers(t), float(t.numel())) for t in tensors.values()], dtype=torch.float64)
        (sums,) = yield from all_reduce_many(self._group, [local_sums])
        means = sums / self._replicas
        for name, (total, magnitude, count), mean in zip(tensors, local_sums.tolist(), means.tolist(), strict=True):
            limit = 1e-6 * max(abs(magnitude), abs(mean[1]))
            if count == mean[2] and max(abs(total - mean[0]), abs(magnitude - mean[1])) > limit:
                raise CaptureError(describe_difference(name))

    def _list_untrained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields buffers and frozen parameters, without the statistics that are averaged."""
        averaged = {id(buffer) for norm in self._list_norms() for buffer in norm._buffers.values()}
        for layer_name, layer in self._module.layers:
            for name, tensor in (*layer.named_buffers(layer_name), *layer.named_parameters(layer_name)):
                if not tensor.requires_grad and id(tensor) not in averaged and not tensor.is_meta:
                    yield name, tensor

    def _list_norms(self) -> list[Any]:
        layers = [layer for _, layer in self._module.layers]
        norms = {id(m): m for layer in layers for m in layer.modules() if isinstance(m, _NormBase)}
        return [m for m in norms.values() if m.track_running_stats]


class CopiedAttributes(StagePart):
    """Plain attributes of a stage's modules, and of the copies that a replica in the same process runs.

    Changes by the user's loop, such as to ``model.beta``, are copied before each forward; changes by a forward, such as
    to a counter, are not.

    Args:
        changed_by_forward: (index of a module, name) of attributes; the replicas of a stage share it.
    """

    def __init__(
        self, modules: Sequence[nn.Module], copies: Sequence[nn.Module], changed_by_forward: set[tuple[int, str]]
    ) -> None:
        self._pairs = [(module, copied, _read_plain(module)) for module, copied in zip(modules, copies, strict=True)]
        self._changed_by_forward = changed_by_forward

    def run_layers(self, layers: RunLayers, value: Any, weights: WeightSet) -> Any:
        for number, (module, copied, copied_values) in enumerate(self._pairs):
            for name, value in _read_plain(module).items():
                if copied_values.get(name, _ABSENT) != value and (number, name) not in self._changed_by_forward:
                    copied.__dict__[name] = copied_values[name] = value
        old = [_read_plain(copied) for _, copied, _ in self._pairs]
        output = layers()
        for number, (_, copied, _) in enumerate(self._pairs):
            new = _read_plain(copied)
            self._changed_by_forward.update(
                (number, name) for name in new if new[name] != old[number].get(name, _ABSENT)
            )
        return output


_ABSENT = object()


def _read_plain(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in module.__dict__.items() if isinstance(v, (int, float, str)) and n != "training"}


class _TensorRecord:
    """Shows later whether a tensor was written or replaced."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.mark = id(tensor), tensor._version
        self.shape = tensor.shape
        self.numbers = _sum_numbers(tensor)


def _sum_numbers(tensor: torch.Tensor) -> tuple[float, float]:
    """Returns the sum, and the sum of the absolute values."""
    flat = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return float(flat.sum(dtype=torch.float64)), float(
        flat.abs().sum(dtype=torch.float64) if flat.dtype != torch.bool else flat.sum()
    )


def describe_difference(name: str) -> str:
    """Returns the text of an error about a tensor that differs between replicas."""
    return (
        f"{name!r} differs between the replicas of its stage: the forward, or something outside of the optimizer, "
        "writes it, and each replica would have its own numbers; plan one replica for this stage, or write it "
        "where every replica computes the same"
    )

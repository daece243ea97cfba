"""The versions of a stage's weights: a ring of leaf sets whose newest shares its storage with the optimizer's.

Life of a version:

1. Update n is due. If nobody will read the newest set any more, the optimizer steps in its storage.
2. Otherwise the weights are copied into a free set and the optimizer's handles (the user's own
   parameters) are pointed there; the old set stays as it is for its readers.
3. The optimizer steps in place; the set is version n.
4. A forward reads a version: its leaves stand in the modules while the forward runs, and autograd keeps
   what it needs of them.
5. The backward releases the version. A set without readers, that no forward to come will read, is free; under
   vertical sync some versions are never read at all.

Handles are never in a graph: changing ``.data`` of a tensor that a graph has read is silently half wrong
(docs/lessons.md, Facts). The leaves of a set and the handles share storage but not autograd's version
counter, so `begin_update` itself asserts that the storage it frees for writing has no reader.

Under autocast a set holds low-precision leaves of the weights that autocast would cast, cast once an update
instead of once a forward; then only the optimizer's copy has full precision.

Where a backward reads newer weights than its forward (`core.schedule.weights`), there is mostly one set, and the
optimizer steps in its storage although graphs have read it: a graph then sees the new weights, because it has saved
leaves that share storage with the handles but not the version counter. Under tags (`core.schedule.weights`) several
sets live for forwards to come, none for a graph: what it saves of its weights are names of parts, which its backward
looks up in another set (`runtime.stage.saved_tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch

__all__ = ["Versions", "WeightSet"]


class WeightSet:
    """One version of a stage's weights.

    Attributes:
        version: its number; -1 while it is free.
        leaves: name -> tensor that a forward reads and a gradient is taken for.
        readers: forwards that have read it and whose backward is still to come.
        ready: takes number and gradient of each leaf as soon as a backward has accumulated it; None leaves it in
            ``.grad``. Only watched leaves ask.
    """

    __slots__ = ("leaves", "readers", "ready", "version")

    def __init__(self, version: int, leaves: dict[str, torch.Tensor]) -> None:
        self.version = version
        self.leaves = leaves
        self.readers = 0
        self.ready: Callable[[int, torch.Tensor], None] | None = None

    def watch(self, names: Collection[str]) -> None:
        """Makes these leaves ask `ready`. Once for each leaf: to make and remove a hook takes several microseconds."""
        for number, (name, leaf) in enumerate(self.leaves.items()):
            if name in names:
                leaf.register_post_accumulate_grad_hook(partial(self._accumulated, number))  # type: ignore[no-untyped-call]

    def _accumulated(self, number: int, leaf: torch.Tensor) -> None:
        if self.ready is not None and leaf.grad is not None:
            gradient, leaf.grad = leaf.grad, None
            self.ready(number, gradient)


class Versions:
    """The weight sets of one stage replica.

    Args:
        handles: name -> the user's parameter, for those that are trained.
        low_precision: name -> type of the leaf, for weights that autocast would cast.
        watched: gradients of the leaves are wanted while a backward still runs (`WeightSet.ready`).
        single: there is one set, and updates do not mind its readers; another method changes it (`switch_to`).
    """

    def __init__(
        self,
        handles: Mapping[str, torch.nn.Parameter],
        low_precision: Mapping[str, torch.dtype] | None = None,
        watched: bool = False,
        single: bool = False,
    ) -> None:
        self.handles = dict(handles)
        self._low = dict(low_precision or {})
        self._watched = watched
        self._single = single
        self.newest = 0
        self._sets = {0: self._new_set(0, {name: self._leaf(name, handle) for name, handle in handles.items()})}
        self._free: list[WeightSet] = []
        self._predictions: dict[int, WeightSet] = {}
        self.peak = 1

    @property
    def alive(self) -> int:
        """Versions that are held now, the newest included, and views of them."""
        return len(self._sets) + len(self._predictions)

    @property
    def storages(self) -> int:
        """Distinct storages of full size that hold weights: those of all sets, free ones too, and the
        optimizer's own, counted on the first parameter."""
        if not self.handles:
            return 1
        name = next(iter(self.handles))
        held = [s.leaves[name].untyped_storage().data_ptr() for s in self._all_sets]
        return len({*held, self.handles[name].untyped_storage().data_ptr()})

    @property
    def _all_sets(self) -> list[WeightSet]:
        return [*self._sets.values(), *self._predictions.values(), *self._free]

    def read(self, version: int) -> WeightSet:
        """Returns a version for a forward, which must `release` it after its backward.

        Raises:
            KeyError: it is not made yet, or dropped already; the verifier excludes both.
        """
        found = self._sets[version]
        found.readers += 1
        return found

    def peek(self, version: int | None = None) -> WeightSet:
        """Returns a version, the newest unless said, for use at once: for a forward that has no backward."""
        return self._sets[self.newest if version is None else version]

    def read_prediction(self, version: int, fill: Callable[[Mapping[str, torch.Tensor]], None]) -> WeightSet:
        """Returns the view of a version for a forward, which must `release` it after its backward.

        Args:
            version: the newest, unless its view is kept already.
            fill: writes the view into tensors by name, when nobody keeps it yet.
        """
        if version not in self._predictions:
            assert version == self.newest, f"a view of version {version} was asked for, the newest is {self.newest}"
            made = self._free.pop() if self._free else self.new_storage()
            into = {
                name: torch.empty_like(handle.data) if name in self._low else made.leaves[name].data
                for name, handle in self.handles.items()
            }
            fill(into)
            for name in self._low:
                made.leaves[name].data.copy_(into[name])
            made.version = version
            self._predictions[version] = made
            self.peak = max(self.peak, self.alive)
        found = self._predictions[version]
        found.readers += 1
        return found

    def release(self, held: WeightSet) -> None:
        """Ends a reader's hold."""
        held.readers -= 1
        if not held.readers and self._predictions.get(held.version) is held:
            del self._predictions[held.version]
            held.version = -1
            self._free.append(held)

    def keep(self, coming: Collection[int]) -> None:
        """Frees the sets that no reader holds and that no forward to come will read; the newest stays.

        Args:
            coming: versions that forwards to come will read.
        """
        for old in [v for v, s in self._sets.items() if v not in coming and not s.readers and v != self.newest]:
            freed = self._sets.pop(old)
            freed.version = -1
            self._free.append(freed)

    def begin_update(self, coming: Collection[int]) -> None:
        """Makes the handles safe to write: moves them to a free set if the newest is still to be read.

        Args:
            coming: versions up to the newest that forwards to come will read.
        """
        if self._single:
            self._sets = {self.newest + 1: self._sets[self.newest]}
            self._sets[self.newest + 1].version = self.newest + 1
            return
        self.keep(coming)
        newest = self._sets[self.newest]
        if newest.readers or self.newest in coming:
            moved = self._free.pop() if self._free else self.new_storage()
            shared = [name for name in self.handles if name not in self._low]
            targets = [moved.leaves[name].detach() for name in shared]
            if targets:
                torch._foreach_copy_(targets, [self.handles[name].detach() for name in shared])
            for name, target in zip(shared, targets, strict=True):
                self.handles[name].data = target
        else:
            moved = self._sets.pop(self.newest)
        assert moved.readers == 0, "the optimizer would write into weights that a backward still needs"
        moved.version = self.newest + 1
        self._sets[moved.version] = moved
        self.peak = max(self.peak, len(self._sets))

    def end_update(self) -> None:
        """Makes what the optimizer wrote the newest version."""
        self.newest += 1
        self.cast()

    def cast(self) -> None:
        """Casts what stands in the handles into the low-precision leaves of the newest version."""
        leaves = self._sets[self.newest].leaves
        for name in self._low:
            # Not detach(): graphs may have read the leaf, and shall see the new weights.
            leaves[name].data.copy_(self.handles[name].data)

    def new_storage(self) -> WeightSet:
        """Returns a set of no version, of storage of its own."""
        leaves = self._sets[self.newest].leaves
        return self._new_set(
            -1, {name: torch.empty_like(leaf).detach().requires_grad_() for name, leaf in leaves.items()}
        )

    def rewind(self) -> None:
        """Counts versions from 0 again: after a drain, when one set is left."""
        self.keep(())
        assert self.alive == 1, f"{self.alive} versions after a drain"
        left = self._sets.pop(self.newest)
        left.version = self.newest = 0
        self._sets[0] = left

    def switch_to(self, single: bool) -> None:
        """Takes up another method's rule at a drain; sets that are free then are let go, for it may need fewer.

        The peak begins anew.
        """
        self._single = single
        self._free.clear()
        self.peak = self.alive

    def reload(self) -> None:
        """Takes over weights that were written into the handles from outside, after a drain."""
        newest = self._sets[self.newest]
        for name, handle in self.handles.items():
            if name in self._low:
                with torch.no_grad():
                    newest.leaves[name].detach().copy_(handle)
            else:
                newest.leaves[name] = self._leaf(name, handle)
        if self._watched:
            newest.watch(self.handles.keys() - self._low.keys())

    def _new_set(self, version: int, leaves: dict[str, torch.Tensor]) -> WeightSet:
        made = WeightSet(version, leaves)
        if self._watched:
            made.watch(leaves)
        return made

    def _leaf(self, name: str, handle: torch.nn.Parameter) -> torch.Tensor:
        kind = self._low.get(name)
        if kind is None:
            # Not detach(): that would share autograd's version counter, which each update moves on.
            return handle.data.requires_grad_()
        return handle.detach().to(kind, copy=True).requires_grad_()

"""The versions of a stage's weights: sets of leaves; the newest shares its storage with the optimizer's handles.

Life of a version:

1. Update n is due. If nothing will read the newest set any more, the optimizer steps in its storage.
2. Otherwise the weights are copied into a free set, and the optimizer's handles (the user's own parameters) are
   pointed to it; the old set stays unchanged for its readers.
3. The optimizer steps in place; the set is now version n.
4. A forward reads a version: its leaves are in the modules while the forward runs.
5. The backward releases it. A set without readers, which no later forward will read, is free; under vertical sync some
   versions are never read.

Handles are never in a graph: changing ``.data`` of a tensor that a graph has read is silently half wrong
(docs/lessons.md, Facts). Leaves and handles share storage but not autograd's version counter, so `choose_storage`
asserts that the storage it frees has no reader.

If a backward reads newer weights than its forward (`core.schedule.weights`), there is usually one set, and the
optimizer steps in its storage although graphs have read it. With stamps, several sets are kept for later forwards, but
none for a graph, which saves only references (`extensions.delays.saved_tensors`).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from pipedream.core.errors import CaptureError, parameter_hooked
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.weights import WeightRule
from pipedream.runtime.update.gradients import Gradients

_NOTHING = nullcontext()


class WeightSet:
    """One version of a stage's weights.

    Attributes:
        version: -1 while the set is free.
        leaves: the tensors that a forward reads and that get gradients, by name.
        readers: forwards without their backward yet.
        ready: called with a watched leaf's index and complete gradient; None leaves it in ``.grad``.
        marks: autograd's version counters of the leaves when the set was made; empty unless the set is watched.
    """

    __slots__ = ("leaves", "marks", "readers", "ready", "version")

    def __init__(self, version: int, leaves: dict[str, torch.Tensor]) -> None:
        self.version = version
        self.leaves = leaves
        self.readers = 0
        self.ready: Callable[[int, torch.Tensor], None] | None = None
        self.marks: list[int] = []

    def watch(self, names: Collection[str]) -> None:
        """Makes leaves call `ready`. Hooks stay for the set's life, as adding and removing one takes microseconds."""
        for number, (name, leaf) in enumerate(self.leaves.items()):
            if name in names:
                leaf.register_post_accumulate_grad_hook(partial(self._pass_accumulated, number))  # type: ignore[no-untyped-call]

    def _pass_accumulated(self, number: int, leaf: torch.Tensor) -> None:
        if self.ready is not None and leaf.grad is not None:
            gradient, leaf.grad = leaf.grad, None
            self.ready(number, gradient)


class WeightStore:
    """The weights that the passes of a stage on one rank read."""

    def acquire(self, version: int) -> WeightSet:
        """Returns a version for a forward, which must `release` it after its backward."""
        raise NotImplementedError

    def release(self, weights: WeightSet) -> None:
        """Follows a backward."""

    def reading(self, ema: bool) -> tuple[dict[str, torch.Tensor], AbstractContextManager[None]]:
        """Returns the newest weights, or averaged ones, for a forward without a backward, and its context."""
        raise NotImplementedError

    def end_passes(self, gradients: Gradients) -> None:
        """Drops what was copied for the passes of a minibatch; leaves their gradients for an update elsewhere."""

    # -- updates --------------------------------------------------------------------------------------

    def collect_gradients(self, gradients: Gradients) -> None:
        """Moves an update's gradients to the device of the handles."""

    def publish(self) -> None:
        """Lets other ranks read the newest version."""

    def announce(self) -> None:
        """Lets other ranks of this process wait for a version that a thread makes."""

    def withdraw(self) -> None:
        """Follows an announced update that failed."""


class Versions(WeightStore):
    """The weight sets of one stage replica, at its home.

    Args:
        handles: the user's trained parameters, by name.
        watched: gradients are needed while a backward still runs.
        single: one set, whose updates ignore its readers.

    Attributes:
        newest: version that the handles hold.
        peak: the most versions kept at once.
        averages: of the weights over time, by name; empty if the optimizer keeps none.
    """

    def __init__(self, handles: Mapping[str, torch.nn.Parameter], watched: bool = False, single: bool = False) -> None:
        self.handles = dict(handles)
        self._watched = watched
        self._single = single
        self.newest = 0
        self._check_hooks()  # before the comparison calls them
        self._sets = {0: self._make_set(0, {name: self._make_leaf(handle) for name, handle in handles.items()})}
        self._free: list[WeightSet] = []
        self._predictions: dict[int, WeightSet] = {}
        self._marks: list[tuple[int, int]] | None = None  # of the handles, after the last update
        self._next_set: WeightSet | None = None
        self._note_written()
        self.peak = 1
        self.averages: dict[str, torch.Tensor] = {}

    @property
    def kept_count(self) -> int:
        """Versions kept now, including the newest, and predictions from them."""
        return len(self._sets) + len(self._predictions)

    @property
    def storages(self) -> int:
        """Distinct storages, of all sets and the optimizer, counted by the first parameter."""
        if not self.handles:
            return 1
        name = next(iter(self.handles))
        storages = [s.leaves[name].untyped_storage().data_ptr() for s in self._all_sets]
        return len({*storages, self.handles[name].untyped_storage().data_ptr()})

    @property
    def _all_sets(self) -> list[WeightSet]:
        return [*self._sets.values(), *self._predictions.values(), *self._free]

    def acquire(self, version: int) -> WeightSet:
        weights = self._sets[version]
        weights.readers += 1
        return weights

    def peek(self, version: int | None = None) -> WeightSet:
        """Returns a version, by default the newest, for a forward without a backward."""
        return self._sets[self.newest if version is None else version]

    def read_prediction(self, version: int, fill: Callable[[Mapping[str, torch.Tensor]], None]) -> WeightSet:
        """Returns the prediction from a version for a forward, which must `release` it after its backward.

        Unless it is kept already, the version is the newest and `fill` writes the prediction.
        """
        if version not in self._predictions:
            assert version == self.newest, (
                f"a prediction from version {version} was requested, the newest is {self.newest}"
            )
            prediction = self._free.pop() if self._free else self.make_storage()
            fill({name: leaf.data for name, leaf in prediction.leaves.items()})
            prediction.version = version
            self._predictions[version] = prediction
            self.peak = max(self.peak, self.kept_count)
        weights = self._predictions[version]
        weights.readers += 1
        return weights

    def release(self, weights: WeightSet) -> None:
        weights.readers -= 1
        if not weights.readers and self._predictions.get(weights.version) is weights:
            del self._predictions[weights.version]
            weights.version = -1
            self._free.append(weights)

    def reading(self, ema: bool) -> tuple[dict[str, torch.Tensor], AbstractContextManager[None]]:
        return self.averages if ema and self.averages else self.peek().leaves, _NOTHING

    def free_unread(self, upcoming: Collection[int]) -> None:
        """Frees older sets that have no readers and whose version is not in `upcoming`, which later forwards read."""
        for old in [v for v, s in self._sets.items() if v not in upcoming and not s.readers and v != self.newest]:
            freed = self._sets.pop(old)
            freed.version = -1
            self._free.append(freed)

    def choose_storage(self, upcoming: Collection[int]) -> None:
        """Chooses the next version's set: a free one if a reader, or a later forward (`upcoming`), needs the newest."""
        self.check_handles()
        if self._watched:
            self._check_leaves()
        if self._single:
            self._sets = {self.newest + 1: self._sets[self.newest]}
            self._sets[self.newest + 1].version = self.newest + 1
            return
        self.free_unread(upcoming)
        newest = self._sets[self.newest]
        if newest.readers or self.newest in upcoming:
            next_set = self._next_set = self._free.pop() if self._free else self.make_storage()
        else:
            next_set = self._sets.pop(self.newest)
        assert next_set.readers == 0, "the optimizer would write into weights that a backward still needs"
        next_set.version = self.newest + 1
        self._sets[next_set.version] = next_set
        self.peak = max(self.peak, len(self._sets))

    def move_handles(self) -> None:
        """Copies the weights to the set that was chosen, and points the handles there."""
        next_set, self._next_set = self._next_set, None
        if next_set is None:
            return
        targets = [next_set.leaves[name].detach() for name in self.handles]
        if targets:
            torch._foreach_copy_(targets, [handle.detach() for handle in self.handles.values()])
        for handle, target in zip(self.handles.values(), targets, strict=True):
            handle.data = target

    def after_step(self) -> None:
        self.newest += 1
        leaves = self._sets[self.newest].leaves
        for name, handle in self.handles.items():
            if handle.data_ptr() != leaves[name].data_ptr():
                raise CaptureError(
                    f"the optimizer has given {name!r} other memory (by p.data = ..., or p.set_()), which no forward "
                    "would read; let it write in place, as by p.data.copy_(...)"
                )
        self.adopt_written()

    def adopt_written(self) -> None:
        """Makes what was written into the handles part of the newest version, which no forward has read yet."""
        self._marks = [(handle._version, handle.data_ptr()) for handle in self.handles.values()]
        self._note_written()

    def _note_written(self) -> None:
        """Notes how often each leaf of the newest set was written; updates write through the handles."""
        newest = self._sets[self.newest]
        newest.marks = [leaf._version for leaf in newest.leaves.values()] if self._watched else []

    def _check_leaves(self) -> None:
        """Raises a `CaptureError` if a forward has written weights, which the other replicas have not."""
        for weights in self._sets.values():
            for (name, leaf), mark in zip(weights.leaves.items(), weights.marks, strict=False):
                if leaf._version != mark:
                    raise CaptureError(
                        f"the forward writes into the weight {name!r} (as nn.Embedding(max_norm=...) does), and its "
                        "stage has replicas, each of which would write only its own; write it in the optimizer's step, "
                        "or plan one replica for this stage"
                    )

    def check_handles(self) -> None:
        """Raises a `CaptureError` if the user's parameters were changed since the last update."""
        self._check_hooks()
        for number, (name, handle) in enumerate(self.handles.items()):
            if not handle.requires_grad:
                raise requires_grad_changed(name)
            if self._marks is not None and self._marks[number] != (handle._version, handle.data_ptr()):
                raise CaptureError(
                    f"the weight {name!r} was written while the pipeline trained, where versions of it are in use; "
                    "write it in the optimizer's step, or hand new weights over by pipeline.load_state_dict(...)"
                )

    def _check_hooks(self) -> None:
        for name, handle in self.handles.items():
            if handle._backward_hooks or handle._post_accumulate_grad_hooks:
                raise parameter_hooked(name)

    def make_storage(self) -> WeightSet:
        return self._make_set(-1, _allocate_like(self._sets[self.newest].leaves))

    def rewind(self) -> None:
        """Counts from 0 again, after a drain, when one set is left."""
        self.free_unread(())
        assert self.kept_count == 1, f"{self.kept_count} versions after a drain"
        remaining = self._sets.pop(self.newest)
        remaining.version = self.newest = 0
        self._sets[0] = remaining

    def take_over(self, former: "Versions") -> None:
        """Continues to notice what the user writes into the handles, after another program."""
        self._marks = former._marks

    def reload(self) -> None:
        """Adopts weights that were written into the handles from outside, after a drain."""
        self._marks = None
        newest = self._sets[self.newest]
        for name, handle in self.handles.items():
            newest.leaves[name] = self._make_leaf(handle)
        if self._watched:
            newest.watch(self.handles)
        self._note_written()

    def _make_set(self, version: int, leaves: dict[str, torch.Tensor]) -> WeightSet:
        weights = WeightSet(version, leaves)
        if self._watched:
            weights.watch(leaves)
        return weights

    def _make_leaf(self, handle: torch.nn.Parameter) -> torch.Tensor:
        # Not detach(): that would share autograd's version counter, which each update increments.
        return handle.data.requires_grad_()


def _allocate_like(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns new leaves; those that share a storage, as a recurrent layer's do on a GPU, share one again."""
    by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for leaf in leaves.values():
        by_storage[leaf.untyped_storage()._cdata].append(leaf)
    shared: dict[int, torch.UntypedStorage] = {}
    for number, members in by_storage.items():
        storage = members[0].untyped_storage()
        # A storage may hold much that is not this stage's.
        if len(members) > 1 and storage.nbytes() <= 2 * sum(leaf.nbytes for leaf in members):
            shared[number] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()
    copies = {}
    for name, leaf in leaves.items():
        storage_shared = shared.get(leaf.untyped_storage()._cdata)
        copy = torch.empty_like(leaf).detach() if storage_shared is None else leaf.data.new_empty(0)
        if storage_shared is not None:
            copy.set_(storage_shared, leaf.storage_offset(), leaf.size(), leaf.stride())
        copies[name] = copy.requires_grad_()
    return copies


def requires_grad_changed(name: str) -> CaptureError:
    """Returns the error for a parameter that was frozen or unfrozen."""
    return CaptureError(
        f"requires_grad of {name!r} was changed while the pipeline trained; make a new Pipeline, which trains what "
        "requires a gradient then"
    )


class WeightChoice:
    """Chooses the weights that a stage's passes read, by the rule of a program; by default a backward reads its
    forward's. Where a method predicts weights, a forward reads a prediction from the version in the table.

    | `backward_rule` | `held_until` | a forward reads | its backward reads |
    | --- | --- | --- | --- |
    | stash | BACKWARD | its version, kept | the same set |
    | recompute, graph | None | the newest | the newest |
    | recompute, graph | FORWARD | its version, not kept | the newest |
    | recompute, graph | BACKWARD | its version, kept | what `WeightRule.backward_reader` chooses |

    """

    def __init__(self, store: WeightStore, rule: WeightRule | None = None) -> None:
        self._store = store
        self._newer: Versions | None = None  # what a backward reads newer weights from
        self._keeps, self._reader = True, None
        if rule is not None and rule.backward_rule != "stash":
            assert isinstance(store, Versions), "other ranks copy what their forwards have read"
            self._newer, self._keeps = store, rule.held_until is not Kind.FORWARD
            self._reader = rule.backward_reader(store)

    def acquire(self, version: int) -> tuple[WeightSet, int]:
        """Returns the weights for a forward, and the version that they are or are predicted from.

        `release` follows the backward.
        """
        if self._newer is not None and not self._keeps:
            weights = self._newer.peek(version)
        else:
            weights = self._store.acquire(version)
        return weights, weights.version  # not `version`: what was read is compared with the table

    def choose_for_backward(self, weights: WeightSet) -> WeightSet:
        if self._newer is None:
            return weights
        return self._newer.peek() if self._reader is None else self._reader(weights)

    def backward_version(self, weights: WeightSet) -> int:
        return weights.version if self._newer is None else self._newer.newest

    def release(self, weights: WeightSet) -> None:
        if self._keeps:
            self._store.release(weights)

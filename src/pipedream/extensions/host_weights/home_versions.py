"""The versions of a stage's weights in the memory of the machine, on the rank of its updates."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn

from pipedream.extensions.host_weights.host_store import SharedWeights
from pipedream.runtime.comm.channel import Waiting, wait_for
from pipedream.runtime.comm.message import write
from pipedream.runtime.stage.versions import Versions, WeightSet
from pipedream.runtime.update.gradients import Gradients


class HostVersions(Versions):
    """The versions of a stage at its home, in the store, whose handles are on the CPU; passes read copies.

    A copy has the weights of the version, and the frozen weights and buffers that are in the modules. Buffers go back
    into these when the copy is dropped.
    """

    def __init__(
        self, handles: Mapping[str, nn.Parameter], shared_weights: SharedWeights, single: bool = False
    ) -> None:
        self._shared_weights = shared_weights
        self._store_format = shared_weights.store_format
        self._copies: dict[int, WeightSet] = {}
        self._untrained: list[torch.Tensor] | None = None
        self._copied_buffers: list[tuple[torch.Tensor, int]] = []  # buffers as they were copied
        leaves, _ = self._store_format.view_set(shared_weights.sets[0])
        for name, handle in handles.items():
            handle.data = leaves[name].copy_(handle.data)
        frozen = self._store_format.view_frozen(shared_weights.frozen)
        for slots, tensor, stored_tensor in zip(
            self._store_format.slots, self._store_format.untrained, frozen, strict=False
        ):
            for holder, name in slots:
                holder[name].data = stored_tensor.copy_(tensor)
        super().__init__(handles, single=single)
        self._numbers = {id(self.peek()): 0}
        self._buffers: list[torch.Tensor] = []

    def take_over(self, former: Versions) -> None:
        former.check_handles()  # these are in another place of the store now

    def make_storage(self) -> WeightSet:
        used_numbers = {self._numbers[id(weights)] for weights in self._all_sets}
        number = next(number for number in range(len(self._shared_weights.sets)) if number not in used_numbers)
        leaves, _ = self._store_format.view_set(self._shared_weights.sets[number])
        weights = self._make_set(-1, {name: leaf.requires_grad_() for name, leaf in leaves.items()})
        self._numbers[id(weights)] = number
        return weights

    def publish(self) -> None:
        number = self._numbers[id(self.peek())]
        _, buffers = self._store_format.view_set(self._shared_weights.sets[number])
        # Nothing else writes these buffers while a thread publishes: home's passes end after the update.
        write(self._buffers or self._store_format.buffers, buffers)
        self._buffers = []
        self._shared_weights.publish(self.newest, number)

    def announce(self) -> None:
        self._buffers = self._store_format.buffers  # a pass may put others into the modules
        self._shared_weights.announce(self.newest + 1)

    def withdraw(self) -> None:
        self._shared_weights.announce(self.newest)

    def after_step(self) -> None:
        super().after_step()
        self.publish()

    def await_gradients(self, update: int, gradients: Gradients) -> Waiting[None]:
        """Puts the buffers that other ranks have changed into the modules, too."""
        yield from wait_for(self._shared_weights.wait(gradients_of=update))
        sums, buffers, loss_weight, count = self._shared_weights.read_rotation(update)
        gradients.fill(sums, loss_weight, count)
        for slot, buffer in zip(self._store_format.buffers, buffers, strict=True):
            if buffer is not None:
                slot.copy_(buffer)

    def acquire(self, version: int) -> WeightSet:
        super().acquire(version)
        weights = self._copies.setdefault(version, WeightSet(version, {}))
        weights.readers += 1
        self._load(weights)
        return weights

    def release(self, weights: WeightSet) -> None:
        super().release(self._sets[weights.version])
        weights.readers -= 1

    def _load(self, weights: WeightSet) -> list[torch.Tensor]:
        if self._untrained is None:
            self._untrained = self._copy_untrained()
            self._copied_buffers = [
                (buffer, buffer._version) for buffer in self._untrained[self._store_format.frozen :]
            ]
        if not weights.leaves:
            leaves, _ = self._shared_weights.copy(weights.version)
            weights.leaves.update(leaves)
        return self._untrained

    def _copy_untrained(self) -> list[torch.Tensor]:
        return [tensor.to(self._shared_weights.copies.device, copy=True) for tensor in self._store_format.untrained]

    def reading(self, ema: bool) -> tuple[dict[str, torch.Tensor], AbstractContextManager[None]]:
        leaves, _ = self._shared_weights.copy(self.newest)
        if ema and self.averages:
            leaves = self._store_format.view_ema(self._shared_weights.copies.copy_to_device(self._shared_weights.ema))
        return leaves, self._store_format.installed(self._copy_untrained())

    def installed(self, weights: WeightSet) -> AbstractContextManager[None]:
        """Returns a context in which the modules hold copies of what else passes with these weights read."""
        return self._store_format.installed(self._load(weights))

    def end_passes(self, gradients: Gradients) -> None:
        for weights in self._copies.values():
            weights.leaves.clear()
        self._copies = {version: weights for version, weights in self._copies.items() if weights.readers}
        if self._untrained is not None:
            buffers, self._untrained = self._untrained[self._store_format.frozen :], None
            written = self._store_format.select_written(buffers, self._copied_buffers)
            for home_buffer, buffer in zip(self._store_format.buffers, written, strict=True):
                if buffer is not None:
                    home_buffer.copy_(buffer)  # the host waits for its GPU
            self._copied_buffers = []
        self._shared_weights.copies.note_dropped()

    def collect_gradients(self, gradients: Gradients) -> None:
        if not self._store_format.rotations:  # else the ranks of their backwards have left them in the store
            slots = self._store_format.view_gradients(self._shared_weights.gradients)
            gradients.replace(*self._shared_weights.copies.copy_to_store(gradients.accumulators, slots))

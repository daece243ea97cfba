"""The host store of one process: makes, opens, pins and closes the parts of its stages (`host_store`)."""

import os
import platform
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.core.errors import PlanError, ScheduleError
from pipedream.core.schedule.program import Program
from pipedream.extensions.host_weights.copied_weights import CopiedWeights
from pipedream.extensions.host_weights.cpu_optimizer import CpuOptimizerWeights
from pipedream.extensions.host_weights.home_versions import HostVersions
from pipedream.extensions.host_weights.host_store import DeviceCopies, SharedWeights, StoreFormat
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.comm.process_group import gather_json, machine_address, read_machine
from pipedream.runtime.residence import Residence
from pipedream.runtime.stage.stage_module import StageModule
from pipedream.runtime.stage.versions import Versions, WeightStore
from pipedream.runtime.update.stepped import SteppedWeights


class HostStore(Residence):
    """The parts of the store that this process uses, by stage.

    Args:
        group: of all ranks; None in a single process.
    """

    def __init__(self, blueprint: Blueprint, group: dist.ProcessGroup | None) -> None:
        self._blueprint = blueprint
        is_shared = group is not None and blueprint.placement.shares_weights
        self._group = weakref.ref(group) if is_shared else None  # which ends with the run
        self._device = blueprint.device
        self._workers = blueprint.placement.workers if group is None else 1  # in this process
        self._memory: dict[int | tuple[int, int], torch.Tensor] = {}
        self._files: dict[int, tuple[int, int]] = {}  # stage -> descriptor, bytes; of the parts that were made here
        self._settled: dict[int, SharedWeights] = {}

    @cached_property
    def _copies(self) -> DeviceCopies:
        return DeviceCopies(self._device, self._workers)

    def copy(self, rank: int, stage: int, module: StageModule) -> Callable[[Program], WeightStore]:
        store_format = self._make_format(stage, module)
        if self._group is not None and self._blueprint.placement.ranks[stage] != (rank,):
            for name, handle in module.handles.items():
                module.handles[name] = nn.Parameter(torch.empty_like(handle, device="meta"))
        open_part = partial(self._open, stage, store_format)
        return lambda program: CopiedWeights(store_format, program.updates.per_update[stage], open_part)

    def settle(
        self,
        stage: int,
        replica: int,
        module: StageModule,
        handles: Mapping[str, nn.Parameter],
        averages: dict[str, torch.Tensor],
    ) -> SteppedWeights:
        if not self._blueprint.placement.shares_weights:
            return self._copy_handles(stage, replica, module, handles)
        part = self._settled[stage] = self._open(stage, self._make_format(stage, module))
        for name, slot in part.store_format.view_ema(part.ema).items():
            averages[name] = slot.copy_(averages[name])
        return super().settle(stage, replica, module, handles, averages)

    def make_versions(
        self, stage: int, handles: Mapping[str, nn.Parameter], *, watched: bool, single: bool
    ) -> Versions:
        if stage not in self._settled:
            return super().make_versions(stage, handles, watched=watched, single=single)
        return HostVersions(handles, self._settled[stage], single=single)

    def _make_format(self, stage: int, module: StageModule) -> StoreFormat:
        blueprint = self._blueprint
        sets = max(program.weights.versions(stage) for program in blueprint.programs)
        rotations = blueprint.program.gradient_sets if blueprint.placement.rotates else 0
        gradients = not rotations and blueprint.weights_device != self._device
        return StoreFormat(module, sets, blueprint.settings.ema is not None, gradients=gradients, rotations=rotations)

    def _copy_handles(
        self, stage: int, replica: int, module: StageModule, handles: Mapping[str, nn.Parameter]
    ) -> CpuOptimizerWeights:
        """Returns copies of a stage replica's weights, in memory of this process."""
        if module.division.is_divided:
            raise ScheduleError(
                "optimizer_state='host' was asked for on a mesh, whose ranks divide weights and state themselves; keep "
                "the optimizer on the device, or plan without a mesh"
            )
        store_format = StoreFormat(module, 1, ema=False, gradients=self._device.type == "cuda", trained_only=True)
        memory = self._memory[stage, replica] = self._make(stage, store_format.stored_bytes)
        part = SharedWeights(store_format, memory, False, self._copies)
        slots, _ = store_format.view_set(part.sets[0])
        gradient_slots = store_format.view_gradients(part.gradients)
        return CpuOptimizerWeights(handles, slots, partial(self._copies.copy_to_store, slots=gradient_slots))

    def _open(self, stage: int, store_format: StoreFormat) -> SharedWeights:
        """Opens a stage's part; makes it first if no process has."""
        if stage not in self._memory:
            self._memory[stage] = self._make(stage, store_format.stored_bytes)
        return SharedWeights(store_format, self._memory[stage], self._group is not None, self._copies)

    def close(self) -> None:
        """Unpins the memory, which the user's model continues to use."""
        if self._memory and self._device.type == "cuda":
            self._copies.wait()
            for memory in self._memory.values():
                torch.cuda.check_error(int(_cudart().cudaHostUnregister(memory.data_ptr())))
        self._memory.clear()

    def exchange(self) -> None:
        """Opens the parts that other processes have made.

        Raises:
            PlanError: ranks are on several machines, or on processors that reorder writes.
        """
        group = None if self._group is None else self._group()
        if group is None:
            return
        if (processor := platform.machine()) not in ("x86_64", "AMD64"):
            # A version's number is written after its weights, and others read both without a lock.
            raise PlanError(
                f"weights in memory that processes share were asked for on {processor}, which may show a write before "
                "an earlier one; run all workers in one process, or choose another method"
            )
        process_place = [read_machine(), os.getpid(), machine_address()]
        parts = gather_json([process_place, list(self._files.items())], group)
        if len(machines := {machine: address for (machine, _, address), _ in parts}) > 1:
            raise PlanError(
                "weights in the memory of one machine were asked for, but the ranks are on "
                f"{len(machines)}: {', '.join(machines.values())}; start all of them on one, or choose another method"
            )
        for (_, process, _), files in parts:
            for stage, (file, size) in files:
                if stage not in self._memory:
                    self._memory[stage] = self._pin(_map_file(f"/proc/{process}/fd/{file}", size))
        dist.barrier(group)
        for file, _ in self._files.values():
            os.close(file)

    def _pin(self, memory: torch.Tensor) -> torch.Tensor:
        # Not by torch, which would take the next power of two.
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                status = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if status:
                raise PlanError(
                    f"{memory.nbytes} bytes of the machine's memory were to be pinned for the weights of a stage, but "
                    f"CUDA answered {_cudart().cudaGetErrorString(status)}; raise the limit of locked memory "
                    "(ulimit -l), or choose another method"
                )
        return memory

    def _make(self, stage: int, size: int) -> torch.Tensor:
        # As for messages in shared memory: in no file system.
        file = os.memfd_create(f"pipedream-stage-{stage}")
        os.ftruncate(file, size)
        memory = self._pin(_map_file(f"/proc/self/fd/{file}", size))
        if self._group is None:
            os.close(file)
        else:
            self._files[stage] = file, size
        return memory


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _map_file(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


make_residence = HostStore

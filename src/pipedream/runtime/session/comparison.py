"""Compares the first minibatch with the model run plainly: as a whole, or stage by stage where it does not fit."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream.runtime.checkpoint.initial_values import named_state
from pipedream.runtime.comm.process_group import broadcast_text
from pipedream.runtime.data.source import MeshSource, ReadingSource, Source
from pipedream.runtime.first_minibatch.reference_run import ReferenceRun, UserModel
from pipedream.runtime.first_minibatch.stage_check import LayersCheck, StageCheck
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.stage_state import StageState

_log = logging.getLogger("pipedream")


class Comparison:
    """The comparison of one process.

    Args:
        plain: the model as the user wrote it.
        whole_bytes: of the whole model.
        free_bytes: returns the memory that this process may still take.
    """

    def __init__(self, local: LocalWorkers, plain: UserModel, whole_bytes: int, free_bytes: Callable[[], int]) -> None:
        self._local = local
        self._plain = plain
        self._whole_bytes = whole_bytes
        self._free_bytes = free_bytes

    def begin(self, sources: Mapping[int, Source]) -> ReferenceRun | None:
        """Lets the coming training compare its first minibatch; returns what compares its loss, if the model fits."""
        local, program = self._local, self._local.program
        if min(program.updates.per_update) < program.microbatches:
            return None
        reader = program.placement.readers[0]
        if local.distributed and not self._fits(reader):
            self._check_each_stage()
            return None
        run = self._make_reference_run(**(self._collect_weights(reader) if local.distributed else {}))
        for worker in local.workers:
            for stage, replica in program.placement.stage_replicas(worker.rank):
                self._check_stage(run, stage, replica, worker.stage_states[stage])
        source = sources.get(reader)
        if isinstance(source, MeshSource):
            source = source.source
        if isinstance(source, ReadingSource):
            source.splitter.on_first = run.read
        return run

    def _fits(self, reader: int) -> bool:
        """Returns whether the whole model, its gradients and as much again fit the rank that reads the data."""
        fits = self._local.worker_rank != reader or 4 * self._whole_bytes <= self._free_bytes()
        return not self._local.any_rank(not fits)

    def _collect_weights(self, reader: int) -> dict[str, Any]:
        """Collects the weights at the reading rank, and returns how it publishes what it has computed."""
        local = self._local
        store = dist.distributed_c10d._get_default_store()
        key = "pipedream/first/" + broadcast_text(uuid.uuid4().hex, local.group)
        with local.activity.at("collecting the weights"):
            values: dict[str, torch.Tensor] = local.collect_tensors(local.tensors(), reader)
            values |= {
                name: values[first_name]
                for name in values
                for first_name in local.names.shared.get(name, ())[:1]
                if first_name in values
            }
        return {
            "values": values,
            "publish": partial(store.set, key),
            "receive": lambda: store.get(key).decode(),
        }

    def _make_reference_run(self, **over_ranks: Any) -> ReferenceRun:
        local, settings = self._local, self._local.blueprint.settings
        return ReferenceRun(
            self._plain,
            settings.loss,
            rank=local.rank,
            split=local.program.microbatches,
            base=local.lead.done_minibatches,
            seed=settings.seed,
            device=local.blueprint.device,
            autocast=settings.autocast,
            compiles=settings.compile is not None,
            **over_ranks,
        )

    def _check_each_stage(self) -> None:
        """Lets each stage of this rank compare its first microbatch with its own layers."""
        local, placement = self._local, self._local.program.placement
        if local.rank == 0:
            how = "not compared with the model's own" if local.shardings else "compared stage by stage"
            _log.warning("the first minibatch is %s: the whole model does not fit the worker that reads it", how)
        if local.shardings:
            return
        for stage, replica in placement.stage_replicas(local.worker_rank):
            stage_state = local.lead.stage_states[stage]
            if not replica and not placement.is_remote(stage):
                names = list(stage_state.versions.handles)
                stage_state.check = LayersCheck(self._make_reference_run(), stage, stage_state.module, names)

    def _check_stage(self, run: ReferenceRun, stage: int, replica: int, stage_state: StageState) -> None:
        local, placement = self._local, self._local.program.placement
        alone = local.program.updates.per_update[stage] == run.split
        buffers: list[str] = []
        if not placement.is_remote(stage) and (placement.replicas[stage] == 1 or (run.split == 1 and not replica)):
            here = dict(local.model.named_buffers(remove_duplicate=False))
            buffers = [name for name in local.names.by_stage[stage] if name in here]
        sharding = local.shardings.get(stage)
        if alone or (run.split == 1 and not replica and sharding is None):
            names = list(stage_state.versions.handles)
            stage_state.check = StageCheck(run, stage, buffers, names, alone=alone, sharding=sharding)


def count_bytes(model: nn.Module) -> int:
    """Returns the bytes of the whole model, each tensor counted once."""
    return sum({id(tensor): tensor.nbytes for tensor in named_state(model).values()}.values())

"""The workers of one process, and operations on them that all parts of a session share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from pipedream.core.errors import PipelineError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.schedule.program import Program
from pipedream.runtime.activity import Activity
from pipedream.runtime.assemble import WorkerMaterials, build_worker, check_programs
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.comm.channel import run_together
from pipedream.runtime.comm.connections import Connections
from pipedream.runtime.comm.process_group import gather_texts, wait_for_all, world_group
from pipedream.runtime.data.source import DataSources
from pipedream.runtime.division import Division
from pipedream.runtime.residence import Residence
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.unguarded import CALL, Unguarded
from pipedream.runtime.weights import parameters
from pipedream.runtime.worker import Worker


@dataclass
class ModelNames:
    """The names of the model's parameters and buffers, by their place in the pipeline.

    Attributes:
        by_stage: of each stage.
        shared: name -> all names of the same tensor.
        unused: of those that no stage reads; only at rank 0.
        local: of this process's stages.
    """

    by_stage: list[list[str]]
    shared: dict[str, tuple[str, ...]]
    unused: list[str]
    local: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, graph: LayerGraph, blueprint: Blueprint, rank: int) -> ModelNames:
        stages = blueprint.program.plan.stages
        by_stage = [parameters.list_stage_names(graph, stage.first, stage.last) for stage in stages]
        all_names = [name for names in by_stage for name in names]
        unused = parameters.list_unused_names(model, all_names) if rank == 0 else []
        return cls(by_stage, parameters.find_shared_names(model), unused)

    def loaded_from(self, state: Mapping[str, object]) -> set[str]:
        """Returns the names that this process takes from a state."""
        return self.local | (set(self.unused) & set(state))


@dataclass
class LocalWorkers:
    """The workers of one process.

    Attributes:
        rank: of this process.
        worker_rank: of its worker; 0 if all workers are here.
        stages: one for each replica of a stage here.
        connections, group: None in a single process. The group has all ranks; after the end it is the user's.
        divisions: stage -> how the ranks of this worker divide it; empty if no worker has several.
    """

    model: nn.Module
    blueprint: Blueprint
    names: ModelNames
    rank: int
    worker_rank: int = 0
    stages: Sequence[int] = ()
    activity: Activity = field(default_factory=Activity)
    guard: Unguarded = field(default_factory=Unguarded)
    connections: Connections | None = None
    group: dist.ProcessGroup | None = None
    divisions: dict[int, Division] = field(default_factory=dict)
    materials: Sequence[WorkerMaterials] = ()
    workers: list[Worker] = field(default_factory=list)
    residence: Residence = field(default_factory=Residence)
    data: DataSources = field(init=False)

    def build(self, materials: Sequence[WorkerMaterials]) -> None:
        """Builds the workers for the first program. Raises a `ScheduleError` if their stages do not fit a later one."""
        self.materials = materials
        self.workers = [build_worker(self.blueprint, row) for row in materials]
        check_programs(self.workers, self.blueprint.programs)

    def begin_phase(self, phase: int) -> None:
        """Builds the workers anew for another phase's program, at a drain; they continue with the present state."""
        self.blueprint = replace(self.blueprint, phase=phase)
        former_workers = self.workers
        self.workers = [build_worker(self.blueprint, row) for row in self.materials]
        for worker, former in zip(self.workers, former_workers, strict=True):
            worker.take_over(former)
            worker.recorder.begin_phase(phase)

    @property
    def shardings(self) -> dict[int, Division]:
        """The divisions by which this rank may have less than all of a tensor."""
        return {stage: division for stage, division in self.divisions.items() if division.is_divided}

    def leave(self, *, failed: bool) -> None:
        """Leaves the other ranks, some of which may be gone after a failure; otherwise every rank calls it."""
        if self.connections is None:
            return
        if failed:
            self.connections.abort()
        else:
            wait_for_all()
            self.connections.close()
        self.connections, self.group = None, world_group()
        self.materials = ()  # their links hold groups, too, whose threads would stay

    @property
    def distributed(self) -> bool:
        return self.group is not None

    @property
    def program(self) -> Program:
        return self.blueprint.program

    @property
    def lead(self) -> Worker:
        """The worker that represents this process."""
        return self.workers[self.program.placement.readers[0] if len(self.workers) > 1 else 0]

    @property
    def stage_states(self) -> list[tuple[int, StageState]]:
        return [item for worker in self.workers for item in worker.stage_states.items()]

    def switch_optimizers(self, mode: Literal["train", "eval"]) -> None:
        """Switches between the weights that are evaluated and those that are trained, at a drain.

        They differ for schedule-free optimizers, and between averages of the replicas' weights.
        """
        reducers = [stage_state.optimizer.reducer for _, stage_state in self.stage_states]
        if mode == "eval":
            run_together(reducer.show_common() for reducer in reducers)
        for reducer in reducers if mode == "train" else ():
            reducer.show_local()
        for _, stage_state in self.stage_states:
            if stage_state.optimizer.switch_mode(mode) or stage_state.optimizer.reducer.averages_weights:
                stage_state.optimizer.stepped.write()
                stage_state.versions.reload()

    @property
    def replicas(self) -> list[tuple[int, int, StageState]]:
        """The local stages, each with the number of its replica."""
        ranks = self.program.placement.ranks
        return [
            (stage, ranks[stage].index(worker.rank), stage_state)
            for worker in self.workers
            for stage, stage_state in worker.stage_states.items()
        ]

    @property
    def rate(self) -> tuple[float, int]:
        """The learning rate, before the stages' factors, and the input stage's rounds."""
        lead = self.lead
        return lead.rate, lead.stage_states[min(lead.stage_states)].optimizer.schedule.rounds

    def note_call(self, name: str, minibatches: int) -> None:
        """Records a call that every rank must make, once its loop has received `minibatches`."""
        self.activity.calls.append((name, minibatches))

    def report(self, error: PipelineError) -> PipelineError:
        """Reports an error; returns the error to raise: this one, or its cause at another rank."""
        self.activity.stop()
        return self.guard.first_cause(error, self.lead.where)

    @contextmanager
    def reporting(self, doing: str | None = None) -> Iterator[None]:
        """Context whose errors are reported; `doing` names the activity."""
        try:
            if doing is None:
                yield
            else:
                with self.activity.at(doing):
                    yield
        except PipelineError as error:
            raise self.report(error) from error.__cause__

    def await_same_call(self, settings: Mapping[str, Any] | None = None) -> None:
        """Waits until every rank has made the last recorded call, with the same settings."""
        name, minibatches = self.activity.calls[-1] if self.activity.calls else ("calibration", 0)
        call = f"{name} after {minibatches} minibatches"
        try:
            self.guard.check_same({CALL: call, **(settings or {})}, self.group)
        except (PipelineError, RuntimeError) as error:
            raise self.guard.first_cause(error, self.lead.where) from error

    def any_rank(self, wish: bool) -> bool:
        """Returns whether `wish` is true at any rank; every rank calls it."""
        return "yes" in gather_texts("yes" if wish else "", self.group)

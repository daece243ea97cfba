"""Saves and restores a session's state: that of all stages at a drain."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipedream._version import __version__
from pipedream.core.artifact import decode, encode
from pipedream.core.box import Box
from pipedream.core.checkpoint import Checkpoint, PipelineRequest, Position, SavedStage
from pipedream.core.errors import ArtifactError, PipelineError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.program import Program
from pipedream.runtime.comm.process_group import gather_json
from pipedream.runtime.data.generators import find_generators
from pipedream.runtime.data.rng import read_state, restore_rng, save_rng, set_state
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.runtime.session.service import SessionService
from pipedream.runtime.weights.parameters import named_state
from pipedream.services.checkpoint import folders, optimizer_state, pieces, replica_state, writer
from pipedream.services.checkpoint.stores.store import CheckpointStore
from pipedream.services.weights.extra_states import collect_extra_states, set_extra_states
from pipedream.services.weights.state import list_copies, share_with_replicas
from pipedream.services.weights.transfer import load

Slice = tuple[Box, Sequence[int]]
"""A part of a tensor, and the shape of the whole."""


class Checkpointer(SessionService):
    """Saves and restores the workers of this process; every rank makes the same calls, at a drain.

    Args:
        loss: a loss with buffers of its own, if it is a module.

    Attributes:
        writer: writes checkpoints, perhaps in the background, with a process group of its own.
    """

    def __init__(self, workers_here: LocalWorkers, loss: nn.Module | None) -> None:
        self._workers_here = workers_here
        self._model = workers_here.model
        self._names = workers_here.names
        self._device = workers_here.blueprint.device
        self._weights_device = workers_here.blueprint.weights_device
        self._loss = {} if loss is None else {f"loss/{name}": t for name, t in loss.state_dict(keep_vars=True).items()}
        self._generators = find_generators({name: vars(module) for name, module in self._model.named_modules()})
        self._file_owners: dict[str, int] = {}
        self._is_checked = False  # by `check_savable`
        self.writer = writer.Writer(workers_here.rank, workers_here.distributed, self._device)

    def check_savable(self) -> None:
        """Raises a `PipelineError` if a local stage's optimizer or scheduler cannot be saved, now or after a step."""
        self._is_checked, settings = True, self._workers_here.blueprint.settings
        with self._workers_here.reporting("checking what a checkpoint would hold"):
            for stage, stage_state in self._workers_here.stage_states:
                optimizer_state.collect_tensors(stage_state.optimizer)
                optimizer_state.to_saved_stage(stage_state.optimizer)
                if stage not in self._workers_here.shardings:
                    optimizer_state.check_after_step(stage_state.optimizer, settings.optimizer, settings.scheduler)

    def save(
        self,
        store: CheckpointStore,
        request: PipelineRequest,
        position: Position,
        *,
        keep: int | None,
        wait: bool,
        extra: Mapping[str, Any],
    ) -> CheckpointStore:
        """Writes a checkpoint.

        Args:
            extra: of the training loop, in JSON; rank 0's is written.
            keep: complete checkpoints to keep; None keeps all.
            wait: False writes a copy in the background.

        Raises:
            WorkerError: this checkpoint, or the previous one, could not be written.
        """
        if not self._is_checked:
            self.check_savable()
        with self._workers_here.reporting("saving a checkpoint"):
            self.writer.finish()
            tensors, slices, stages = self._collect()
            wait_for_copies = None
            if not wait:
                tensors, wait_for_copies = pieces.copy_for_writing(tensors)
            own_stages = [stages, save_rng(self._device), position.data] if self._is_first else None
            rows = [row for row in gather_json(own_stages, self._workers_here.group) if row is not None]
            states: defaultdict[int, dict[int, SavedStage]] = defaultdict(dict)  # stage -> replica -> state
            for stage, replica, state in chain.from_iterable(saved_stages for saved_stages, *_ in rows):
                states[stage][replica] = decode(SavedStage, state, "a stage")
            reader = self._program.placement.readers[0] if self._workers_here.distributed else 0
            manifest = Checkpoint(
                **vars(request),
                **vars(replace(position, data=rows[reader][2])),
                schedule=self._program.name,
                microbatches=self._program.microbatches,
                compensation=self._program.updates.compensation,
                stages=tuple(_join_replicas(states[stage]) for stage in range(len(self._names.by_stage))),
                random=tuple(random for _, random, _ in rows),
                software={"pipedream": __version__, "torch": version("torch")},
                extra=dict(extra),
            )
            checkpoint = self.writer.begin(writer.Save(store, manifest, tensors, keep, slices, wait_for_copies))
            if wait:
                self.writer.finish()
            return checkpoint

    def read_newest(self, store: CheckpointStore) -> tuple[CheckpointStore, Checkpoint]:
        """Returns the newest checkpoint in a store, or the folder if it is one, with its manifest.

        Every rank raises the same `ArtifactError` if there is none, or the manifest is damaged.
        """
        with self._workers_here.activity.at("looking for a checkpoint"):
            checkpoint = folders.find_newest_of_all(folders.find_newest_checkpoint(store), self._workers_here.group)
        if checkpoint is None:
            raise ArtifactError(f"there is no complete checkpoint in {store}; give a folder that a run has saved into")
        folders.warn_of_unfinished(checkpoint, store, self._workers_here.rank)
        with self._workers_here.activity.at("reading a checkpoint"):
            manifest, self._file_owners = folders.read_shared_manifest(checkpoint, self._workers_here.group)
        return checkpoint, manifest

    def restore(self, checkpoint: CheckpointStore, manifest: Checkpoint) -> None:
        """Restores a checkpoint saved under any plan and schedule.

        Every rank raises the same `ArtifactError` if it is damaged or belongs to another model or optimizer.
        """
        with self._workers_here.activity.at("reading a checkpoint"):
            names = dict.fromkeys(self._find_tensors_to_load(manifest))
            with self._failing_together():
                folders.check_names(checkpoint, manifest, names)
                _check_shapes(self._workers_here, manifest)
            boxes = {name: self._find_box(name, manifest.tensors[name].shape) for name in names}
            tensors = self._fetch(checkpoint, manifest, boxes)
            with self._failing_together():
                self._restore(checkpoint, manifest, tensors)
            self.writer.note_loaded(checkpoint, manifest.minibatches)
        same = _has_same_replicas(self._program, manifest)
        replica_state.warn_of_other_replicas(manifest, same=same, rank=self._workers_here.rank)

    def check(self) -> None:
        """Raises the error of a checkpoint that was written in the background."""
        with self._workers_here.reporting(None):
            self.writer.check()

    def finish(self) -> None:
        """Waits for a checkpoint that is written in the background, and raises its error."""
        with self._workers_here.reporting("saving a checkpoint"):
            self.writer.finish()

    def close(self, *, failed: bool) -> None:
        self.writer.close(failed=failed)

    def _failing_together(self) -> AbstractContextManager[None]:
        return folders.failing_together(self._workers_here.group, PipelineError)

    @property
    def _program(self) -> Program:
        return self._workers_here.program

    @property
    def _is_first(self) -> bool:
        """Whether this is the first rank of its worker."""
        return all(sharding.is_first for sharding in self._workers_here.shardings.values())

    def _collect(self) -> tuple[dict[str, torch.Tensor], dict[str, Slice], list[tuple[int, int, Any]]]:
        """Returns what this rank saves: tensors, the boxes of those that are parts, and its stages."""
        state = named_state(self._model)
        tensors = {f"model/{name}": state[name].detach() for name in self._names.unused}
        slices: dict[str, Slice] = {}
        stages: list[tuple[int, int, Any]] = []
        extra_states = collect_extra_states(self._workers_here)
        for stage, replica, stage_state in self._workers_here.replicas:
            stage_tensors = replica_state.collect_tensors(stage_state.optimizer, replica)
            if not replica:
                names = (name for name in self._names.by_stage[stage] if name in state)
                stage_tensors |= {f"model/{name}": state[name].detach() for name in names}
                stage_tensors |= optimizer_state.collect_tensors(stage_state.optimizer)
                stage_tensors |= stage_state.part_tensors()
            if stage in self._workers_here.shardings:
                parts = {
                    name: self._workers_here.shardings[stage].locate_saved(self._list_weights(name), tensor)
                    for name, tensor in stage_tensors.items()
                }
                slices |= {name: place for name, place in parts.items() if place is not None}
                stage_tensors = {name: tensor for name, tensor in stage_tensors.items() if parts[name] is not None}
            tensors |= stage_tensors
            if replica and not stage_state.optimizer.reducer.averages_weights:
                continue
            own_ids = set(map(id, stage_state.module.own_generators))
            saved = replace(
                optimizer_state.to_saved_stage(stage_state.optimizer),
                norm_square=self._workers_here.workers[0].updates.decision.norm_square,
                modules={} if replica else extra_states[stage],
                generators={name: read_state(g) for name, g in self._generators.items() if id(g) in own_ids},
            )
            stages.append((stage, replica, encode(saved)))
            if not replica and stage == len(self._names.by_stage) - 1 and self._is_first:
                tensors |= {name: tensor.detach() for name, tensor in self._loss.items()}
        return tensors, slices, stages

    def _list_weights(self, name: str) -> list[str]:
        """Returns the weights that a tensor of a checkpoint, KIND/WEIGHT or KIND/WEIGHT/KEY, may belong to."""
        _, _, rest = replica_state.strip_replica(name).partition("/")
        owners = rest, rest.rpartition("/")[0]
        return [weight for owner in owners for weight in self._names.shared.get(owner, (owner,))]

    def _find_box(self, name: str, shape: Sequence[int]) -> Box:
        """Returns the part of a tensor that this rank needs."""
        whole = tuple(map(range, shape))
        boxes = [
            sharding.find_box(self._list_weights(name), shape) for sharding in self._workers_here.shardings.values()
        ]
        return next((box for box in boxes if box != whole), whole)

    def _fetch(
        self, checkpoint: CheckpointStore, manifest: Checkpoint, boxes: Mapping[str, Box]
    ) -> dict[str, torch.Tensor]:
        """Returns parts of tensors, read from this machine's files or received from ranks that have the files."""
        missing_files = folders.find_file_problems(checkpoint, manifest)
        shares = pieces.list_shares(manifest, boxes)
        local_shares = [share for share in shares if share.stored_in(manifest).file not in missing_files]
        missing = [
            (name, number, [(side.start, side.stop) for side in box])
            for name, number, box in (share for share in shares if share.stored_in(manifest).file in missing_files)
        ]
        requests = [
            (rank, pieces.Share(name, number, tuple(range(*side) for side in box)))
            for rank, rows in enumerate(gather_json(missing, self._workers_here.group))
            for name, number, box in rows
        ]
        requested = {share for _, share in requests if self._find_owner(manifest, share) == self._workers_here.rank}

        with self._failing_together():
            parts = dict(pieces.read_shares(checkpoint, manifest, {*local_shares, *requested}))
        for rank, share in requests:
            owner = self._find_owner(manifest, share)
            if rank == self._workers_here.rank:
                parts[share] = pieces.make_empty(manifest.tensors[share.name].dtype, share.box)
                dist.recv(_view_bytes(parts[share]), group=self._workers_here.group, group_src=owner)
            elif owner == self._workers_here.rank:
                dist.send(_view_bytes(parts[share]), group=self._workers_here.group, group_dst=rank)
        return pieces.assemble(manifest, boxes, ((share, parts.pop(share)) for share in shares))

    def _find_owner(self, manifest: Checkpoint, share: pieces.Share) -> int:
        """Returns the rank that reads a share for ranks whose machines lack its file."""
        return self._file_owners[share.stored_in(manifest).file]

    def _restore(self, checkpoint: CheckpointStore, manifest: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
        values = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
        load(self._model, values, self._names.loaded_from(values), {}, self._weights_device)
        for saved_stage in manifest.stages:
            set_extra_states(self._model, saved_stage.modules)
            for name in self._generators.keys() & saved_stage.generators.keys():
                set_state(self._generators[name], saved_stage.generators[name])
        with torch.no_grad():
            for name, tensor in self._loss.items():
                if name in tensors:
                    tensor.copy_(tensors[name])
        share_with_replicas(self._workers_here.workers)
        same_method = (self._program.name, self._program.microbatches) == (manifest.schedule, manifest.microbatches)
        same_stages = same_method and _have_same_stages(self._program.plan, manifest.plan)
        same_replicas = _has_same_replicas(self._program, manifest)
        for stage, replica, stage_state in self._workers_here.replicas:
            stage_state.versions.reload()
            # Stages of one process that train the same weights must not share their optimizers' tensors.
            is_alone = len(self._workers_here.workers) == 1 and not list_copies(stage_state)
            stage_tensors = tensors if is_alone else {name: tensor.clone() for name, tensor in tensors.items()}
            for part in stage_state.parts:
                part.restore(stage_tensors)
            try:
                replica_state.restore(
                    stage_state.optimizer,
                    manifest.stages,
                    stage_tensors,
                    stage=stage if same_stages else None,
                    replica=(stage, replica) if same_replicas else None,
                )
            except PipelineError:
                raise
            except Exception as error:  # of the user's optimizer and scheduler, whatever they raise
                raise ArtifactError(
                    f"the optimizer state in the checkpoint {checkpoint} does not fit: {type(error).__name__}: "
                    f"{error}; resume with the same optimizer and scheduler"
                ) from None
        for worker in self._workers_here.workers:
            worker.done_minibatches = manifest.minibatches
            worker.updates.decision.norm_square = manifest.stages[0].norm_square  # of all stages
            worker.input_updates = manifest.stages[0].updates if same_stages else 0
        if manifest.random:
            restore_rng(manifest.random[self._workers_here.worker_rank % len(manifest.random)], self._device)

    def _find_tensors_to_load(self, manifest: Checkpoint) -> Iterable[str]:
        state = named_state(self._model)
        saved = self._model.state_dict(keep_vars=True)
        for name in (name for names in self._names.by_stage for name in names if name in self._names.local):
            # A buffer that is not part of state dicts may be missing; it keeps its value.
            if name in state and (name in saved or f"model/{name}" in manifest.tensors):
                yield f"model/{name}"
        trained = {name for _, stage_state in self._workers_here.stage_states for name in stage_state.optimizer.named}
        # A shared weight is saved under its first name, perhaps of a layer elsewhere.
        yield from (f"model/{name}" for name in trained - self._names.local if f"model/{name}" in manifest.tensors)
        yield from (name for name in self._loss if name in manifest.tensors)
        yield from (f"model/{name}" for name in self._names.unused if f"model/{name}" in manifest.tensors)
        same = _has_same_replicas(self._program, manifest)
        for _, number, stage_state in self._workers_here.replicas:
            replica = number if same else None
            yield from replica_state.find_tensors(manifest.tensors, stage_state.optimizer, replica)
            yield from (name for name in stage_state.part_tensors() if name in manifest.tensors)


def _join_replicas(states: Mapping[int, SavedStage]) -> SavedStage:
    return replace(states[0], replicas=tuple(states[replica] for replica in sorted(states) if replica))


def _has_same_replicas(program: Program, manifest: Checkpoint) -> bool:
    return _have_same_stages(program.plan, manifest.plan) and program.plan.choices.sums == manifest.plan.choices.sums


def _check_shapes(workers_here: LocalWorkers, manifest: Checkpoint) -> None:
    names = [name for name in manifest.tensors if name.startswith("model/")]
    shapes = {name.removeprefix("model/"): manifest.tensors[name].shape for name in names}
    for sharding in workers_here.shardings.values():
        sharding.check_shapes(shapes)


def _have_same_stages(*plans: Plan) -> bool:
    spans = [[(stage.first, stage.last, stage.replicas) for stage in plan.stages] for plan in plans]
    return spans[0] == spans[1]


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)

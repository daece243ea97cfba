"""Checkpoints belong to no mesh: each rank writes its own part of a tensor, and reads the part that it needs."""

import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from built import Built
from marks import long
from torch import nn

import pipedream as pd
from pipedream.runtime.session.local_workers import LocalWorkers, ModelNames
from pipedream.services.checkpoint import folders, pieces
from pipedream.services.weights.transfer import collect_tensors
from tests.extensions.meshes.sharding.meshes import Case, D, Mlp, check_same, make_pipeline


def _make_tied() -> tuple[nn.Sequential, Any]:
    layers = nn.Sequential(nn.Embedding(13, D), Mlp(), Built(lambda _, x: x.mean(1)), nn.Linear(D, 13, bias=False))
    layers[3].weight = layers[0].weight
    return layers, lambda size: torch.randint(13, (size, 5))


Outcome = tuple[list[float], dict[str, torch.Tensor], dict[str, int]]


def _train_epoch(case: Case, mesh: str, before: str, after: str) -> Outcome:
    """Trains an epoch from one checkpoint to the next; returns losses, weights, and the bytes read and wanted."""
    counts = {"read": 0, "wanted": 0}
    read, assemble = pieces._read_piece, pieces.assemble

    def counted_read(*args: Any) -> torch.Tensor:
        values = read(*args)
        counts["read"] += values.nbytes
        return values

    def counted_assemble(*args: Any) -> dict[str, torch.Tensor]:
        workers = assemble(*args)
        counts["wanted"] += sum(tensor.nbytes for tensor in workers.values())
        return workers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE_BYTES", 512)  # in place of the size in a real run
        patch.setattr(pieces, "_read_piece", counted_read)
        patch.setattr(pieces, "assemble", counted_assemble)
        pipeline, batches = make_pipeline(case, mesh)
        with pipeline:
            if before:
                pipeline.load(before)
            losses = [done.loss for done in pipeline.train(batches, epochs=1 + pipeline.position[0])]
            pipeline.save(after, wait=False)
            return losses, pipeline.state_dict(), counts


def _train_epochs(case: Case, mesh: str, *args: str) -> list[Outcome]:
    ranks = replace(case, mesh=mesh).ranks
    return processes.team(ranks).results(_train_epoch, case, mesh, *args) if mesh else [_train_epoch(case, mesh, *args)]


def _check(actual: Outcome, expected: Outcome) -> None:
    check_same((*actual[:2], {}), (*expected[:2], {}))
    assert actual[1].keys() == expected[1].keys()


def _count_written(folder: str) -> Mapping[str, int]:
    """Returns the bytes of values in each file; each value must be in one."""
    checkpoint = folders.find_newest_checkpoint(folder)
    manifest = pieces.verify_checkpoint(checkpoint)
    sizes = {file.name: file.stat().st_size for file in checkpoint.locate("").glob("*.distcp")}
    elements = dict.fromkeys(manifest.files, 0)
    for stored in manifest.tensors.values():
        for piece in stored.pieces:
            elements[piece.file] += torch.Size(piece.shape).numel() * getattr(torch, stored.dtype).itemsize
            sizes[piece.file] -= piece.length
    assert not any(sizes.values()), "equal parts are written once"
    return elements


@pytest.mark.processes
@pytest.mark.slow
def test_a_checkpoint_belongs_to_no_mesh(tmp_path: Path) -> None:
    """Four epochs, each on another mesh; a tied weight of uneven shards, AdamW's state and averages."""
    adamw = {"optimizer": partial(torch.optim.AdamW, lr=0.01), "ema": 0.9}
    case = Case(_make_tied, "", "batch:data, d_ff:model", stages=(), shard_weights="data", options=adamw)
    before, there = "", str(tmp_path / "there")
    for mesh in ("data:2,model:2", "model:4", "", "data:2,model:2"):
        after = str(tmp_path / f"after {mesh}")
        outcomes = _train_epochs(case, mesh, before, after)
        _check(outcomes[0], _train_epoch(case, "", there if before else "", there))
        for _, _, counts in outcomes:
            # The pieces of uneven rows do not end where a part does.
            assert counts["wanted"] <= counts["read"] <= 1.2 * counts["wanted"], mesh
        written = _count_written(after)
        if mesh:
            assert max(written.values()) <= 1.5 * sum(written.values()) / pd.Mesh(mesh).size
        before = after


ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=0.1)
PIPEDREAM = ("mlp", "model:2", "d_ff:model", "pipedream", None)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        long(Case("mlp", "model:2", "d_ff:model", "interleaved_1f1b", 4)),
        long(Case("mlp", "model:2", "d_ff:model", options={"optimizer": partial(torch.optim.Adafactor, lr=0.1)})),
        long(Case(*PIPEDREAM, options={"compensation": ("error_feedback", "gap_aware")})),
        Case(*PIPEDREAM, options={"compensation": "basis_rotation:2:one_sided", "optimizer": ADAMW}),
        long(Case("mlp", "model:2/-", "batch:data, d_ff:model", shard_weights="data", options={"ema": 0.9})),
    ],
    ids=str,
)
def test_what_a_method_keeps_is_saved_in_pieces(case: Case, tmp_path: Path) -> None:
    """Saved on a mesh and continued without, and the other way round; of stages with meshes of their own on others."""
    single, saved = str(tmp_path / "single"), str(tmp_path / "saved")
    _check(_train_epochs(case, case.mesh, "", saved)[0], _train_epoch(case, "", "", single))
    _count_written(saved)
    _check(_train_epoch(case, "", saved, saved), _train_epoch(case, "", single, single))
    mesh = "-/data:2" if "/" in case.mesh else case.mesh
    _check(_train_epochs(case, mesh, saved, saved)[0], _train_epoch(case, "", single, single))


def _train_epoch_apart(case: Case, base: Path, before: bool, machine: list[int]) -> Outcome:
    """Trains an epoch where each rank is on a machine of its own."""
    home = base / str(machine[dist.get_rank()])
    home.mkdir(exist_ok=True)
    os.chdir(home)
    return _train_epoch(case, case.mesh, "run" if before else "", "run")


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_get_pieces_from_the_machines_that_have_them(tmp_path: Path) -> None:
    """The machines come back in another order, so each rank of the mesh lacks its own part."""
    case = Case("mlp", "model:2", "d_ff:model")
    single = str(tmp_path / "single")
    for before, machine in ((False, [0, 1, 2, 3]), (True, [3, 0, 1, 2])):
        outcomes = processes.results(_train_epoch_apart, 4, case, tmp_path, before, machine)
        _check(outcomes[0], _train_epoch(case, "", single if before else "", single))


class _WholeOnGpu(torch.Tensor):
    """Stands for a whole weight on a GPU."""

    def cpu(self, *_: Any) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.parametrize("is_first", [True, False])
def test_no_gpu_has_two_whole_weights_for_a_state_dict(is_first: bool) -> None:
    on_gpu: list[weakref.ref[torch.Tensor]] = []

    def gather(names: tuple[str, ...], part: torch.Tensor) -> torch.Tensor:
        assert not any(tensor() is not None for tensor in on_gpu), f"with that of {names}"
        whole = torch.cat([part, part]).as_subclass(_WholeOnGpu)
        on_gpu.append(weakref.ref(whole))
        return whole

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    local: Any = LocalWorkers(
        model,
        blueprint=SimpleNamespace(program=SimpleNamespace(placement=SimpleNamespace(ranks=[[0]]))),  # type: ignore[arg-type]
        names=ModelNames([["0.weight", "0.bias", "1.weight", "1.bias"]], {}, []),
        rank=0,
        connections=SimpleNamespace(leaders="first ranks" if is_first else None),  # type: ignore[arg-type]
        group="everyone",  # type: ignore[arg-type]
        divisions={0: SimpleNamespace(gather=gather, is_divided=True)},  # type: ignore[dict-item]
    )
    parts = {name: tensor.detach() for name, tensor in model.named_parameters()}
    whole = collect_tensors(local, parts)
    assert len(on_gpu) == len(parts), "every rank takes part"
    assert {name: tensor.shape for name, tensor in whole.items()} == {
        name: torch.cat([part, part]).shape for name, part in parts.items() if is_first
    }

"""PyTorch's own schedules, made without processes, and what its loader says to a file."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase

STAGES_A_RANK = {"GPipe": 1, "Interleaved1F1B": 2, "LoopedBFS": 2}
STAGES_A_RANK |= {"InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}
"""Schedules of torch 2.13 that show their order; its 1F1B is a case of its own, see the tests."""


class _Stage(_PipelineStageBase):
    """The part of a stage that a schedule reads before it runs: its place."""

    def __init__(self, index: int, stages: int, ranks: int, rank: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank, self.group = ranks, rank, None
        self.submod = nn.Identity()

    def _create_grad_recv_info(self, *_: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def _prepare_forward_infra(self, *_: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def _prepare_backward_infra(self, *_: Any) -> tuple[Any, ...]:
        raise NotImplementedError


def make_schedule(name: str, ranks: int, microbatches: int, count: int, **options: Any) -> Any:
    """Returns a schedule object, as rank 0 has it, with `count` stages a rank."""
    stages = [_Stage(index, ranks * count, ranks, 0) for index in range(count)]
    kind = theirs.get_schedule_class(name)
    return kind(stages[0] if issubclass(kind, theirs.PipelineScheduleSingle) else stages, microbatches, **options)


def orders(name: str, ranks: int, microbatches: int, count: int) -> dict[int, list[Any]]:
    schedule = make_schedule(name, ranks, microbatches, count)
    return getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()


def lowered(name: str, ranks: int, microbatches: int, count: int, **options: Any) -> dict[int, list[Any]]:
    return make_schedule(name, ranks, microbatches, count, **options).pipeline_order_with_comms


def text_of(rows: dict[int, list[Any]]) -> str:
    return "".join(",".join("" if a is None else str(a) for a in rows[rank]) + "\r\n" for rank in rows)


def load(file: Path, stages: int, ranks: int, microbatches: int) -> Any:
    """Loads a file with PyTorch's runtime, which checks it, adds the messages and lets it run dry."""
    mine = [_Stage(index, stages, ranks, 0) for index in range(stages)]
    runtime = theirs._PipelineScheduleRuntime(mine, microbatches)
    runtime._load_csv(str(file))
    apart = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # of which its dry run knows nothing
    rows = runtime.pipeline_order_with_comms
    rows = {rank: [a for a in row if a.computation_type.value not in apart] for rank, row in rows.items()}
    theirs._simulate_comms_compute(rows, lambda stage: runtime.stage_index_to_group_rank[stage], stages)
    return runtime


def model_and_batch() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Returns a model of four alike pairs of layers, and a batch of twelve."""
    torch.manual_seed(7)
    layers = [layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.Tanh())]
    return nn.Sequential(*layers).double(), torch.randn(12, 5).double(), torch.randn(12, 5).double()


def run(file: str, stages: int, microbatches: int) -> dict[str, Tensor]:
    """Does one minibatch by a file with PyTorch's own runtime, as one rank of a process group.

    Returns the gradients of this rank's stages, under the whole model's names; of the mean over the minibatch.
    """
    model, x, y = model_and_batch()
    per, rank, ranks = len(model) // stages, dist.get_rank(), dist.get_world_size()
    parts = {s: model[s * per : (s + 1) * per] for s in range(rank, stages, ranks)}
    mine = [PipelineStage(part, s, stages, torch.device("cpu")) for s, part in parts.items()]
    runtime = theirs._PipelineScheduleRuntime(mine, microbatches, loss_fn=nn.functional.mse_loss)
    runtime._load_csv(file)
    runtime.step(*([x] if rank == 0 else []), target=y if rank == (stages - 1) % ranks else None)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

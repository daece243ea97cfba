"""All ranks of a partitioned step in one process, and the same step without parts."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipedream.core.box import Box, slice_of, slice_within
from pipedream.extensions.meshes import layout
from pipedream.extensions.meshes.layouts.step import GroupRanks, PartitionedStep

Parts = dict[int, torch.Tensor]
Loss = Callable[[torch.Tensor], torch.Tensor]


class SimulatedRanks:
    """Ranks that note the bytes of all exchanges, and those of the busiest rank of each."""

    def __init__(self, count: int) -> None:
        self.local = range(count)
        self.sent_bytes = 0
        self.busiest: list[int] = []

    def exchange(
        self, pieces: Sequence[layout.Piece], parts: Parts, boxes: Sequence[Box | None]
    ) -> dict[int, list[tuple[Box, torch.Tensor]]]:
        arrived: dict[int, list[tuple[Box, torch.Tensor]]] = {rank: [] for rank in self.local}
        bytes_of = Counter[tuple[str, int]]()
        for piece in pieces:
            have = boxes[piece.sender]
            assert have is not None
            part = parts[piece.sender][slice_within(piece.box, have)]
            if piece.sender != piece.receiver:
                self.sent_bytes += part.nbytes
                bytes_of.update({("sent", piece.sender): part.nbytes, ("received", piece.receiver): part.nbytes})
            arrived[piece.receiver].append((piece.box, part))
        self.busiest += [max(bytes_of.values())] if bytes_of else []
        return arrived


def find_whole(run: PartitionedStep, ranks: GroupRanks | SimulatedRanks, tensor: str, parts: Parts) -> torch.Tensor:
    """Returns a tensor from the parts of all ranks, which all call it."""
    stored, shape = run.exchanges.stored[tensor], run.exchanges.operators.tensors[tensor]
    owners = {box: rank for rank, box in reversed(list(enumerate(stored)))}
    pieces = [
        layout.Piece(rank if stored[rank] == box else owner, rank, box)
        for rank in run.exchanges.ranks
        for box, owner in owners.items()
        if all(box)
    ]
    rank = ranks.local[0]
    whole = parts[rank].new_empty(shape)
    for box, part in ranks.exchange(pieces, parts, stored)[rank]:
        whole[slice_of(box)] = part
    return whole


def check_step(
    step: Any,
    model: nn.Module,
    sample: torch.Tensor,
    loss: Loss | None,
    result: Any,
    ranks: GroupRanks | SimulatedRanks,
) -> None:
    """Compares a traced step in parts, those of `result`, with one process: all tensors, and bytes sent."""
    values = {step.parameters[key]: parameter.detach() for key, parameter in model.named_parameters()}
    values |= {step.buffers[key]: buffer.clone() for key, buffer in model.named_buffers()} | {step.inputs[0]: sample}
    generator = torch.Generator().manual_seed(2)
    for tensor in step.tangents:
        values[tensor] = torch.randn(step.operators.tensors[tensor], generator=generator, dtype=torch.float64)
    names = [*step.outputs, *step.gradients.values(), *step.input_gradients, *step.updated.values()]
    torch.manual_seed(0)
    expected = _run_alone(step, copy.deepcopy(model), sample, loss, [values[tensor] for tensor in step.tangents])
    run = PartitionedStep(step, result, ranks)
    torch.manual_seed(0)
    parts = run.run({tensor: run.part(tensor, value) for tensor, value in values.items()}, names)
    sent = torch.tensor(ranks.sent_bytes)
    for tensor, value in zip(names, expected, strict=True):
        whole = find_whole(run, ranks, tensor, parts[tensor])
        torch.testing.assert_close(whole, value, atol=1e-10, rtol=1e-10, msg=tensor)
    if isinstance(ranks, GroupRanks):
        torch.distributed.all_reduce(sent)
    assert sent == run.sent_bytes


def _run_alone(
    step: Any, model: nn.Module, sample: torch.Tensor, loss: Loss | None, tangents: list[torch.Tensor]
) -> list[torch.Tensor]:
    entering = sample.clone().requires_grad_(sample.is_floating_point())
    value = model(entering) if loss is None else loss(model(entering))
    sources = [*model.parameters(), *([entering] if step.input_gradients else [])]
    gradients = torch.autograd.grad([value], sources, tangents or None)
    return [value.detach(), *gradients, *model.buffers()]

"""All ranks of a partitioned step in one process, and the same step without parts."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import Any

import torch
from torch import nn

from pipedream.core.box import Box
from pipedream.extensions.meshes import layout
from pipedream.extensions.meshes.layouts.step import GroupRank, PartitionedStep, cut_out

Loss = Callable[[torch.Tensor], torch.Tensor]


class SimulatedRanks:
    """Ranks that are threads, each of which runs alone until it exchanges something; notes the busiest's bytes."""

    def __init__(self, count: int) -> None:
        self.busiest: list[int] = []
        self.sent: list[dict[int, torch.Tensor]] = []  # in each exchange, by rank
        self.all_sent, self.turn = Barrier(count, timeout=60), Lock()

    def run(self, function: Callable[["_Rank"], Any]) -> list[Any]:
        def run_rank(rank: int) -> Any:
            with self.turn:
                return function(_Rank(self, rank))

        with ThreadPoolExecutor(self.all_sent.parties) as pool:
            return list(pool.map(run_rank, range(self.all_sent.parties)))


class _Rank:
    def __init__(self, ranks: SimulatedRanks, rank: int) -> None:
        self._ranks, self.rank, self._exchanges, self.sent_bytes = ranks, rank, 0, 0

    def exchange(
        self, pieces: Sequence[layout.Piece], part: torch.Tensor, boxes: Sequence[Box | None]
    ) -> list[tuple[Box, torch.Tensor]]:
        ranks, at, self._exchanges = self._ranks, self._exchanges, self._exchanges + 1
        ranks.sent += [{}] if at == len(ranks.sent) else []
        ranks.sent[at][self.rank] = part
        ranks.turn.release()
        try:
            ranks.all_sent.wait()
        finally:
            ranks.turn.acquire()
        arrived, bytes_of = [], Counter[tuple[str, int]]()
        for piece in pieces:
            cut = cut_out(ranks.sent[at][piece.sender], boxes[piece.sender], piece.box)
            arrived += [(piece.box, cut)] if piece.receiver == self.rank else []
            if piece.sender != piece.receiver:
                bytes_of.update({("sent", piece.sender): cut.nbytes, ("received", piece.receiver): cut.nbytes})
        self.sent_bytes += bytes_of["sent", self.rank]
        ranks.busiest += [max(bytes_of.values())] if self.rank == 0 and any(bytes_of.values()) else []
        return arrived


def check_step(
    step: Any, model: nn.Module, sample: torch.Tensor, loss: Loss | None, result: Any, ranks: GroupRank | SimulatedRanks
) -> None:
    """Compares a traced step in parts, those of `result`, with one process: all tensors, and bytes sent."""
    values = {step.parameters[key]: parameter.detach() for key, parameter in model.named_parameters()}
    values |= {step.buffers[key]: buffer.clone() for key, buffer in model.named_buffers()} | {step.inputs[0]: sample}
    generator = torch.Generator().manual_seed(2)
    for tensor in step.tangents:
        values[tensor] = torch.randn(step.operators.tensors[tensor], generator=generator, dtype=torch.float64)
    names = [*step.outputs, *step.gradients.values(), *step.input_gradients, *step.updated.values()]
    torch.manual_seed(0)
    alone, entering = copy.deepcopy(model), sample.clone().requires_grad_(sample.is_floating_point())
    value = alone(entering) if loss is None else loss(alone(entering))
    sources = [*alone.parameters(), *([entering] if step.input_gradients else [])]
    gradients = torch.autograd.grad([value], sources, [values[tensor] for tensor in step.tangents] or None)
    expected = [value.detach(), *gradients, *alone.buffers()]

    def run_rank(rank: Any) -> tuple[int, int]:
        torch.manual_seed(0)
        run = PartitionedStep(step, result, rank)
        parts = run.run({tensor: run.part(tensor, value) for tensor, value in values.items()}, names)
        for tensor, value in zip(names, expected, strict=True):
            torch.testing.assert_close(parts[tensor], run.part(tensor, value), atol=1e-10, rtol=1e-10, msg=tensor)
        return rank.sent_bytes, run.sent_bytes

    results = [run_rank(ranks)] if isinstance(ranks, GroupRank) else ranks.run(run_rank)
    sent = torch.tensor(sum(sent_bytes for sent_bytes, _ in results))
    if isinstance(ranks, GroupRank):
        torch.distributed.all_reduce(sent)
    assert sent == results[0][1]

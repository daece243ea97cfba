"""A session: one model at work in one placement, from the first minibatch to the last.

It owns the workers of this process (all of them, or one), runs them on the right clock, and sees to it
that a failure of one ends all.
"""

from __future__ import annotations

import itertools
import json
import resource
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.errors import PipelineError, PlanError, WorkerError
from ..core.graph import LayerGraph
from ..core.program import Program
from ..core.timeline import Span, Tag, Timeline
from . import parameters
from .clock import in_process, on_wire
from .crew import Settings, connect, local_crew, wire_worker
from .doing import Doing
from .feed import Ending, Feed, read
from .guard import Guard
from .interrupts import Interrupts
from .judge import STUCK_AFTER_S
from .results import Done, Output
from .talk import agree, gather_texts, join
from .worker import Worker

__all__ = ["Session"]

_LOST_WORDS = ("gloo", "Gloo", "NCCL", "Connection", "Socket")
"""What torch's errors of a broken connection have in common."""

_LOOP = "the training loop"

Take = Callable[[Any], tuple[Any, Any]]


class Session:
    """Workers around one model.

    Args:
        model: the user's module; on several processes each rank keeps only its own stages' parameters.
        graph: of its layers.
        layers: its layers, in the order of the graph.
        program, evaluation: verified.
        settings: the user's choices.
        device: of the workers of this process.
        stuck_after_s: seconds that an op or the loader may take; 0 sets no limit.

    Raises:
        PlanError: the number of processes is not the plan's, or the ranks disagree on the plan.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        layers: Sequence[nn.Module],
        program: Program,
        evaluation: Program,
        settings: Settings,
        device: torch.device,
        *,
        stuck_after_s: float = STUCK_AFTER_S,
    ) -> None:
        self.model = model
        self.program = program
        self.device = device
        self.rank, processes = join(device)
        self._settings = settings
        self._graph = graph
        stages = program.plan.stages
        self._names = [parameters.stage_names(graph, stage.first, stage.last) for stage in stages]
        named = list(zip([layer.name for layer in graph.layers], layers, strict=True))
        self._guard: Guard | None = None
        self._doing = Doing()
        self._stuck_after_s = stuck_after_s
        self._group: dist.ProcessGroup | None = None
        self._feeds: list[Feed] = []
        if processes == 1:
            parameters.materialise(named, device, settings.seed)
            handles = [parameters.trained(model, names) for names in self._names]
            self.workers = local_crew(program, evaluation, named, handles, settings, device)
            self._names_here = {name for names in self._names for name in names}
        else:
            self.workers = [self._join_others(processes, named, evaluation)]
        self.interrupts = Interrupts(patient=self.distributed)
        for worker in self.workers:
            worker.wishes_to_stop = lambda: self.interrupts.heard
        self._doing.where_op = lambda: self.lead.where
        if self.distributed:
            self.lead.doing = self._doing
        self._doing.place = _LOOP

    def _join_others(self, processes: int, named: Sequence[tuple[str, nn.Module]], evaluation: Program) -> Worker:
        program, model = self.program, self.model
        placement = program.placement
        if processes != placement.workers:
            raise PlanError(
                f"the plan {program.plan.config} needs {placement.workers} workers, but {processes} processes were "
                f"started; start {placement.workers} (--workers or --nproc-per-node), or plan for {processes}"
            )
        wires = connect(program, self.device)
        self._group = wires.everyone
        store = dist.distributed_c10d._get_default_store()
        self._guard = Guard(store, self.rank, processes, self._doing, stuck_after_s=self._stuck_after_s)
        agree("plan or schedule", program.to_json(), self._group)
        own_stages = [stage for stage, _ in placement.seats(self.rank)]
        own = {name for stage in own_stages for name in self._names[stage]}
        self._names_here = own
        for stage in own_stages:
            span = program.plan.stages[stage]
            parameters.materialise(named[span.first : span.last], self.device, self._settings.seed)
        parameters.share_initial(model, self._names, placement, self.rank, self._group)
        parameters.drop_foreign(model, own)
        handles = {stage: parameters.trained(model, self._names[stage]) for stage in own_stages}
        return wire_worker(self.rank, program, evaluation, named, handles, self._settings, self.device, wires)

    @property
    def distributed(self) -> bool:
        """The workers are several processes."""
        return self._group is not None

    @property
    def lead(self) -> Worker:
        """The worker that speaks for this process."""
        return self.workers[self.program.placement.ranks[0][0] if len(self.workers) > 1 else 0]

    @property
    def ending(self) -> Ending:
        """Why the last stream ended."""
        return self.lead.ending

    # -- data in, results out -----------------------------------------------------------------------

    def open_feed(
        self, loader: Iterable[Any], take: Take, *, first_epoch: int = 0, epochs: int = 1, skip: int = 0
    ) -> None:
        """Gets ready to read a loader for training, at the workers of the input stage."""
        self._feeds = self._feeds_for(loader, take, first_epoch=first_epoch, epochs=epochs, skip=skip)

    def train(self) -> Iterator[Done]:
        """Trains until the data ends or `stop` was called, and drains; yields as `Worker.train`."""
        feeds = dict(zip(self._input_ranks(), self._feeds, strict=False))
        streams = [worker.train(feeds.get(worker.rank)) for worker in self.workers]
        yield from self._run(streams)

    def stop(self) -> None:
        """Lets the running stream end with what has been admitted."""
        for feed in self._feeds:
            feed.stopped = feed.stopped or Ending.DRAIN

    def resume(self) -> None:
        """Lets the data go on after a drain."""
        for feed in self._feeds:
            feed.resume()

    def evaluate(self, loader: Iterable[Any], take: Take, ema: bool = False) -> Done:
        """Runs forwards over a loader; returns the means over all of it, equal on every rank."""
        feeds = dict(zip(self._input_ranks(), self._feeds_for(loader, take), strict=False))
        streams = [worker.evaluate(feeds.get(worker.rank), ema) for worker in self.workers]
        found = [event for event in self._run(streams) if isinstance(event, Done)]
        return found[-1]

    def predict(self, loader: Iterable[Any], take: Take, ema: bool = False) -> Iterator[Output]:
        """Runs forwards over a loader; yields the outputs, at rank 0 only."""
        feeds = dict(zip(self._input_ranks(), self._feeds_for(loader, take), strict=False))
        streams = [worker.predict(feeds.get(worker.rank), ema) for worker in self.workers]
        yield from self._run(streams)

    def _feeds_for(self, loader: Iterable[Any], take: Take, **span: int) -> list[Feed]:
        count = len(self._input_ranks())
        if not count:
            return []
        cycle = self.program.placement.cycle if self.program.updates.mean_of_rounds else 1
        return [Feed(batches, take, cycle) for batches in itertools.tee(read(loader, **span), count)]

    def _input_ranks(self) -> list[int]:
        here = {worker.rank for worker in self.workers}
        return [rank for rank in self.program.placement.ranks[0] if rank in here]

    def _run(self, streams: Sequence[Generator[Any, None, None]]) -> Iterator[Any]:
        events = on_wire(streams[0]) if len(streams) == 1 else in_process(streams, self.program.placement.ranks[0])
        self._doing.place = None
        try:
            for event in events:
                self._doing.place = _LOOP
                yield event
                self._doing.place = None
        except PipelineError as error:
            raise self._told(error) from error.__cause__
        except Exception as error:  # of the user's loader, say
            text = f"{type(error).__name__}: {error}"
            raise self._told(WorkerError(self.rank, self.lead.where, text)) from error
        finally:
            self._doing.place = _LOOP

    def _told(self, error: PipelineError) -> PipelineError:
        """Returns the error to raise here: this rank's own, told to all others, or the one that caused it."""
        self._doing.stop()
        if self._guard is None:
            return error
        lost = isinstance(error.__cause__, RuntimeError) and any(w in str(error) for w in _LOST_WORDS)
        first = self._guard.failure(3.0 if lost else 0.0)
        if first is not None:
            return first
        if lost:
            error = WorkerError(
                self.rank,
                self.lead.where,
                "lost the connection to another worker, which left no word (killed, out of memory, machine gone)",
                f"look at what that worker printed last; torch said: {error.__cause__}",
            )
        elif not isinstance(error, WorkerError):
            error = WorkerError(self.rank, self.lead.where, str(error))
        return self._guard.report(error) or error

    # -- weights ------------------------------------------------------------------------------------

    def state_dict(self, ema: bool = False) -> dict[str, torch.Tensor]:
        """Returns the whole model's state at rank 0 under the user's names; an empty one elsewhere."""
        with self._doing.at("collecting the weights"):
            return self._state_dict(ema)

    def _state_dict(self, ema: bool) -> dict[str, torch.Tensor]:
        state = parameters.named_state(self.model)
        own = {name: tensor for name, tensor in state.items() if name in self._names_here}
        if ema:
            averages = {n: t for w in self.workers for seat in w.seats.values() for n, t in seat.optimizer.ema.items()}
            same = {id(tensor): averages[name] for name, tensor in own.items() if name in averages}
            own = {name: same.get(id(tensor), tensor) for name, tensor in own.items()}
        placement = self.program.placement
        whole = parameters.assemble(own, state, self._names, placement, self.rank, self._group)
        return {name: whole[name] for name in self.model.state_dict() if name in whole}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes over weights; each rank reads its own part of the whole state."""
        parameters.load(self.model, state, self._names_here)
        for worker in self.workers:
            for seat in worker.seats.values():
                seat.versions.reload()
                for name, average in seat.optimizer.ema.items():
                    average.copy_(seat.versions.handles[name].detach())

    # -- what happened ------------------------------------------------------------------------------

    def timeline(self, batch: int) -> Timeline:
        """Returns what ran when on all ranks, from the start of the first span; the same on every rank."""
        rows: list[Any] = []
        for worker in self.workers:
            rows.append(
                {
                    "rank": worker.rank,
                    "spans": [list(span) for span in worker.recorder.spans()],
                    "tags": [list(tag) for tag in worker.recorder.tags],
                    "peak_bytes": self.peak_bytes(),
                    "versions": max(seat.versions.peak for seat in worker.seats.values()),
                }
            )
        parts = [part for text in gather_texts(json.dumps(rows), self._group) for part in json.loads(text)]
        parts.sort(key=lambda part: part["rank"])
        start = min((span[4] for part in parts for span in part["spans"]), default=0.0)
        spans = tuple(
            Span(rank, kind, stage, index, begin - start, end - start)
            for part in parts
            for rank, kind, stage, index, begin, end in part["spans"]
        )
        return Timeline(
            name=self.program.schedule,
            source="measured",
            workers=self.program.placement.workers,
            spans=spans,
            microbatches=self.lead.done_minibatches * self.program.microbatches,
            minibatch_microbatches=self.program.microbatches,
            batch=batch,
            tags=tuple(Tag(*tag) for part in parts for tag in part["tags"]),
            peak_bytes=tuple(part["peak_bytes"] for part in parts),
            peak_versions=tuple(part["versions"] for part in parts),
        )

    def gathered(self, value: Any) -> list[Any]:
        """Returns a JSON value of each process, the same on every rank."""
        return [json.loads(text) for text in gather_texts(json.dumps(value), self._group)]

    def peak_bytes(self) -> int:
        """Returns the peak memory of this process: of the GPU, or resident."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def sent_bytes(self) -> dict[int, int]:
        """Returns rank -> bytes of payload that its stages have sent."""
        return {worker.rank: sum(sender.sent_bytes for sender in worker.senders.values()) for worker in self.workers}

    def rate(self) -> float:
        """Returns the learning rate now, before the stages' factors."""
        return self.lead.rate

    def status(self) -> dict[int, dict[str, float]]:
        """Returns rank -> busy share since the last call and peak bytes; of other processes, their last word."""
        mine = {
            w.rank: {"busy_share": w.recorder.busy_share(), "peak_bytes": float(self.peak_bytes())}
            for w in self.workers
        }
        if self._group is None:
            return mine
        store = dist.distributed_c10d._get_default_store()
        if self.rank != 0:
            store.set(f"pipedream/status/{self.rank}", json.dumps(mine[self.rank]))
            return mine
        for rank in range(1, self.program.placement.workers):
            if store.check([f"pipedream/status/{rank}"]):
                mine[rank] = json.loads(store.get(f"pipedream/status/{rank}"))
        return mine

    def abort(self, error: BaseException) -> None:
        """Tells the other ranks that this one ends with an error of the user's own code."""
        if self._guard is not None and not isinstance(error, PipelineError):
            cause = f"{type(error).__name__}: {error}"
            self._guard.report(WorkerError(self.rank, _LOOP, cause))

    def close(self, failed: bool) -> None:
        """Ends the channels, in order; after a failure there is nothing left to end."""
        self._doing.place = "closing the pipeline"
        self.interrupts.stop()
        if not failed:
            for worker in self.workers:
                for sender in (*worker.senders.values(), *worker.results.senders.values()):
                    sender.close_begin()
            for worker in self.workers:
                for receiver in (*worker.receivers.values(), *worker.results.receivers.values()):
                    receiver.close()
            for worker in self.workers:
                for sender in (*worker.senders.values(), *worker.results.senders.values()):
                    sender.close()
            if self._group is not None:
                dist.barrier(group=self._group)
        if self._guard is not None:
            self._guard.end()

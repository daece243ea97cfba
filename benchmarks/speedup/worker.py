"""One of two workers: runs what it reads from its standard input, one JSON object a line; rank 0 answers.

{"do": "profile", "microbatches": ...}             both workers profile a minibatch of so many at the same time
{"do": "messages", "bytes_per_s": ...}             what a byte of a message takes from compute on a link of this rate
{"do": "solo"}                                     each trains the whole model alone, with an update per microbatch
{"do": "pipeline", "plan": ...}                    this library runs a plan
{"do": "ddp", "microbatches": ..., "sums": ...}    torch's DDP; so many microbatches a worker between two updates
{"do": "fsdp", "microbatches": ...}                torch's FSDP, each layer sharded; so many at once a worker
{"do": "torch", "schedule": ..., "plan": ...}      torch's schedule of that name, on the stages of the plan

The pipeline and FSDP may be asked for a model on the meta device ("meta"), which is never in one memory. Each but the
first two also has `steps`, updates (of PipeDream: minibatches) to time, and is answered with the samples per
second of both workers together, the bytes that both sent for a sample, and by how many bytes the fuller one grew.
What torch offers is run as `pipedream compare` runs it.
Started by curve.py and limited.py, which set torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from messages import measure_message_s_per_byte
from models import LARGE, MODELS, SIZED, Job, shard_fully
from sleeping import Seconds, load_seconds, make_sleeping, set_seconds
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils.data import DataLoader

import pipedream as pd
from pipedream.apps.compare.torch_baselines import DataParallel, PlainLoop, Task
from pipedream.slow_links import LINK

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import gather, read_memory, restart_peak
from worker_processes import Disturbance, answer_lines

_QUIET = 0.03
"""Share of the cores' time that other processes may take during a run."""


class _Stage(nn.Sequential):
    """Layers that torch calls with the parts of a tuple."""

    def forward(self, *values: Any) -> Any:
        return super().forward(values if len(values) > 1 else values[0])


class _Worker:
    """Runs what is asked.

    Args:
        microbatches: m, for the methods that split a minibatch.
        seconds: for which the model sleeps instead of computing.
    """

    def __init__(self, job: Job, microbatches: int, seconds: Seconds | None = None) -> None:
        self.rank = dist.get_rank()
        self.job, self.microbatches, self.seconds = job, microbatches, seconds
        if seconds is not None:
            self.job = make_sleeping(job, seconds)
        self.group = dist.new_group(backend="gloo")

    def profile(self, microbatches: int) -> dict[str, Any]:
        """Measures a minibatch of so many microbatches through every layer, on both workers at the same time."""
        inputs, targets = self.job.batch(self.job.samples * microbatches)
        dist.barrier(self.group)
        profile_found = pd.profile(
            self.job.make(),
            inputs,
            loss=lambda output: self.job.loss(output, targets),
            optimizer=self.job.optimizer,
            microbatches=microbatches,
            runs=9 if microbatches == 1 else 5,
        )
        if self.seconds is not None:
            profile_found = set_seconds(profile_found, self.seconds, microbatches)
        return {"profile": profile_found.to_json()}

    def messages(self, bytes_per_s: float) -> dict[str, float]:
        """Measures what a byte of a message takes from compute, at each of its ends."""
        task, batch = self._make_task(self.job.make())
        return {"message_s_per_byte": measure_message_s_per_byte(PlainLoop(task), batch, bytes_per_s)}

    def solo(self, steps: int) -> dict[str, float]:
        """Trains the whole model here, while the other worker does the same; no messages."""
        task, batch = self._make_task(self.job.make())
        loop = PlainLoop(task)
        return self._time_steps(lambda: loop.step([batch]), steps, 1)

    def ddp(self, steps: int, microbatches: int, sums: str = "full") -> dict[str, float]:
        """Runs torch's data parallelism with its own settings, its fp16 hook, or its local SGD."""
        task, batch = self._make_task(self.job.make())
        loop = DataParallel(task, microbatches, sums)
        return self._time_steps(lambda: loop.step([batch] * microbatches), steps, 2 * microbatches)

    def fsdp(self, steps: int, microbatches: int = 1, meta: bool = False, halved: bool = False) -> dict[str, float]:
        """Runs torch's fully sharded data parallelism: weights are gathered in each pass, gradients scattered.

        Args:
            microbatches: whose samples a worker takes in one pass.
            halved: in bfloat16, gathering weights once.
        """
        model = self._make_model(meta)
        shard_fully(model, halved=halved)
        task, batch = self._make_task(model, microbatches)
        loop = PlainLoop(task)
        return self._time_steps(lambda: loop.step([batch]), steps, 2 * microbatches)

    def torch(self, steps: int, schedule: str, plan: str) -> dict[str, float]:
        """Runs torch's schedule on the stages of a plan."""
        plan_here = pd.Plan.from_json(plan, "the plan")
        layers = list(self.job.make())
        mine = [number for number, ranks in enumerate(plan_here.placement.ranks) if self.rank in ranks]
        modules = [_Stage(*layers[plan_here.stages[stage].first : plan_here.stages[stage].last]) for stage in mine]
        stages = [
            PipelineStage(module, stage, len(plan_here.stages), torch.device("cpu"), group=self.group)
            for stage, module in zip(mine, modules, strict=True)
        ]
        name = "ZBVZeroBubble" if schedule == "zbv" else schedule.replace("_", "")
        runs = schedules.get_schedule_class(name)
        pipeline_stages: Any = stages if issubclass(runs, schedules.PipelineScheduleMulti) else stages[0]
        runner = runs(pipeline_stages, self.microbatches, loss_fn=self.job.loss)
        update = self.job.optimizer([weight for module in modules for weight in module.parameters()])
        inputs, targets = self.job.batch(self.job.samples * self.microbatches)
        arguments = (inputs,) if 0 in mine else ()
        last = {"target": targets} if len(plan_here.stages) - 1 in mine else {}

        def step() -> None:
            update.zero_grad()
            runner.step(*arguments, **last)
            update.step()

        return self._time_steps(step, steps, self.microbatches)

    def pipeline(self, steps: int, plan: str, meta: bool = False) -> dict[str, float]:
        """Runs a plan with this library, and times its steady part."""
        plan_here = pd.Plan.from_json(plan, "the plan")
        job = self.job
        with pd.Pipeline(
            self._make_model(meta),
            plan_here,
            loss=job.loss,
            targets=lambda batch: batch[1],
            optimizer=job.optimizer,
            check=False,
        ) as pipeline:
            rules = pipeline.program
            parts, ahead = rules.microbatches, plan_here.in_flight[0]
            warm = 1 if rules.flushes else 2 if parts > 1 else ahead + 2
            # Minibatches after the timed ones, so that the drain is not among what is timed.
            further = 0 if rules.flushes else -(-ahead // parts) + 1
            ends: list[tuple[float, int]] = []
            replicas = plan_here.replicas[0]
            count = (warm + steps + further) * replicas
            # Replicas read a map-style DataLoader themselves unless minibatches are split; a list is read by one.
            loader = DataLoader([job.batch(plan_here.batch)] * count, batch_size=None)
            for done in pipeline.train(loader):
                if done.number % replicas == 0:
                    ends.append((time.perf_counter(), _count_sent_bytes()))
        begin, end = ends[warm - 1], ends[warm + steps - 1]
        return self._sum_over_ranks(steps * replicas * plan_here.batch, end[0] - begin[0], end[1] - begin[1])

    def _make_model(self, meta: bool) -> nn.Sequential:
        with torch.device("meta" if meta else "cpu"):
            return self.job.make()

    def _make_task(self, model: nn.Module, microbatches: int = 1) -> tuple[Task, Any]:
        """Returns a model's training, and a batch with the samples of so many microbatches."""
        job, batch = self.job, self.job.batch(self.job.samples * microbatches)
        recipe = pd.Recipe(model, job.loss, job.optimizer, [batch], targets=itemgetter(1))
        return Task(recipe, self.rank, dist.get_world_size(), torch.device("cpu")), batch

    def _time_steps(self, step: Callable[[], object], steps: int, microbatches: int) -> dict[str, float]:
        """Times a step that takes in so many microbatches over all workers."""
        step()
        dist.barrier(self.group)
        start, sent = time.perf_counter(), _count_sent_bytes()
        for _ in range(steps):
            step()
        samples = steps * microbatches * self.job.samples
        return self._sum_over_ranks(samples, time.perf_counter() - start, _count_sent_bytes() - sent)

    def _sum_over_ranks(self, samples: int, seconds: float, sent_bytes: int) -> dict[str, float]:
        """Returns the figures of both workers: the slower one's rate, the sum of what they sent."""
        seconds_by_rank, sent_by_rank = zip(*gather((seconds, sent_bytes), self.group), strict=True)
        return {"samples_per_s": samples / max(seconds_by_rank), "bytes_per_sample": sum(sent_by_rank) / samples}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Runs what is asked; torch's schedules refuse some models, on both workers alike."""
        try:
            return self._run_least_disturbed(request.pop("do"), request.pop("patience_s"), request)
        except (RuntimeError, NotImplementedError, ValueError, MemoryError, pd.PipelineError) as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            store = dist.distributed_c10d._get_default_store()
            if self.rank and "memory" in why.lower():
                store.set("why", why)
                os._exit(1)  # rank 0 may wait for this one in a collective
            return {"why": store.get("why").decode() if store.check(["why"]) else why}

    def _run_least_disturbed(self, do: str, patience_s: float, request: dict[str, Any]) -> dict[str, Any]:
        """Runs what is asked until other processes have left the cores alone meanwhile, or the patience is over.

        The answer of the least disturbed run has the share of the cores' time that others took.
        """
        best: dict[str, Any] = {}
        start = time.monotonic()
        while True:
            dist.barrier(self.group)
            before_bytes = restart_peak()
            disturbance = Disturbance(self._read_cpu_s)
            answer = getattr(self, do)(**request)
            answer["rise_bytes"] = max(gather(read_memory("VmHWM") - before_bytes, self.group))
            gc.collect()
            answer["others"] = disturbance.share()
            if not best or answer["others"] < best["others"]:
                best = answer
            # Rank 0 decides for both.
            enough = torch.tensor([best["others"] <= _QUIET or time.monotonic() - start > patience_s])
            dist.broadcast(enough, 0, group=self.group)
            if bool(enough):
                return best

    def _read_cpu_s(self) -> float:
        """Returns the seconds of a core that both workers have used."""
        return float(sum(gather(sum(os.times()[:2]), self.group)))


def _count_sent_bytes() -> int:
    """Returns what this host has sent, with the headers of packets."""
    rows = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[9]) for row in rows if row.strip().startswith(f"{LINK}:"))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    name, parts, *sleeps = sys.argv[1:]
    seconds = load_seconds(name) if sleeps else None
    answer_lines(_Worker((MODELS | SIZED | {"large": LARGE})[name], int(parts), seconds).answer)

"""One worker: reads cases from its standard input, one JSON object a line, and runs them; rank 0 answers.

{"do": "profile", "model": ...}             every worker profiles the model at the same time; rank 0 tells its own
{"do": "run", "plan": ..., "model": ...}    runs a plan: by the model's layers, or emulated where model is null, with
                                            `byte_scale` times its bytes; with a profile, by layers that take
                                            `dilation` times its seconds

A run is put together on a link without a limit; rank 0 says "ready", and all begin at the next line.
Started by run.py, which sets torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from models import MODELS, optimizer
from paced import paced

from pipedream import Pipeline, Plan, Profile
from pipedream.apps.emulate.emulate import build_emulated_pipeline, make_emulated_batches, scale_plan
from pipedream.capture import capture, preserve_state
from pipedream.profiler import measure
from pipedream.workflows.methods import resolve_method

sys.path.append(str(Path(__file__).parents[1]))
from worker_processes import answer_lines, say


def _profile(name: str) -> str:
    """Profiles a model: each worker for itself, all at the same time, as they will compute."""
    job = MODELS[name]
    inputs, targets = job.batch
    model = job.make()
    captured = capture(model, (inputs,))
    return measure(
        captured.layers,
        captured.graph,
        (inputs,),
        model_name=name,
        preserve_state=preserve_state,
        loss=lambda output: job.loss(output, targets),
        optimizer=partial(optimizer, factor=1),
        device="cpu",
        warmup=1,
        runs=5,
        autocast=None,
        seed=0,
    ).to_json()


def _run(request: dict[str, Any]) -> list[float]:
    """Runs warm-up, segments and drain of a plan; returns the seconds of a minibatch in each segment."""
    plan = Plan.from_json(request["plan"])
    warm, segment, segments = request["warm"], request["segment"], request["segments"]
    # Minibatches after the timed ones, so that the drain is not among what is timed.
    count = warm + segment * segments + ceil(plan.in_flight[0] * plan.replicas[0] / plan.microbatches)
    if request["model"] is None:
        name, parts = resolve_method(plan, None)
        byte_scale = request.get("byte_scale", 1.0)
        scaled = scale_plan(plan, request["dilation"], byte_scale)
        trained = build_emulated_pipeline(scaled, schedule=name, microbatches=parts, byte_scale=byte_scale)
        batches: Any = list(make_emulated_batches(trained, count))
    else:
        job = MODELS[request["model"]]
        model = job.make()
        if request["profile"] is not None:
            model = paced(model, Profile.from_json(request["profile"]), request["dilation"])
        trained = Pipeline(
            model, plan, loss=job.loss, optimizer=partial(optimizer, factor=request["dilation"]), check=False
        )
        batches = [job.batch] * count
    ends: list[float] = []
    with trained as pipeline:
        if pipeline.rank == 0:
            say("ready")
        sys.stdin.readline()
        for _ in pipeline.train(batches):
            ends.append(time.perf_counter())
    marks = [ends[warm - 1 + segment * number] for number in range(segments + 1)]
    return [(end - start) / segment for start, end in pairwise(marks)]


if __name__ == "__main__":
    answer_lines(lambda request: _profile(request["model"]) if request["do"] == "profile" else _run(request))

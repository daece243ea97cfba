"""Where the CPU time of a microbatch goes in one process: two stages that wait 1 + 2 ms, 1F1B, m = 8, sampled.

Prints one JSON object: part -> microseconds of a microbatch, of both stages together.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter, deque
from itertools import islice
from types import FrameType
from typing import Any

import torch
from stages import Shape, Waits
from variants import Bench, open_pipeline

PARTS = {
    "Recorder.note": "spans, and reading the heap",
    "Activity.begin": "activity, for the guard",
    "Activity.end": "activity, for the guard",
    "_engine_run_backward": "backward: autograd and the layers",
    "StageModule.forward": "forward: generators and the layers",
    "Scorer.score": "forward: the loss",
    "Worker._admit": "forward: data",
    "ForwardRunner.run": "forward: the rest",
    "BackwardRunner.run": "backward: the rest",
    "Worker._send": "send",
    "Worker._receive": "receive",
    "Worker._finish_receive": "receive",
    "Worker._update": "update",
}
"""Function -> part of the table; the innermost counts."""
_SAMPLE_S, _WARMUP = 0.001, 40


def main(request: dict[str, Any]) -> None:
    """Runs what was asked: key `minibatches`, how many are sampled."""
    torch.set_num_threads(1)
    samples: Counter[str] = Counter()

    def sample(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_qualname not in PARTS:
            frame = frame.f_back
        samples["the loop" if frame is None else PARTS[frame.f_code.co_qualname]] += 1

    shape = Shape(2, forward_s=0.001, backward_s=0.002)
    with open_pipeline(Bench(shape, Waits()), "1f1b") as (pipeline, batch):
        stream = pipeline.train([batch] * (_WARMUP + request["minibatches"] + 2))
        deque(islice(stream, _WARMUP), maxlen=0)
        signal.signal(signal.SIGPROF, sample)
        signal.setitimer(signal.ITIMER_PROF, _SAMPLE_S, _SAMPLE_S)
        start_s = time.thread_time()
        deque(islice(stream, request["minibatches"]), maxlen=0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        cpu_s = time.thread_time() - start_s
        stream.close()
    each_us = cpu_s / (request["minibatches"] * shape.microbatches) / samples.total() * 1e6
    print(json.dumps({part: number * each_us for part, number in samples.items()}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

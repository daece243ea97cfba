"""A recipe, and a script for torchrun, whose first minibatch says when each step before it had ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

STEPS = "processes and imports", "runtime costs", "profile", "plan", "proof", "connections", "first minibatch"
MARK = "startup: "

if __name__ == "__main__" or "RANK" in os.environ:
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.data import DataLoader, TensorDataset

    import pipedream as pd
    from pipedream import Pipeline, pipeline, run
    from pipedream.apps.training import job, train

    ends_s = {STEPS[0]: time.time()}

    def note_end(module: Any, name: str, step: str) -> None:
        """Notes when the first call of a function ends."""
        function: Callable[..., Any] = getattr(module, name)

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            ends_s.setdefault(step, time.time())
            return result

        setattr(module, name, call)

    class Report(pd.callbacks.Callback):
        """Prints at the first minibatch of rank 0."""

        def on_minibatch(self, pipeline: Pipeline, done: pd.Done) -> None:
            if not pipeline.rank and not done.number:
                print(f"{MARK}{json.dumps(ends_s | {STEPS[-1]: time.time()})}", flush=True)

    def recipe(seed: int = 0) -> pd.Recipe:
        """Five small layers."""
        torch.manual_seed(seed)
        inputs = torch.randn(640, 64)
        return pd.Recipe(
            model=nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 10)),
            loss=functional.cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.01),
            train=DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=32),
            callbacks=[Report()],
        )

    functions = (job, "_measure_runtime_costs"), (job, "profile_model"), (job, "make_plan"), (pipeline, "prepare")
    for (module, name), step in zip((*functions, (train, "Pipeline")), STEPS[1:-1], strict=True):
        note_end(module, name, step)
    if __name__ == "__main__":
        run(recipe)

"""The collectives of a stage run without data are those of training: kinds, numbers and bytes."""

from typing import Any

import processes
import pytest
import torch
from torch import nn

from tests.extensions.meshes.sharding import test_mesh_experts as experts
from tests.extensions.meshes.sharding.meshes import (
    HALVES,
    Case,
    Convolution,
    Mlp,
    draw_rows,
    make_pipeline,
    of_pictures,
)


class Reads(Mlp):
    """Needs a number of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if bool(x.sum() < 1e9) else x


CLIPPED = {"clip_grad_norm": 0.1}
BOTH = "batch:data, heads:model, d_ff:model"
CASES = {
    "model": Case("mlp", "model:2", "d_ff:model", "pipedream", None),
    "halves of backwards": Case("mlp", "model:2", "d_ff:model", "zb_h1", 2, options=CLIPPED),
    "data": Case("mlp", "data:2", "batch:data"),
    "whole weights": Case("mlp", "model:2", "d_ff:model", options={"optimizer": torch.optim.Adafactor}),
    "sharded": Case(
        "mlp", "data:2", "batch:data", "pipedream", None, shard_weights="data", options=CLIPPED | {"clip": "local"}
    ),
    "recomputed": Case("mlp", "data:2", "batch:data", shard_weights="data", recompute=True),
    "bfloat16": Case("mlp", "data:2", "batch:data", options={"autocast": torch.bfloat16}, shard_weights="data"),
    "two dimensions": Case("attention", "data:2,model:2", BOTH, "gpipe", stages=()),
    "convolution": Case("convolution", "data:2", "batch:data"),
    "found": Case("mlp", "cut1:2", "", "pipedream", None),
    "found, by two cuts": Case(lambda: of_pictures(Convolution()), "cut1:2,cut2:2", "", stages=()),
    "experts": experts.CASES["gshard"],
    "meshes": Case("attention", "data:2/model:2", BOTH, "gpipe"),
    "boundary": Case("halves", "model:2/-/-", "d_ff:model", stages=(1, 2), names=HALVES),
    "reads": Case(
        lambda: (nn.Sequential(Reads(), Mlp(), nn.Linear(16, 4)), draw_rows), "model:2", "d_ff:model", stages=(1,)
    ),
}


def _count_bytes() -> dict[str, tuple[Any, ...]]:
    counts = {}
    for name, case in CASES.items():
        pipeline, batches = make_pipeline(case, case.mesh)
        with pipeline:
            list(pipeline.train(batches[:2], epochs=1))
            counts[name] = pipeline.collectives()
            if name in WORDS:
                list(pipeline.train(batches[:2], epochs=2))  # training continues
    return counts


WORDS = {
    "model": ("2 all-reduce over model, 2.05 kB", "2 all-reduce over model, 2.05 kB", ""),
    "data": ("", "", "12 all-reduce over data, 34.6 kB"),
    "sharded": (
        "2 all-gather over data, 34.6 kB",
        "2 all-gather over data, 34.6 kB; 2 all-reduce over data, 34.6 kB",
        "1 all-reduce over data, 8.00 B",
    ),
    "experts": (
        "2 all-reduce over data, 16.0 B; 2 all-to-all over data, 4.10 kB",
        "2 all-to-all over data, 4.10 kB",
        "4 all-reduce over data, 2.30 kB",
    ),
}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_collectives_are_as_predicted() -> None:
    """All ranks know them; a stage that cannot run without data has no prediction, one of a single rank has none."""
    first, *others = processes.results(_count_bytes, 4, timeout_s=180.0)
    assert all(other == first for other in others)
    (reads, _), (_, *single) = first.pop("reads"), first["boundary"]
    assert (reads.predicted, reads.problem) == (None, "DataDependentOutputException: aten._local_scalar_dense.default")
    assert single == [None, None]
    for name, stages in first.items():
        for stage in filter(None, stages):
            assert stage.predicted == stage.measured, name
    for name, words in WORDS.items():
        measured = first[name][0].measured
        assert tuple("; ".join(map(str, measured[part])) for part in ("forward", "backward", "update")) == words

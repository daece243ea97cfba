"""Deltas: a pipeline trains as one process does that keeps, at each cut, what arrived of each sample (AQ-SGD)."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded import rounded
from torch import Tensor, nn

import pipedream as pd
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.extensions.deltas.sample_deltas import CutEnd
from pipedream.runtime.comm.message import Message
from pipedream.testing import Training

ON_GPUS = RuntimeCosts(overlap_device=True)
CONTENTS = torch.randn(9, 16, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
# The second minibatch comes twice; later ones mix samples that are new, that were seen, and that come twice at once.
DATA = [
    CONTENTS[0],
    CONTENTS[1],
    CONTENTS[1],
    torch.cat([CONTENTS[0, :10], CONTENTS[2, :6]]),
    CONTENTS[[0, 0], :8].flatten(0, 1),
]
BATCHES = [(rows, rows[:, :4].argmax(1)) for rows in DATA]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)]
    return nn.Sequential(*layers).double()


def make_training(deltas: str = "int3:38", **how: Any) -> Training:
    how = {"schedule": "1f1b", "microbatches": 2, "plan": (1, 1, 1), "epochs": 2, "options": {"deltas": deltas}} | how
    how = {"model": make_model, "data": BATCHES, "optimizer": partial(torch.optim.SGD, lr=0.3, momentum=0.5)} | how
    return Training(loss=nn.CrossEntropyLoss(), messages="float16,int8", **how)


class Visits:
    """What arrives at cuts between workers, by algorithm 1 of the paper; called in the order of the microbatches."""

    def __init__(self, bits: int, microbatches: int, cuts: int = 2) -> None:
        self._bits, self._cuts, self._count, self._kept = bits, cuts, 0, dict[tuple[int, bytes], Tensor]()
        self._parts = [part for rows in DATA for part in rows.chunk(microbatches)]

    def __call__(self, values: Tensor, encoding: str) -> Tensor:
        if encoding != "float16":  # a gradient, or it stays on its worker
            return rounded(values, encoding)
        cut, part = self._count % self._cuts, self._parts[self._count // self._cuts % len(self._parts)]
        self._count += 1
        keys = [(cut, row.numpy().tobytes()) for row in part]
        new = [i for i, key in enumerate(keys) if key not in self._kept]
        old_rows = [i for i in range(len(keys)) if i not in new]
        arrived = torch.empty_like(values)
        arrived[new] = values[new].half().double()
        if old_rows:
            old = torch.stack([self._kept[keys[i]] for i in old_rows])
            arrived[old_rows] = old + rounded(values[old_rows] - old, f"int{self._bits}")
        self._kept |= zip(keys, arrived, strict=True)
        return arrived


@pytest.mark.parametrize(
    ("schedule", "microbatches", "stages", "cuts"),
    [("1f1b", 2, 3, 2), ("pipedream", 1, 3, 2), ("interleaved_1f1b", 4, 4, 3), ("zbv", 4, 4, 2)],
)
@pytest.mark.parametrize("bits", [2, 3])
def test_trains_as_the_paper_says(schedule: str, microbatches: int, stages: int, cuts: int, bits: int) -> None:
    how = {"schedule": schedule, "microbatches": microbatches, "plan": (1,) * stages}
    make_training(f"int{bits}:38", **how).check(rounding=Visits(bits, microbatches, cuts))


def test_resumed_it_knows_the_samples(tmp_path: Path) -> None:
    make_training().resumed(tmp_path, [4, 7])


def test_another_plan_begins_to_keep_samples_anew(tmp_path: Path) -> None:
    make_training().pipeline(folder=tmp_path, save_at=[5])
    assert len(make_training(plan=(1, 1)).pipeline(resume=tmp_path).losses) == 5


@pytest.mark.processes
@pytest.mark.slow
def test_processes_keep_the_same_samples() -> None:
    training = make_training(plan=(1, 1))
    trained, alone = training.pipeline(processes=2), training.pipeline()
    assert trained.losses == alone.losses
    assert trained.sent_bytes[0] < 0.5 * make_training(plan=(1, 1), options={}).pipeline().sent_bytes[0]


def narrow() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def frozen() -> nn.Module:
    model = make_model()
    return nn.Sequential(*(layer.requires_grad_(i > 2) for i, layer in enumerate(model)))


@pytest.mark.parametrize("make", [narrow, frozen])
def test_what_is_small_or_has_no_gradient_travels_as_it_is(make: Callable[[], nn.Module]) -> None:
    how = {"plan": (1, 1), "model": make}
    assert make_training(**how).pipeline().losses == make_training(**how, options={}).pipeline().losses


def test_a_first_minibatch_in_which_samples_repeat_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    rows = CONTENTS[[0, 0], :8].flatten(0, 1)
    make_training(data=[(rows, rows[:, :4].argmax(1))], options={"deltas": "int3:8", "check": True}).pipeline()
    assert "a sample occurs in two of its microbatches" in caplog.text


def test_a_sample_that_overflowed_is_new_again() -> None:
    sender, receiver, late = (CutEnd("deltas", 2, "full", "int3") for _ in range(3))
    for value in (torch.nan, 1.0, 2.0):
        message = Message(0, tensors=(torch.full((2, 200), value),), wants=(True,))
        code = sender.encode(message, [3, 4])
        (arrived,) = receiver.decode(code)[0].tensors
        torch.testing.assert_close(arrived, message.tensors[0], equal_nan=True)
    with pytest.raises(RuntimeError, match="the sender keeps 2 of these samples, the receiver 0"):
        late.decode(code)


def test_the_planner_counts_what_both_ends_keep() -> None:
    """The cut in the middle balances best, but a sample has 100 kB there, and 1 kB elsewhere."""
    layers = tuple(pd.LayerProfile(0.1, 0.2, size, 1000) for size in (10_000, 1_000_000, 10_000, 10_000))
    profile = pd.Profile.of_chain(layers, batch=10)
    how = {"schedule": "1f1b", "shape": "pipeline", "all_workers": True, "microbatches": 1}
    cuts, peaks = [], []
    for memory_bytes, deltas in ((None, "none"), (None, "int3:1000"), (50_000_000, "none"), (50_000_000, "int3:1000")):
        cluster = pd.Cluster.flat(2, 1e9, memory_bytes=memory_bytes)
        stages = pd.plan(profile, cluster, deltas=deltas, **how).stages
        cuts.append(stages[0].last)
        peaks.append([stage.peak_bytes for stage in stages])
    assert cuts == [2, 2, 2, 1]
    assert [kept - none for none, kept in zip(*peaks[:2], strict=True)] == [100_000_000] * 2
    with pytest.raises(pd.PipelineError, match=r"deltas.none.* saves 1\.00 MB"):
        pd.plan(profile, pd.Cluster.flat(2, 1e9, memory_bytes=1_000_000), deltas="int3:1000", **how)
    assert "deltas:" not in str(pd.plan(profile, pd.Cluster.flat(1, 1e9), deltas="int3:1000"))


def test_beside_gpus_each_machine_has_room_for_its_own() -> None:
    """A stage in the middle keeps 100 MB for each of its cuts, and 80 MB of weights and gradients beside them."""
    layers = tuple(pd.LayerProfile(0.1, 0.2, 1_000_000, 40_000_000) for _ in range(4))
    profile = replace(pd.Profile.of_chain(layers, batch=10), device="A100-80GB", runtime=ON_GPUS)
    for free_bytes, place in ((250_000_000, "device"), (150_000_000, "device"), (250_000_000, "host")):
        how = {"shape": "pipeline", "schedule": "1f1b", "all_workers": True, "optimizer_state": place}
        levels = pd.Level(1, 1e10), pd.Level(4, 1e9)
        cluster = pd.Cluster(levels, 80 * 10**9, "A100-80GB", host_bytes=free_bytes, host_bytes_per_s=1e10)
        is_short = free_bytes - 80_000_000 * (place == "host") < 200_000_000
        with pytest.raises(pd.PipelineError, match="keeps 200 MB") if is_short else nullcontext():
            pd.plan(profile, cluster, deltas="int3:1000", **how)


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.1), *make_model())


def changed_plan(**of_stages: Any) -> pd.Plan:
    plan = make_training().resolved_plan
    stages = tuple(replace(stage, **of_stages) for stage in plan.stages)
    return replace(plan, stages=stages, cluster=replace(plan.cluster, memory_bytes=10**10))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({"options": {"deltas": "int3"}}, "give ENCODING:SAMPLES, such as int3:5000"),
    "no such encoding": ({"options": {"deltas": "int9:5"}}, "one of bfloat16, .*int2, and how many samples"),
    "no sample": ({"options": {"deltas": "int3:0"}}, "deltas='int3:0' was asked for; give ENCODING:SAMPLES"),
    "more samples": ({"options": {"deltas": "int3:37"}}, "deltas=int3:37 was asked for, but more samples have come"),
    "replicas": ({"plan": (2, 1)}, "a stage has 2 replicas"),
    "recomputation": ({"plan": changed_plan(recompute=True)}, "'1f1b', but a stage repeats its forward"),
    "backwards elsewhere": ({"schedule": "roundpipe"}, "'roundpipe', but a stage repeats its forward"),
    "a mesh": ({"plan": changed_plan(mesh="model:2")}, "meshes send parts of samples"),
    "dropout": ({"model": with_dropout}, "'0' drops values at random, so a sample differs from visit to visit"),
    "too large": (
        {"plan": changed_plan(output_bytes=10**12)},
        "stage 0 of the plan .* under 1f1b and needs 39.5 TB, a worker has",
    ),
    "columns": ({"options": {"deltas": "int3:38", "batch_dim": 1}}, "batch_dim=1; give batches by rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    how, words = REFUSED[case]
    with pytest.raises(pd.PipelineError, match=words):
        replace(make_training(), **how).pipeline()

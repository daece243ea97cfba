"""The promise of the library: a pipeline trains as plain PyTorch would.

A flushing method gives the parameters of one process; an asynchronous one those of its published update
rule, computed one minibatch after the other; several processes give, to the bit, what one process with all
workers gives.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import strict
import torch
import zoo
from cases import ASYNCHRONOUS, FLUSHING, Case, check, check_processes, run
from marks import long, slow, thinned

import pipedream as pd

KINDS = {"mlp": "sgd", "cnn": "adamw", "lstm": "sgd", "transformer": "adamw"}
PARTS = {"naive": 2, "gpipe": 3, "1f1b": 4, "pipedream_2bw": 3, "breadth_first": 3}  # the last minibatch has 2 samples
PARTS |= {"zb_h1": 4, "zb_h2": 5, "interleaved_1f1b": 4, "zbv": 4, "v_half": 3, "v_min": 4}
PARTS |= {"dualpipev": 4, "chimera": 4, "roundpipe": 3}
QUICK = {
    "mlp": ("gpipe", "pipedream", "pipedream_vertical_sync", "pipedream_2bw", "breadth_first"),
    "cnn": ("zb_h1", "chimera_doubled"),
    "lstm": ("1f1b",),
    "transformer": ("pipedream",),
}
"""Methods that the default run shows with an animal; the other pairs are slow, and so are longer runs of these.

The rest are in `ON_SHARED_WORKERS`.
"""


def _case(animal: str, schedule: str, stages: int) -> Case:
    parts = 2 * stages if schedule == "chimera_doubled" else PARTS.get(schedule, 4 if schedule in FLUSHING else None)
    return Case(animal, schedule, stages, optimizer=KINDS[animal], microbatches=parts)


def _matrix() -> list[Any]:
    """Returns every method with every animal; with longer runs, in each method's turn, they are slow, the rest long."""
    parameters = []
    for number, animal in enumerate(zoo.NAMES):
        for turn, schedule in enumerate((*FLUSHING, *ASYNCHRONOUS)):
            case = _case(animal, schedule, 2 if schedule == "chimera_doubled" else 4)
            if schedule in QUICK[animal]:
                parameters.append(pytest.param(case, id=str(case)))
            mark = pytest.mark.slow if turn % len(zoo.NAMES) == number else pytest.mark.long
            parameters.append(pytest.param(case.lengthened(), id=f"{case} lengthened", marks=mark))
    return parameters


@pytest.mark.parametrize("case", _matrix())
def test_every_method_trains_every_animal_as_plain_pytorch(case: Case) -> None:
    outcome = run(case)
    check(case, outcome)
    assert outcome.drains == [*outcome.evaluated, case.minibatches], "none at an epoch's border"
    # Staleness and memory are the paper's.
    p = case.stages
    for stage in range(p):
        late = {"pipedream": p - 1 - stage, "pipedream_vertical_sync": p - 1, "pipedream_2bw": 1}.get(case.schedule, 0)
        assert max(outcome.staleness[stage]) == late
        assert outcome.watched[-1][stage].storages <= late + 1


ON_SHARED_WORKERS = [
    # All stages on one worker, and four on each of two.
    Case("cnn", "interleaved_1f1b", 4, workers=1, microbatches=3, clip_grad_norm=0.1),
    Case("cnn", "breadth_first", 4, workers=1, microbatches=3),
    Case("transformer", "interleaved_1f1b", 4, workers=1, microbatches=2, optimizer="adamw"),
    Case("lstm", "breadth_first", 3, workers=1, microbatches=4),
    Case("mlp", "chimera", 2, microbatches=4, clip_grad_norm=0.1, scheduled=True, ema=0.9),
    Case("mlp", "chimera", 4, microbatches=8, evaluate_at=(), leave_at=5),
    Case("mlp", "interleaved_1f1b", 4, microbatches=4, clip_grad_norm=0.1, ema=0.9, recompute=True),
    # Forwards away from home: of each number of workers, several in a slot, fewer microbatches than workers.
    Case("mlp", "roundpipe", 4, workers=4, microbatches=2, clip_grad_norm=0.1, scheduled=True, ema=0.9),
    Case("mlp", "roundpipe", 4, workers=3, microbatches=4, evaluate_at=(), leave_at=5),
    Case("mlp", "roundpipe", 4, workers=3, microbatches=3, ema=0.9, options=(("delay", 1),)),
    *(
        slow(case, id=str(case))
        for case in (
            Case("cnn", "roundpipe", 4, workers=4, optimizer="adamw", options=(("forwards", 0), ("delay", 1))),
            Case("lstm", "roundpipe", 4, workers=1, microbatches=2, scheduled=True, options=(("delay", 1),)),
            Case("transformer", "roundpipe", 4, workers=3, leave_at=5, evaluate_at=(), options=(("delay", 1),)),
            Case("lstm", "roundpipe", 4, workers=4, microbatches=4, options=(("forwards", 3),), recompute=True),
        )
    ),
]


OTHERS = [
    # Ajanthan et al. train by torch's NAdam with beta1 = 0.99 on stashed weights.
    Case("mlp", "pipedream", 4, optimizer="nadam"),
    # Other depths; version of stage s is max(b, k - W_s).
    Case("mlp", "pipedream", 3, depth="full"),
    Case("mlp", "pipedream", 3, depth=(5, 3, 1), optimizer="adamw"),
    Case("mlp", "1f1b", 3, depth=(2, 1, 1), microbatches=3),
    Case("mlp", "pipedream_2bw", 3, depth=(3, 2, 1), microbatches=2),
    # Data parallelism; other replicas are in test_replicas.py.
    *(Case("mlp", "pipedream", 1, replicas=(count,)) for count in (2, 3)),
    Case("mlp", "pipedream", 2, replicas=(2, 1), depth="full", scheduled=True, ema=0.9),
    Case("mlp", "1f1b", 2, replicas=(1, 2), microbatches=3, clip_grad_norm=0.1),
    # What happens inside an update.
    Case("mlp", "1f1b", 3, microbatches=3, clip_grad_norm=0.1, scheduled=True, ema=0.9),
    Case("cnn", "gpipe", 3, microbatches=3, clip_grad_norm=0.1, optimizer="adamw"),
    Case("mlp", "pipedream", 3, clip_grad_norm=0.1, clip="local", scheduled=True, ema=0.9),
    Case("mlp", "pipedream_2bw", 2, clip_grad_norm=0.1, clip="local", optimizer="adamw"),
    # A loop that is left, and one that goes on.
    Case("mlp", "pipedream", 3, evaluate_at=(), leave_at=5),
    Case("mlp", "gpipe", 2, microbatches=3, evaluate_at=(), leave_at=4),
    # Halves of a backward: deeper than the microbatches reach, and not so deep; sums over replicas, of two stages with
    # a different number of them, begin in the last weight gradients; the forward is done again in I.
    Case("mlp", "zb_h2", 4, microbatches=3),
    Case("mlp", "zb_h1", 3, microbatches=4, depth=(2, 1, 1)),
    Case("mlp", "zb_h1", 2, replicas=(2, 1), microbatches=4),
    Case("mlp", "zb_h2", 2, replicas=(1, 3), microbatches=6, optimizer="adamw"),
    Case("cnn", "zb_h1", 3, microbatches=4, recompute=True),
    Case("mlp", "zb_h1", 3, microbatches=3, clip_grad_norm=0.1, scheduled=True, ema=0.9),
    # Single precision, in which the CPU has a kernel of its own for recurrent layers.
    Case("lstm", "zb_h1", 3, microbatches=3, dtype=torch.float32),
    *(
        pytest.param(case, id=str(case), marks=pytest.mark.slow if case.animal != "mlp" else ())
        for animal in zoo.NAMES
        for case in (
            Case(animal, "pipedream", 3, dtype=torch.float32),
            Case(animal, "1f1b", 2, dtype=torch.float32, microbatches=3),
        )
    ),
]


BFLOAT16 = {"dtype": torch.float32, "autocast": torch.bfloat16, "epochs": 2}


AUTOCAST = [
    Case("mlp", "zb_h1", 3, microbatches=4, **BFLOAT16),
    Case("mlp", "pipedream", 3, **BFLOAT16),
    slow(Case("transformer", "1f1b", 3, microbatches=4, **BFLOAT16)),
    slow(Case("mlp", "pipedream", 2, replicas=(2, 1), **BFLOAT16)),
    Case("mlp", "gpipe", 2, replicas=(2, 1), microbatches=3, **BFLOAT16),
    slow(Case("cnn", "pipedream", 3, **BFLOAT16)),
    slow(Case("transformer", "roundpipe", 3, microbatches=4, **BFLOAT16)),
]


@pytest.mark.parametrize("case", [*thinned(ON_SHARED_WORKERS, 4), *thinned(OTHERS, 4), *AUTOCAST], ids=str)
def test_shared_workers_depths_replicas_updates_and_autocast_change_nothing(case: Case) -> None:
    # bfloat16 has 8 bits: where a number differs in its last bit before it is rounded, it may be rounded elsewhere.
    check(case, run(case), tolerance=3e-2 if case.autocast else None)


IN_PROCESSES = {
    2: [
        *(_case("mlp", schedule, 2) for schedule in sorted({*FLUSHING, *ASYNCHRONOUS} - {*pd.schedules.STAGE_ORDERS})),
        _case("cnn", "gpipe", 2),
        _case("lstm", "pipedream", 2),
        Case("mlp", "pipedream", 1, replicas=(2,), scheduled=True),
        Case("mlp", "basis_rotation", 2, optimizer="adamw"),
        Case("mlp", "pipedream", 2, dtype=torch.float32, autocast=torch.bfloat16),
        Case("mlp", "1f1b", 2, microbatches=4, clip_grad_norm=0.1, ema=0.9),
        Case("mlp", "pipedream", 2, evaluate_at=(), leave_at=7),
        Case("mlp", "interleaved_1f1b", 4, microbatches=4, clip_grad_norm=0.1),
        Case("cnn", "breadth_first", 4, microbatches=3),
        *(_case("mlp", schedule, 4) for schedule in ("zbv", "v_half", "v_min", "dualpipev")),
        _case("mlp", "chimera_doubled", 2),
    ],
    3: [
        *(_case("lstm", schedule, 3) for schedule in ("1f1b", "pipedream_vertical_sync", "pipedream_2bw")),
        _case("cnn", "pipedream", 3),
        Case("cnn", "pipedream", 2, replicas=(2, 1)),
        Case("lstm", "roundpipe", 4, workers=3, microbatches=3, clip_grad_norm=0.1),
        Case("cnn", "roundpipe", 4, workers=3, microbatches=3, options=(("delay", 1),)),
        Case("mlp", "pipedream", 2, replicas=(1, 2), depth="full"),
        Case("mlp", "gpipe", 2, replicas=(2, 1), microbatches=4),
        Case("transformer", "zb_h1", 3, microbatches=4, optimizer="adamw"),
        Case("cnn", "zb_h2", 3, microbatches=5),
        Case("mlp", "zb_h1", 2, replicas=(2, 1), microbatches=4),
    ],
    4: [
        _case("cnn", "chimera", 4),
        Case("cnn", "roundpipe", 4, workers=4, microbatches=4, ema=0.9, options=(("forwards", 3),)),
        _case("transformer", "1f1b", 4),
        _case("transformer", "pipedream", 4),
        _case("cnn", "pipedream_2bw", 4),
        Case("mlp", "pipedream", 3, replicas=(2, 1, 1)),
    ],
}


@pytest.mark.processes
def test_two_processes_give_to_the_bit_what_one_gives() -> None:
    """A method of each kind; all are in the slow test."""
    names = ("1f1b", "zb_h1", "pipedream", "pipedream_2bw", "chimera_doubled")
    check_processes(2, [*(_case("mlp", name, 2) for name in names), _case("mlp", "zbv", 4)])


def list_in_processes(workers: int) -> list[Case]:
    """Returns the runs on so many processes: those of methods with delays and compensations, and of phases, too."""
    names = ("end_to_end.test_delayed", "end_to_end.test_compensation", "apps.training.test_phases")
    others = [import_module(f"tests.{name}") for name in names]
    return [*IN_PROCESSES[workers], *(case for module in others for case in module.IN_PROCESSES.get(workers, []))]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("workers", IN_PROCESSES)
def test_several_processes_give_to_the_bit_what_one_gives(workers: int) -> None:
    check_processes(workers, list_in_processes(workers))


ON_TWO_SHARED = [c for c in IN_PROCESSES[2] if c.schedule in pd.schedules.STAGE_ORDERS and c.animal == "mlp"]
LINKED = {
    2: [
        *(_case("mlp", name, 2) for name in ("naive", "gpipe", "1f1b", "pipedream", "pipedream_2bw", "zb_h1")),
        *(replace(case, epochs=1) for case in ON_TWO_SHARED),
    ],
    3: [_case("lstm", "1f1b", 3), Case("cnn", "pipedream", 2, replicas=(2, 1)), *IN_PROCESSES[3][5:7]],
    4: [_case("cnn", "chimera", 4), _case("transformer", "pipedream", 4)],
}
"""Runs over links, as on GPUs, by number of processes."""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, long(3), long(4)])
def test_links_as_between_gpus_give_to_the_bit_what_one_process_gives(workers: int) -> None:
    check_processes(workers, LINKED[workers], strict.run_all)


def test_every_method_runs_in_several_processes() -> None:
    """In the default or the slow run, so that a new method is not forgotten."""
    assert {case.schedule for workers in IN_PROCESSES for case in list_in_processes(workers)} >= {*pd.schedules.METHODS}

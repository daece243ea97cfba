"""The serial emulation of benchmarks/convergence trains as the running pipeline does."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from commands import load_benchmark
from marks import spread, thinned
from torch import Tensor, nn
from training import plan_of, train

import pipedream as pd

arms, report, run, seconds, serial, steppers, tasks = load_benchmark(
    "convergence", "arms", "report", "run", "seconds", "serial", "steppers", "tasks"
)

BOUND = 1e-9
ROTATED_BOUND = 1e-7  # eigenvectors of nearly equal eigenvalues amplify rounding
UPDATES = 12
RATES = {"sgd": 0.05, "adamw": 0.01, "nadam": 0.01, "muon": 0.02}
Batches = list[tuple[Tensor, Tensor]]


def _small(task: str, count: int) -> tuple[list[nn.Module], Batches, Callable[[Tensor, Tensor], Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if task == "digits":
            units = tasks.digits_units(channels=4, count=count)
            batches = [(torch.randn(24, 1, 8, 8).double(), torch.randint(10, (24,))) for _ in range(UPDATES)]
        else:
            units = tasks.char_gpt_units(width=8, context=6, symbols=11, count=count)
            batches = [(torch.randint(11, (24, 6)), torch.randint(11, (24, 6))) for _ in range(UPDATES)]
    return [unit.double() for unit in units], batches, tasks.TASKS[task].loss


def _factor(update: int) -> float:
    return 0.2 + 0.8 * math.cos(update / UPDATES)


def _schedule(method: Any, plan: pd.Plan) -> pd.Schedule:
    p = len(plan.stages)
    recomputes = method.paper(p, method.parts(p)).rule == "recompute"
    options: dict[str, Any] = {"backward_rule": "recompute"} if recomputes else {}
    built = pd.schedules.SCHEDULES[method.schedule](plan, method.microbatches(p), **options)
    compensation = tuple(text.format(updates=UPDATES // 2) for text in method.compensation)
    return built.with_compensation(compensation) if compensation else built


def _run(task: str, arm: Any, stages: int) -> tuple[list[float], Tensor]:
    units, batches, loss = _small(task, stages)
    model = nn.Sequential(*units)
    names = [layer.name.split(".")[0] for layer in pd.capture.capture(model, (batches[0][0],)).graph.layers]
    plan = plan_of(model, batches[0][0], [names.index(str(s)) for s in range(1, stages)])
    built = [_schedule(turn.method, plan) for turn in arm.turns]
    options: dict[str, Any] = {"schedule": built[0]}
    if len(built) > 1:
        ends = [round(turn.until * UPDATES) for turn in arm.turns[:-1]]
        options = {"phases": [pd.Phase(*pair) for pair in zip(built, [*ends, None], strict=True)]}
    how = {"loss": lambda output, batch: loss(output, batch[1]), "weight": lambda batch: float(len(batch[1]))}
    how |= {"optimizer": partial(steppers.STEPPERS[arm.optimizer], lr=RATES[arm.optimizer]), "check": False}
    scheduler = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_factor)
    losses, state = train(model, plan, batches, scheduler=scheduler, **how, **options)
    return losses, torch.cat([state[name].reshape(-1) for name, _ in model.named_parameters()])


def _cases() -> list[Any]:
    """Returns the first arm with a method, or with an optimizer; those of the larger task are slow."""
    parameters, covered = [], set()
    for arm in arms.ARMS:
        if arm.turns[0].method.rotation and arm.synchronous:
            continue  # a control: the library refuses to compensate for no delay
        if new := {str(arm.turns), arm.optimizer} - covered:
            covered |= new
            marks = () if arm.task == "digits" else pytest.mark.slow
            parameters.append(pytest.param(arm.task, arm, id=f"{arm.task} {arm}", marks=marks))
    return parameters


@pytest.mark.parametrize(("task", "arm"), spread(thinned(_cases(), 4), 3))
def test_the_emulation_equals_the_running_pipeline(task: str, arm: Any) -> None:
    units, batches, loss = _small(task, 3)
    optimizer = partial(steppers.STEPPERS[arm.optimizer], lr=RATES[arm.optimizer])
    losses: list[float] = []

    def watch(updates: int, loss_value: float, compute_output: Any) -> bool:
        losses.append(loss_value)
        return True

    emulated = serial.train(units, 3, arm, optimizer, loss, batches, _factor, watch, annealed=UPDATES // 2)
    state = torch.cat([w.reshape(-1) for w in emulated.values()])
    expected, weights = _run(task, arm, 3)
    assert len(expected) == UPDATES
    bound = ROTATED_BOUND if arm.turns[0].method.rotation else BOUND
    assert losses == pytest.approx(expected, rel=bound)
    assert (state - weights).norm() <= bound * weights.norm()


def test_muon_is_torchs() -> None:
    """Torch makes updates orthogonal in bfloat16, whose relative error is 2^-9 in each of the products."""
    weights = [torch.randn(6, 4), torch.randn(4, 6), torch.randn(6, 4)]
    ours, theirs = ([nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    muon = steppers.Muon([(f"{i}.weight", p) for i, p in enumerate(ours)], lr=0.1)
    torchs = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        muon.step()
        torchs.step()
    for mine, other, start in zip(ours, theirs, weights, strict=True):
        assert (mine - other).norm() < 0.03 * (mine - start).norm()


def _curve(score: float) -> Any:
    return run.Curve(1.0, 1.0, tuple(run.Point(n, score, 1 - score) for n in range(run.LOOKS)))


@pytest.mark.parametrize("best", [-6, -1, 0, 1, 4, 40])
def test_tuning_goes_on_until_the_best_has_both_neighbours(best: int) -> None:
    curves: dict[Any, Any] = {}
    while chosen := run.due(curves, "digits", "pb", 4, 5):
        assert not set(chosen) & set(curves)
        curves |= {run_key: _curve(abs(run_key.step - best) / 100) for run_key in chosen}
    best_step = min(best, run.WIDEST)
    tried = {run_key.step for run_key in curves if run_key.seed == run.TUNING_SEED}
    assert tried >= {*run.GRID, best_step - 1, best_step}
    assert (best_step + 1 in tried) == (best_step < run.WIDEST)
    assert min(tried) >= min(*run.GRID, best_step) - 1
    assert max(tried) <= max(*run.GRID, best_step) + 1
    trained = [run_key for run_key in curves if run_key.seed != run.TUNING_SEED]
    assert sorted(run_key.seed for run_key in trained) == list(range(5))
    assert {run_key.step for run_key in trained} == {best_step}


def test_effects_are_judged_by_seeds() -> None:
    low, high = dict.fromkeys(range(5), 0.1), dict.fromkeys(range(5), 0.2)
    mixed = {0: 0.05, 1: 0.3, 2: 0.05, 3: 0.3, 4: 0.1}
    none = dict.fromkeys(range(5), math.inf)
    assert report.judged(low, high, 0.0, even=False) == "reproduced"
    assert report.judged(high, low, 0.0, even=False) == "not reproduced: the contrary"
    assert report.judged(low, mixed, 0.0, even=False) == "not reproduced: within the seeds' spread"
    assert report.judged(low, none, 0.0, even=False) == "reproduced"
    assert report.judged(none, none, math.nan, even=True) == "not reproduced: both diverge"
    assert report.judged(low, high, 0.1, even=True) == "reproduced"
    assert report.judged(high, low, 0.05, even=True) == "not reproduced: it is worse"
    assert report.judged({0: 0.1, 1: 0.1}, high, 0.05, even=True) == "not tested"


def test_seconds_over_links() -> None:
    """One worker computes alone; over a slow link each update waits for one message each way, of two in flight."""
    of = arms.arms_of("char_gpt")
    for name, update_s in (("sync", 0.1e-3), ("sync_rotation_nadam", 0.33e-3 + 1.2e-3)):
        pace = seconds.pace_of_gpt(of[name], 8, 1e9)
        assert seconds.times_of(of[name], 1, 300, [7], pace) == pytest.approx([7 * 8 * (3 * 0.6e-3 + update_s)])
    for bytes_per_s in (1e3, 1e5):
        pace = seconds.pace_of_gpt(of["pipedream"], 4, bytes_per_s)
        first, last = seconds.times_of(of["pipedream"], 2, 300, [100, 200], pace)
        message_s = 65_536 / bytes_per_s + 1e-4
        assert message_s <= (last - first) / 100 <= message_s + 4 * (3 * 0.6e-3 + 0.1e-3)

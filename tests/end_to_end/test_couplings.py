"""Couplings of stages beside the data: norms over all of them, gradients that are not numbers, tied weights."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cases
import processes
import pytest
import torch
import torch.nn.functional as F
import zoo
from built import Built
from cases import OPTIMIZERS, Case, check, make_pipeline, phased, run, stage_states
from compensated import BasisRotation
from marks import long, slow, spread, thinned
from torch import Tensor, nn
from training import plan_of

import pipedream as pd
from pipedream.simulator import costs, simulate
from pipedream.testing import Reads, Trained, Training, assert_equal, tiny
from pipedream.workflows.check import check_plan

DELAYED = [
    phased("pipedream", (1, 1, 1)),
    phased("pipedream_2bw/2", (1, 1, 1), depth=(3, 2, 1)),  # the input stage holds more than one update's microbatches
    *(
        slow(case)
        for case in (
            phased("pipedream", (1, 1, 1, 1), depth=(7, 4, 2, 1), optimizer="adamw"),
            phased("pipedream_2bw/3", (1, 1, 1)),
            phased("pipedream", (2, 2)),
            phased("pipedream_2bw/4", (2, 1), optimizer="adamw"),
            # A flush clips by the norm of its own update; the next phase starts from the last such norm.
            phased("1f1b/2:13,pipedream:37,gpipe/3", (1, 1), evaluate_at=(5, 23)),
        )
    ),
]


def test_stages_that_all_clip_alone_make_a_step_of_the_norm_that_was_asked_for() -> None:
    how = {"clip_grad_norm": 1e-3, "clip": "local", "epochs": 1, "evaluate_at": ()}
    whole = tiny(plan=(1, 1, 1), schedule="pipedream", optimizer=partial(torch.optim.SGD, lr=1.0), **how)
    training = replace(whole, data=whole.data[:1])
    before = training.make_model().state_dict()
    steps = [weight - before[name] for name, weight in training.pipeline().state.items()]
    assert float(torch.cat([step.flatten() for step in steps]).norm()) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("case", DELAYED, ids=str)
def test_clipping_by_an_earlier_global_norm_equals_a_serial_loop(case: Case) -> None:
    clipped = replace(case, clip_grad_norm=0.05, clip="delayed_global")
    check(clipped, run(clipped))


PLANS = [
    pd.Plan.uniform(1),
    pd.Plan.uniform(4),
    replace(pd.Plan.uniform(4), in_flight=(8, 5, 2, 1)),
    replace(pd.Plan.uniform(2, replicas=(2, 2)), update_delay=(1, 0), in_flight=(4, 1)),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.config} {plan.in_flight}")
@pytest.mark.parametrize(("name", "parts"), [("pipedream", None), ("pipedream_vertical_sync", None), ("2bw", 8)])
def test_nobody_waits_for_the_norm(plan: pd.Plan, name: str, parts: int | None) -> None:
    """Without messages' time and with any compute, an update never waits for the norms of the one so many before it."""
    delay = pd.schedules.build(name, plan, parts).find_norm_delay()
    for forward_s, backward_s in ((1.0, 2.0), (3.0, 0.5), (1.0, 0.01)):
        timed = replace(plan, stages=tuple(replace(s, forward_s=forward_s, backward_s=backward_s) for s in plan.stages))
        schedule = pd.schedules.build(name, timed, parts)
        program = pd.lower(schedule)
        begins: dict[int, list[float]] = {}
        for span in simulate(program, costs(timed, split=program.microbatches), 12 * program.cycle).work():
            if span.kind == "U":
                begins.setdefault(span.index, []).append(span.start_s)
        assert all(max(begins[n - delay]) <= min(begins[n]) for n in begins if n > delay)
        pd.verify(pd.lower(replace(schedule, couples_updates=True, norm_delay=delay)))


# -- tied weights -----------------------------------------------------------------------------------------------------


def tied(schedule: str, cuts: tuple[int, ...] | None = (1, 2, 3), **more: Any) -> Case:
    """Returns a run of the tied model, cut before these layers, or as the method has it on shared workers."""
    stages = more.pop("stages", 4) if cuts is None else len(cuts) + 1
    settings = {"optimizer": "adamw", "microbatches": 4, "epochs": 3, "evaluate_at": (7,), "ema": 0.9} | more
    return Case("tied", schedule, stages, cuts=cuts, **settings)


LATE_TIED = [
    tied("pipedream_2bw"),
    tied("pipedream_2bw", (1,), optimizer="sgd"),
    tied("pipedream_2bw", (1, 3), replicas=(2, 1, 2)),
    tied("pipedream_2bw", (1, 3), replicas=(2, 1, 1), compensation="basis_rotation:2:one_sided"),
    tied("pipedream_2bw", (3,), replicas=(2, 2), optimizer="sgd", microbatches=6),
    tied("pipedream_vertical_sync", (1, 3), microbatches=None),
]

TIED = [
    tied("1f1b"),
    tied("gpipe", optimizer="sgd", clip_grad_norm=0.3),
    tied("naive", (2,), clip_grad_norm=0.3),
    tied("1f1b", (1,), replicas=(2, 1)),
    tied("1f1b", (3,), replicas=(1, 2), optimizer="sgd", clip_grad_norm=0.3),
    tied("gpipe", (2,), replicas=(3, 2)),
    tied("zb_h1"),
    tied("zb_h2"),
    # Several stages a worker: both ends of the model on one, or on two; with two holders of each stage, both on both.
    tied("zbv", None, clip_grad_norm=0.3),
    tied("dualpipev", None),
    tied("interleaved_1f1b", None),
    tied("breadth_first", None, optimizer="sgd", clip_grad_norm=0.3),
    tied("chimera", None, stages=2),
    tied("chimera", None, clip_grad_norm=0.3),
    tied("chimera_doubled", None, stages=2),
    tied("roundpipe", None, workers=2, clip_grad_norm=0.3),
]


def check_tied(case: Case, outcome: Trained) -> None:
    """Checks a run of the tied model against one process, where the shared weight is one parameter."""
    rule = BasisRotation(lambda s: 2, sides=lambda m, n: "L" if m < n else "R") if case.compensation else None
    check(case, outcome, 1e-8 if case.compensation else 1e-10, rule)
    assert torch.equal(outcome.ema["3.head.weight"], outcome.ema["0.table.weight"])


QUICK = (TIED[0], TIED[4], TIED[6], TIED[10], TIED[12])


@pytest.mark.parametrize("case", spread(thinned(c if c in QUICK else slow(c) for c in (*TIED, *LATE_TIED)), 3), ids=str)
def test_weights_tied_across_stages_train_as_in_one_process(case: Case) -> None:
    check_tied(case, run(case))


IN_PROCESSES = {2: [TIED[2], LATE_TIED[1], *TIED[8:13], *TIED[14:]], 3: [TIED[3]], 5: [LATE_TIED[2]]}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("workers", [long(2), 3, long(5)])
def test_processes_keep_tied_weights_equal(workers: int, tmp_path: Path) -> None:
    in_team = lambda *how: processes.team(workers).results(run, *how)[0]  # noqa: E731
    for case in IN_PROCESSES[workers]:
        check_tied(case, cases.check_resumed(case, tmp_path / str(case), (5, 10), in_team))


CLIPPED = {"evaluate_at": (), "epochs": 7, "clip_grad_norm": 0.05, "clip": "delayed_global"}
RESUMED = [TIED[8], *map(slow, (TIED[at] for at in (12, 13, 14, 15))), slow(phased("1f1b/2:12,pipedream", **CLIPPED))]


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_runs_with_couplings_go_on_to_the_bit(case: Case, tmp_path: Path) -> None:
    cases.check_resumed(case, tmp_path, (5, 12, 18, 24) if case.phases else (5, 10))


@pytest.mark.slow
def test_tied_weights_go_on_from_a_checkpoint_of_any_plan(tmp_path: Path) -> None:
    apart, together = (replace(tied("1f1b", cuts).training(), evaluate_at=()) for cuts in ((1, 2, 3), ()))
    apart.resumed(tmp_path / "apart", (5, 10), together, bound=1e-10)
    together.resumed(tmp_path / "together", (10,), apart, bound=1e-10)


@pytest.mark.parametrize("case", [tied("1f1b", epochs=1), tied("chimera", None, stages=2, epochs=1)], ids=str)
def test_a_state_dict_reaches_every_holder(case: Case) -> None:
    """Under Chimera the first rank has the second replica of the last stage."""
    training = replace(case.training(), evaluate_at=())
    model = training.make_model()
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})
    with training.make_pipeline() as pipeline:
        pipeline.load_state_dict(model.state_dict())
        list(pipeline.train(training.data))
        cases.assert_near(pipeline.state_dict(), training.loop(model=model).state, 1e-10)


class TrapTable(zoo.Positions):
    """Gives the first stage alone a gradient that is not a number, for sentences that begin with a given word."""

    def forward(self, tokens: Tensor) -> Tensor:
        output = super().forward(tokens)
        if self.training and len(tokens) and torch.equal(tokens[0], zoo.make("tied").batches[1][0][0]):
            output.register_hook(lambda gradient: gradient * float("nan"))
        return output


def test_holders_without_a_flush_skip_an_update_together() -> None:
    training = replace(LATE_TIED[0].training(), on_nan="skip", evaluate_at=())
    training.model[0].__class__ = TrapTable  # type: ignore[index]

    def copies_of(pipeline: pd.Pipeline) -> list[Tensor]:
        handles = [state.versions.handles for state in stage_states(pipeline)]
        return [named["0.table.weight"].detach().clone() for named in handles if "0.table.weight" in named]

    trained = training.pipeline(watch=copies_of)
    assert trained.skipped == (3,) * 4
    (copies,) = trained.watched
    assert torch.equal(*copies)
    assert torch.isfinite(copies[0]).all()
    assert trained.losses[11] < trained.losses[0]


def profile_tied() -> pd.Profile:
    animal = zoo.make("tied")
    profile = pd.profile(animal.model, (animal.batches[0][0],), runs=1, device="meta", as_device="H100")
    return replace(profile, layers=tuple(replace(row, forward_s=1.0, backward_s=2.0) for row in profile.layers))


def test_a_plan_that_parts_ties_holds_for_the_methods_that_can_train_it() -> None:
    profile, how = profile_tied(), {"cuts": (2,), "shape": "1-1"}
    plan = pd.plan(profile, pd.Cluster.flat(2), schedule="1f1b", **how)
    assert check_plan(plan, profile=profile).plan.stages[0].last == 2
    words = r"layers '0' and '3' share '?.* untie the weight, or choose .* pipedream_2bw"
    with pytest.raises(pd.errors.PlanError, match=words):
        check_plan(plan, profile=profile, schedule="pipedream")
    with pytest.raises(pd.errors.PlanError, match=r"share .*a method whose stages all make the same updates"):
        pd.plan(profile, pd.Cluster.flat(2), schedule="pipedream", **how)


SEARCHES = [("gpipe", {"shape": "straight"}), ("auto", {"shape": "pipeline"}), ("2bw", {"cuts": ("2",)}), ("zbv", {})]


@pytest.mark.parametrize(("schedule", "how"), thinned(SEARCHES))
def test_each_search_parts_tied_layers_and_counts_their_bytes_twice(schedule: str, how: dict[str, Any]) -> None:
    profile, cluster = profile_tied(), pd.Cluster.flat(2, 1e9)
    plan = pd.plan(profile, cluster, schedule=schedule, microbatches=4, **how)
    ((names, stages),) = [(tied.names, tied.stages) for tied in plan.tied_weights]
    assert (names, stages) == (("0.table.weight",), (0, len(plan.stages) - 1))
    assert sum(stage.parameter_bytes for stage in plan.stages) == profile.parameter_bytes + 9 * 8 * 8
    assert "tied: '0.table.weight' (stages 0," in str(plan)
    whole = pd.plan(profile, cluster, schedule="pipedream", shape="pipeline")
    assert (len(whole.stages), whole.tied_weights) == (1, ())
    assert "'0' and '3' share '0.table.weight' and stay in one stage" in whole.note


def skip(self: Any, tokens: Tensor) -> Tensor:
    """No chain of modules: a skip connection, and the table of words is read once more outside of its module."""
    x = self.words(tokens)
    x = self.norm(x + torch.tanh(self.middle(x)))
    return F.linear(x, self.words.weight).transpose(1, 2)


def test_a_model_that_runs_by_its_own_forward_is_cut_between_tied_layers() -> None:
    torch.manual_seed(5)
    parts = {"words": nn.Embedding(9, 8), "middle": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}
    model, batches = Built(skip, **parts).double(), zoo.make("tied").batches
    profile = pd.profile(model, (batches[0][0],), runs=1, warmup=0)
    plan = pd.plan(profile, pd.Cluster.flat(2), schedule="2bw", shape="1-1", microbatches=2)
    assert [(tied.names, tied.stages) for tied in plan.tied_weights] == [(("words.weight",), (0, 1))]
    sgd = partial(torch.optim.SGD, lr=0.5)
    training = Training(model=model, data=batches, loss=F.cross_entropy, optimizer=sgd, plan=plan, epochs=3)
    training.check(reads=Reads(lambda s, k: max(0, k // 2 - 1)))


def normed(running_mean: Tensor | None = None) -> nn.Module:
    norm = nn.BatchNorm1d(6)
    norm._buffers["running_mean"] = norm.running_mean if running_mean is None else running_mean
    return Built(lambda self, x: torch.tanh(self.norm(self.linear(x))), linear=nn.Linear(6, 6), norm=norm)


@pytest.mark.parametrize("shares", ["module", "statistics"])
def test_state_that_two_stages_would_move_is_refused_where_it_is_planned(shares: str) -> None:
    first = nn.BatchNorm1d(6, affine=False) if shares == "module" else normed()
    second = first if shares == "module" else normed(first.norm.running_mean)
    model = nn.Sequential(first, nn.Linear(6, 6), second, nn.Linear(6, 3))
    profile = pd.profile(model, (torch.randn(4, 6),), warmup=0, runs=1)
    with pytest.raises(
        pd.errors.PlanError, match=r"share a module with buffers, running statistics, .*; cut at one of \[3\]"
    ):
        pd.plan(profile, pd.Cluster.flat(2), schedule="1f1b", cuts=(2,), shape="1-1")
    free = replace(profile, graph=replace(profile.graph, ties=(), inseparable=()))  # made without the model
    plan = pd.plan(free, pd.Cluster.flat(2), schedule="1f1b", cuts=(2,), shape="1-1")
    with pytest.raises(pd.errors.PlanError, match="running statistics, which each stage would change by itself"):
        pd.Pipeline(model, plan, schedule="1f1b", loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


def test_a_frozen_weight_that_stages_share_is_no_coupling() -> None:
    results = []
    for is_tied in (True, False):
        model = zoo.make("tied").model
        if not is_tied:
            model[3].head.weight = nn.Parameter(model[0].table.weight.detach().clone())
        for layer in (model[0].table, model[3].head):
            layer.weight.requires_grad_(False)
        results.append(replace(tied("pipedream", (2,), microbatches=None).training(), model=model).pipeline())
    assert_equal(*results)


# -- updates that are not finite, and loss scales ---------------------------------------------------------------------


def spring_trap(self: Any, x: Tensor) -> Tensor:
    """A linear layer whose own gradient is not a number where an input is marked; nothing else notices."""
    out = self.inner(x.clamp(max=3.0))
    return out + torch.sqrt(self.scale * 0.0) if bool((x > 50).any()) else out


def trapped() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        trap = Built(spring_trap, inner=nn.Linear(6, 8), scale=nn.Parameter(torch.ones(())))
        return nn.Sequential(nn.Linear(6, 6), nn.Identity(), trap, nn.Tanh(), nn.Linear(8, 3)).double()


def marked(bad: tuple[int, ...], count: int = 16, samples: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Returns minibatches, of which some make the trapped gradient not a number; the last of them has a NaN in it."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for number in range(count):
        x, y = torch.randn(samples, 6, generator=generator).double(), torch.randint(3, (samples,), generator=generator)
        if number in bad:
            x[2] = float("nan") if number == bad[-1] else 1e4
        batches.append((x, y))
    return batches


BY_SGD: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": OPTIMIZERS["sgd"]}
SHARED = {
    "interleaved_1f1b": ((1, 2, 3), (1, 1, 1, 1), (0, 1, 0, 1)),
    "zbv": ((1, 2, 3), (1, 1, 1, 1), (0, 1, 1, 0)),
    "chimera": ((2,), (2, 2), (0, 1, 1, 0)),
    "roundpipe": ((1, 2, 3), (1, 1, 1, 1), (0, 2, 1, 0)),
}
"""Methods that put several stages on a worker: cuts, replicas, workers of the stages."""


def trap_plan(schedule: str) -> pd.Plan:
    cuts, replicas, order = SHARED.get(schedule, ((2, 3), (1, 1, 1), ()))
    return replace(plan_of(trapped(), marked(())[0][0], cuts, replicas), worker_order=order)


def trap(schedule: str, bad: tuple[int, ...] = (3, 7, 11), plan: pd.Plan | None = None, **options: Any) -> Training:
    """Returns a training that skips updates whose gradients are not finite."""
    data, plan = options.pop("data", None) or marked(bad), plan or trap_plan(schedule)
    how = {"schedule": "" if "phases" in options else schedule, "on_nan": "skip"} | BY_SGD | options
    return Training(model=trapped, data=data, plan=plan, **how)


@pytest.mark.parametrize(
    ("schedule", "replicas", "late", "m"),
    [
        ("1f1b", (1, 1, 1), (0, 0, 0), 3),
        slow("gpipe", (1, 1), (0, 0), 3),
        ("pipedream", (1, 1, 1), (2, 1, 0), None),
        ("pipedream", (2, 2), (1, 0), None),
        ("pipedream_2bw", (1, 1, 1), (1, 1, 1), 3),
    ],
)
def test_updates_that_are_not_finite_are_skipped_as_the_method_can(
    schedule: str, replicas: tuple[int, ...], late: tuple[int, ...], m: int | None
) -> None:
    """The schedule counts them, the average leaves them out."""
    batches = marked((0, 5, 9, 13), count=19)  # the very first update is skipped, the last round of two is not full
    plan = plan_of(trapped(), batches[1][0], (2, 3)[: len(replicas) - 1], replicas)
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7)
    training = trap(schedule, data=batches, plan=plan, microbatches=m, ema=0.9, scheduler=scheduler)
    trained = training.check(reads=Reads(lambda s, k: max(0, k // (m or replicas[0]) - late[s])))
    # The trap is in the second stage; a loss that is not a number spoils all of them.
    assert trained.skipped[1] >= 4
    assert set(trained.skipped) == ({trained.skipped[1]} if not any(late) else {1, trained.skipped[1]})
    assert [number for number, loss in trained.losses.items() if loss != loss] == [13]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", slow("zbv"), slow("chimera"), slow("roundpipe")])
def test_stages_of_one_worker_skip_and_clip_together(schedule: str) -> None:
    training = trap(schedule, microbatches=4)
    free = training.check(reads=Reads(lambda s, k: k // 4))
    clipped = replace(training, clip_grad_norm=0.05).check(reads=Reads(lambda s, k: k // 4))
    assert free.skipped == clipped.skipped == (3,) * len(trap_plan(schedule).stages)


def train_each_trap(schedules: tuple[str, ...]) -> list[Trained]:
    return [trap(schedule).pipeline() for schedule in schedules]


@pytest.mark.processes
@pytest.mark.slow
def test_processes_skip_what_one_does() -> None:
    for schedules, workers in ((("1f1b", "pipedream"), 3), (("interleaved_1f1b", "chimera"), 2)):
        trained = processes.team(workers).results(train_each_trap, schedules)[0]
        for alone, together in zip(train_each_trap(schedules), trained, strict=True):
            assert_equal(together, alone)


def steep(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch[1]) * 50


def plain_scaled(
    model: nn.Module, batches: Any, loss: Any, scaler: torch.amp.GradScaler, m: int = 2, clip: float | None = None,
    autocast: torch.dtype | None = None,
) -> int:  # fmt: skip
    """Trains in a loop with torch's scaler; returns how many updates it left out."""
    optimizer, skips = OPTIMIZERS["sgd"](list(model.named_parameters())), 0
    for x, y in batches:
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(m), y.chunk(m), strict=True):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                part = loss(model(xs), ys) / m
            scaler.scale(part).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skips += scaler.get_scale() < before
    return skips


def scale_of(pipeline: pd.Pipeline) -> float:
    (scale,) = {state.optimizer.loss_scale.value for state in stage_states(pipeline)}
    return float(scale)


# So large that the first gradients overflow; it grows until they do again.
FACTORS = {"growth_factor": 4.0, "backoff_factor": 0.25}
GROWING = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**126, growth_interval=3, **FACTORS)


@pytest.mark.parametrize(
    ("schedule", "clip"),
    [
        ("1f1b", 0.05),
        ("zb_h1", 0.05),  # a backward in two halves
        ("pipedream", None),  # of one stage, whose gradients are never of an old scale
        *(slow(name, clip) for name, clip in (("naive", None), ("interleaved_1f1b", 0.05), ("zbv", None))),
    ],
)
def test_a_changing_loss_scale_is_torchs(schedule: str, clip: float | None) -> None:
    batches, m = [(x.float(), y) for x, y in marked((), count=24, samples=8)], 1 if schedule == "pipedream" else 2
    plain, asked_for, scaler = trapped().float(), GROWING(), GROWING()
    for each in (asked_for, scaler):
        each.load_state_dict(each.state_dict() | {"_growth_tracker": 2})
    plan = plan_of(trapped(), batches[0][0].double(), ()) if m == 1 else trap_plan(schedule)
    how = {"loss": steep, "clip_grad_norm": clip, "options": {"grad_scaler": asked_for}, "on_nan": "error"}
    how |= {"microbatches": None if m == 1 else m}
    trained = replace(trap(schedule, plan=plan, data=batches, **how), model=plain).pipeline(watch=scale_of)
    skips = plain_scaled(plain, batches, lambda o, y: steep(o, (o, y)), scaler, m, clip)
    assert trained.watched == [scaler.get_scale()]
    assert asked_for.get_scale() == 2.0**126, "the user's is left alone"
    assert trained.skipped == (skips,) * len(plan.stages)
    assert 0 < skips < 20
    cases.assert_near(trained.state, dict(plain.state_dict()), 1e-5)


@pytest.mark.slow
def test_a_loss_scale_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    training = Case("mlp", "1f1b", 2, dtype=torch.float32, microbatches=2, epochs=4, evaluate_at=()).training()
    training = replace(training, loss=steep, options={"grad_scaler": scaler}, total=None)
    assert training.resumed(tmp_path, (7, 14)).skipped > (0, 0)


def test_a_loss_scale_that_is_asked_for_is_not_the_checkpoints(tmp_path: Path) -> None:
    for scale in (1024.0, 8.0):
        with make_pipeline("mlp", schedule="1f1b", microbatches=2, grad_scaler=scale) as pipeline:
            if scale == 8.0:
                pipeline.load(tmp_path)
            pipeline.save(tmp_path)
            assert scale_of(pipeline) == scale


def many_samples(count: int = 4) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], pd.Plan]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        batches = [(torch.randn(2048, 6), torch.zeros(2048).long()) for _ in range(count)]
    return model, batches, plan_of(model, batches[0][0], (1,))


# A minibatch weighs 2048 samples: were that in the gradients of float16 until the update divides by it, each of
# them would overflow at these scales.
@pytest.mark.parametrize(
    ("schedule", "loss", "scaler"),
    [
        ("1f1b", F.cross_entropy, torch.amp.GradScaler("cpu")),
        ("gpipe", nn.MSELoss(), torch.amp.GradScaler("cpu", init_scale=2.0**18)),
        ("pipedream_2bw", F.cross_entropy, 8192.0),
    ],
)
def test_the_loss_is_scaled_as_a_mean(schedule: str, loss: Any, scaler: Any) -> None:
    model, batches, plan = many_samples()
    if isinstance(loss, nn.MSELoss):
        batches = [(x, F.one_hot(y, 3).float()) for x, y in batches]
    plain = deepcopy(model)
    how = {"loss": loss, "autocast": torch.float16, "grad_scaler": scaler}
    with pd.Pipeline(model, plan, schedule=schedule, microbatches=2, **BY_SGD | how) as pipeline:
        list(pipeline.train(batches))
        skipped, scale, state = pipeline.skipped_updates(), scale_of(pipeline), pipeline.state_dict()
    if not isinstance(scaler, torch.amp.GradScaler):
        assert skipped == (0, 0)
        return
    reference_scaler = torch.amp.GradScaler("cpu", init_scale=scaler.get_scale())
    skips = plain_scaled(plain, batches, loss, reference_scaler, autocast=torch.float16)
    assert (skipped, scale) == ((skips, skips), reference_scaler.get_scale())
    cases.assert_near(state, dict(plain.state_dict()), 1e-3)


def test_a_constant_scale_that_leaves_out_all_updates_is_told() -> None:
    model, batches, plan = many_samples(9)
    how = {"loss": steep, "autocast": torch.float16, "grad_scaler": 2.0**24}
    pipeline = pd.Pipeline(model, plan, schedule="1f1b", microbatches=2, **BY_SGD | how)
    with pipeline, pytest.warns(UserWarning, match=r"8 updates in a row.*scale 1.67772e\+07; use a smaller one"):
        list(pipeline.train(batches))
    assert pipeline.skipped_updates() == (9, 9)


# -- what is refused --------------------------------------------------------------------------------------------------

SHARE = r"share '0.table.weight' \(stages 0, 3\), and was asked to train by "
LATE = {"schedule": "pipedream", "clip_grad_norm": 1.0}
NO_SCALE = "give a torch.amp.GradScaler or a positive number"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tied", {"schedule": "pipedream"}, f"{SHARE}'pipedream', whose stages update at different.* pipedream_2bw"),
    ("tied", {"phases": "1f1b/4:5,pipedream"}, "'pipedream', whose stages update at different times"),
    ("tied", {"clip_grad_norm": 1.0, "clip": "local"}, "each holder would clip"),
    ("tied", LATE | {"schedule": "2bw", "clip": "delayed_global", "microbatches": 4}, "each holder would clip"),
    ("mlp", {"schedule": "pipedream", "grad_scaler": torch.amp.GradScaler("cpu")}, "gradients of the old scale"),
    *(("mlp", {"grad_scaler": scale}, NO_SCALE) for scale in ("dynamic", True, float("inf"), float("nan"), 0)),
    ("mlp", {"on_nan": "ignore"}, "on_nan='ignore' is not known; choose one of error, continue, skip"),
    *(
        ("mlp", {"clip_grad_norm": limit}, r"clip_grad_norm=.* was asked for; give a number between 0 and inf")
        for limit in (-1.0, 0.0, float("nan"), float("inf"))  # a negative one would train uphill
    ),
    *(("mlp", {"ema": decay}, r"ema=.* was asked for; give a number between 0 and 1") for decay in (0.0, 1.0, 2.0)),
    ("mlp", LATE, "does not flush.*Use clip='delayed_global'"),
    ("mlp", LATE | {"plan": (2, 1), "clip": "delayed_global"}, "an update holds 2, 1 microbatches"),
]


@pytest.mark.parametrize(("animal", "options", "words"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_has_no_meaning_is_refused(animal: str, options: dict[str, Any], words: str) -> None:
    plan = (1,) * (4 if animal == "tied" else 2)
    method = {} if "phases" in options else {"schedule": "1f1b"}
    with pytest.raises(pd.errors.ScheduleError, match=words):
        make_pipeline(animal, **{"plan": plan} | method | options)

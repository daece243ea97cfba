"""Couplings of stages beside the data: norms over all of them, gradients that are not numbers, tied weights."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import astuple, replace
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
from cases import OPTIMIZERS, Case, Fresh, check, make_pipeline, phased, run, stage_states
from compensated import BasisRotation
from torch import Tensor, nn

import pipedream as pd
from pipedream.core.schedule.coupling import norm_delay
from pipedream.core.schedule.op import Kind, Op
from pipedream.planner import manual_plan
from pipedream.runtime.update.tied_weights import find_tied_weights
from pipedream.simulator import costs, simulate
from pipedream.testing import Reads, Trained, Training, assert_equal, assert_near
from pipedream.workflows.check import check_plan
from pipedream.workflows.methods import score

DELAYED = [
    phased("pipedream", (1, 1, 1)),
    phased("pipedream", (1, 1, 1, 1), depth=(7, 4, 2, 1), optimizer="adamw"),
    phased("pipedream_2bw/3", (1, 1, 1)),
    phased("pipedream_2bw/2", (1, 1, 1), depth=(3, 2, 1)),  # the input stage holds more than one update's microbatches
    phased("pipedream", (2, 2)),
    phased("pipedream_2bw/4", (2, 1), optimizer="adamw"),
    # A flush knows the norm of the very update; the phase behind it begins with the last norm of the one before.
    phased("1f1b/2:13,pipedream:37,gpipe/3", (1, 1), evaluate_at=(5, 23)),
]


def mark_slow(runs: list[Any], but: tuple[int, ...]) -> list[Any]:
    """Marks all but those at these places."""
    marks = [() if at in but else pytest.mark.slow for at in range(len(runs))]
    return [pytest.param(run, marks=mark, id=str(run)) for run, mark in zip(runs, marks, strict=True)]


@pytest.mark.parametrize("case", mark_slow(DELAYED, but=(0, 3)))
def test_clipping_by_an_earlier_global_norm_equals_a_serial_loop(case: Case) -> None:
    clipped = replace(case, clip_grad_norm=0.05, clip="delayed_global")
    check(clipped, run(clipped))


@pytest.mark.processes
@pytest.mark.slow
def test_processes_clip_to_the_bit_as_one_does() -> None:
    case = phased("1f1b/2:4,pipedream", (1, 1), epochs=3, evaluate_at=(7,), clip_grad_norm=0.05, clip="delayed_global")
    cases.check_processes(2, [case])  # with more, gloo adds up in another order


@pytest.mark.slow
def test_a_run_with_delayed_norms_goes_on_to_the_bit(tmp_path: Path) -> None:
    case = phased(
        "1f1b/2:12,pipedream", (1, 1, 1), evaluate_at=(), clip_grad_norm=0.05, clip="delayed_global", epochs=7
    )
    cases.check_resumed(case, tmp_path, (5, 12, 18, 24))


def profile_of(model: nn.Module, sample: Tensor) -> pd.Profile:
    """Returns a profile that knows the layers; nothing is timed."""
    graph = pd.capture.capture(model, (sample,)).graph
    return pd.Profile("untimed", graph, (pd.LayerProfile(1.0, 2.0, 8, 8),) * len(graph.layers), 1)


def cut(model: nn.Module, sample: Tensor, cuts: tuple[int, ...], replicas: tuple[int, ...]) -> pd.Plan:
    """Returns a plan that may part tied layers."""
    profile = profile_of(model, sample).without_tied_groups()
    return manual_plan(profile, pd.Cluster.flat(sum(replicas)), cuts, replicas)


def plain_scaled(
    model: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    loss: Any,
    scaler: torch.amp.GradScaler,
    *,
    parts: int = 2,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
) -> int:
    """Trains in a loop with torch's scaler; returns how many updates it left out."""
    optimizer, skips = OPTIMIZERS["sgd"](list(model.named_parameters())), 0
    for x, y in batches:
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                part = loss(model(xs), ys) / parts
            scaler.scale(part).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skips += scaler.get_scale() < before
    return skips


PLANS = [
    pd.Plan.uniform(1),
    pd.Plan.uniform(4),
    replace(pd.Plan.uniform(4), in_flight=(8, 5, 2, 1)),
    replace(pd.Plan.uniform(2, replicas=(2, 2)), update_delay=(1, 0), in_flight=(4, 1)),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.config} {plan.in_flight}")
@pytest.mark.parametrize(("name", "parts"), [("pipedream", None), ("pipedream_vertical_sync", None), ("2bw", 8)])
def test_the_norm_is_the_newest_that_nobody_has_to_wait_for(plan: pd.Plan, name: str, parts: int | None) -> None:
    schedule = pd.schedules.build(name, plan, parts)
    delay = norm_delay(schedule)
    # Without messages' time and with any compute: an update never waits for the norms of the one so many before it.
    for forward_s, backward_s in ((1.0, 2.0), (3.0, 0.5), (1.0, 0.01)):
        timed = replace(plan, stages=tuple(replace(s, forward_s=forward_s, backward_s=backward_s) for s in plan.stages))
        program = pd.lower(pd.schedules.build(name, timed, parts))
        spans = simulate(program, costs(timed, split=program.microbatches), 12 * program.cycle).work()
        begins: dict[int, list[float]] = {}
        for span in spans:
            if span.kind == "U":
                begins.setdefault(span.index, []).append(span.start_s)
        assert all(max(begins[n - delay]) <= min(begins[n]) for n in begins if n > delay)
    # And no newer one: an input stage's last forward for update n comes before its update n - D + 1.
    if len(plan.stages) > 1:
        ops = [op for op, _ in zip(schedule.order(0), range(400), strict=False)]
        late = [
            op.index
            for op in ops
            if op.kind is Kind.UPDATE and op.index >= 2 * delay and _last_forward(schedule, op.index + delay - 1) in ops
            and ops.index(_last_forward(schedule, op.index + delay - 1)) < ops.index(op)
        ]  # fmt: skip
        assert late
    pd.verify(pd.lower(replace(schedule, couples_updates=True, norm_delay=delay)))


def _last_forward(schedule: Any, update: int) -> Op:
    members = schedule.updates.members(0, update)
    last = [k for k in members if schedule.placement.replica(0, k) == 0][-1]
    return Op(Kind.FORWARD, 0, last, 0)


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


@pytest.mark.parametrize("case", [*mark_slow(TIED, but=(0, 4, 6, 10, 12)), *mark_slow(LATE_TIED, but=())])
def test_weights_tied_across_stages_train_as_in_one_process(case: Case) -> None:
    check_tied(case, run(case))


def test_the_two_gradients_of_a_tied_weight_matter() -> None:
    case = replace(TIED[1], epochs=2)
    outcome = run(case)
    with pytest.raises(AssertionError):
        check_tied(replace(case, clip_grad_norm=None), outcome)
    animal = zoo.make("tied")
    animal.model[3].head.weight = nn.Parameter(animal.model[0].table.weight.detach().clone())
    untied = replace(case.training(), model=animal.model).loop()
    assert abs(untied.losses[7] - outcome.losses[7]) > 1e-4


IN_PROCESSES = {2: [TIED[2], LATE_TIED[1], *TIED[8:13], *TIED[14:]], 3: [TIED[3]], 5: [LATE_TIED[2]]}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, pytest.param(5, marks=pytest.mark.long)])
def test_processes_keep_tied_weights_equal(workers: int, tmp_path: Path) -> None:
    in_team = lambda *how: processes.team(workers).results(run, *how)[0]  # noqa: E731
    for case in IN_PROCESSES[workers]:
        check_tied(case, cases.check_resumed(case, tmp_path / str(case), (5, 10), in_team))


@pytest.mark.slow
def test_tied_weights_go_on_from_a_checkpoint_of_any_plan(tmp_path: Path) -> None:
    apart, together = tied("1f1b"), tied("1f1b", ())
    whole = cases.check_resumed(apart, tmp_path / "apart", (5, 10))
    run(together, tmp_path / "together", None, (10,))
    for case, folder in ((together, tmp_path / "apart" / "whole"), (apart, tmp_path / "together")):
        rest = run(case, resume=folder)
        assert_near(rest.state, whole.state, 1e-10)
        assert_near(rest.ema, whole.ema, 1e-10)


@pytest.mark.parametrize("case", mark_slow([TIED[at] for at in (8, 12, 13, 14, 15)], but=(0,)))
def test_workers_with_several_stages_go_on_with_tied_weights(case: Case, tmp_path: Path) -> None:
    cases.check_resumed(case, tmp_path, (5, 10))


def test_a_plan_that_parts_ties_holds_for_the_methods_that_can_train_it() -> None:
    profile = profile_of(zoo.make("tied").model, zoo.make("tied").batches[0][0])
    plan = pd.plan(profile, pd.Cluster.flat(2), schedule="1f1b", cuts=(2,), shape="1-1")
    assert plan.config == "1-1"
    assert check_plan(plan, profile=profile).plan.stages[0].last == 2
    with pytest.raises(
        pd.errors.PlanError,
        match=r"layers '0' and '3' share a parameter .* untie the weight, or choose .* pipedream_2bw",
    ):
        check_plan(plan, profile=profile, schedule="pipedream")
    with pytest.raises(
        pd.errors.PlanError, match=r"share a parameter .*a method whose stages all make the same updates"
    ):
        pd.plan(profile, pd.Cluster.flat(2), schedule="pipedream", cuts=(2,), shape="1-1")


@pytest.mark.parametrize("case", [tied("1f1b", epochs=1), tied("chimera", None, stages=2, epochs=1)], ids=str)
def test_a_state_dict_reaches_every_holder(case: Case) -> None:
    """Under Chimera the first rank has the second replica of the last stage."""
    training = replace(case.training(), evaluate_at=())
    model = training.make_model()
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})
    with training.make_pipeline() as pipeline:
        pipeline.load_state_dict(model.state_dict())
        list(pipeline.train(training.data))
        assert_near(pipeline.state_dict(), training.loop(model=model).state, 1e-10)


SHARE = r"share '0.table.weight' \(stages 0, 3\), and was asked to train by "
LATE_CLIP = {"clip_grad_norm": 1.0, "clip": "delayed_global", "microbatches": 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "pipedream"}, f"{SHARE}'pipedream', whose stages update at different.* pipedream_2bw"),
        ({"schedule": "paci"}, f"{SHARE}'paci', whose stages update at different times.* pipedream_2bw"),
        ({"phases": "1f1b/4:5,pipedream"}, "'pipedream', whose stages update at different times"),
        ({"schedule": "1f1b", "clip_grad_norm": 1.0, "clip": "local"}, "each holder would clip"),
        ({"schedule": "2bw"} | LATE_CLIP, "each holder would clip"),
        ({"schedule": "1f1b"}, "share one storage under different parameters"),
    ],
    ids=str,
)
def test_tied_weights_that_cannot_be_kept_equal_are_refused(options: dict[str, Any], words: str) -> None:
    animal = zoo.make("tied")
    plan, is_view = zoo.plan_of(animal, 4), "one storage" in words
    if is_view:
        animal.model[3].head.weight = nn.Parameter(animal.model[0].table.weight.data.view(9, 8))
    with pytest.raises(pd.errors.PlanError if is_view else pd.errors.ScheduleError, match=words):
        make_pipeline(animal, plan, **options)


class TrapTable(zoo.Positions):
    """Gives the first stage alone a gradient that is not a number, for sentences that begin with a given word."""

    def forward(self, tokens: Tensor) -> Tensor:
        output = super().forward(tokens)
        if self.training and len(tokens) and torch.equal(tokens[0], zoo.make("tied").batches[1][0][0]):
            output.register_hook(lambda gradient: gradient * float("nan"))
        return output


def test_holders_without_a_flush_skip_an_update_together() -> None:
    animal = zoo.make("tied")
    animal.model[0].__class__ = TrapTable
    with make_pipeline(
        animal, LATE_TIED[0].plan(), schedule="pipedream_2bw", microbatches=4, on_nan="skip",
        optimizer=OPTIMIZERS["adamw"], seed=3,
    ) as pipeline:  # fmt: skip
        losses = [done.loss for done in pipeline.train(Fresh(animal.batches), epochs=3)]
        assert pipeline.skipped_updates() == (3,) * 4
        handles = [state.versions.handles for state in stage_states(pipeline)]
        copies = [named["0.table.weight"] for named in handles if "0.table.weight" in named]
    assert torch.equal(*copies)
    assert torch.isfinite(copies[0]).all()
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_profiled_model_with_tied_weights_gets_pipelines_that_train() -> None:
    """By all searches; each holder counts the bytes, and the sum takes time in the simulation."""
    animal = zoo.make("tied")
    profile = pd.profile(animal.model, (animal.batches[0][0],), runs=1, device="meta")
    ((names, layers, size, trained),) = [astuple(tied) for tied in profile.tied]
    assert (names, layers, size, trained) == (("0.table.weight",), (0, 3), 9 * 8 * 8, True)
    rows = tuple(replace(layer, forward_s=1.0, backward_s=2.0) for layer in profile.layers)
    profile = replace(profile, layers=rows)
    cluster = pd.Cluster.flat(2, 1e9)
    searches: list[tuple[str, dict[str, Any]]] = [
        ("1f1b", {"shape": "pipeline"}), ("gpipe", {"shape": "straight"}), ("2bw", {"shape": "1-1"}),
        ("auto", {"shape": "pipeline"}), ("interleaved_1f1b", {}), ("zbv", {}), ("2bw", {"cuts": ("2",)}),
    ]  # fmt: skip
    for schedule, how in searches:
        plan = pd.plan(profile, cluster, schedule=schedule, microbatches=4, **how)
        (tied,) = plan.tied_weights
        assert (tied.names, tied.stages) == (("0.table.weight",), (0, len(plan.stages) - 1))
        assert sum(stage.parameter_bytes for stage in plan.stages) == profile.parameter_bytes + size
        assert "tied: '0.table.weight' (stages 0," in str(plan)
        assert pd.Plan.from_json(plan.to_json()) == plan
        slow = plan.on(pd.Cluster.flat(2, 1e9, 10.0))  # with messages of 10 s each
        free = replace(slow, tied_weights=())
        if schedule == "gpipe":
            assert score(slow).period_s == pytest.approx(score(free).period_s + slow.costs.tied_sums_s[0])
    assert check_plan(pd.plan(profile, cluster, schedule="2bw", shape="pipeline", microbatches=4), profile=profile)
    whole_plan = pd.plan(profile, cluster, schedule="pipedream", shape="pipeline")
    assert (len(whole_plan.stages), whole_plan.tied_weights) == (1, ())
    assert "'0' and '3' share '0.table.weight' and stay in one stage" in whole_plan.note
    assert (
        "untie the weight, or choose a method whose stages all make the same updates: pipedream_2bw" in whole_plan.note
    )
    with pytest.raises(
        pd.errors.PlanError, match=r"at 0 places; .* layers '0' and '3' share '0.table.weight' and stay"
    ):
        pd.plan(profile, cluster, schedule="pipedream", shape="straight")
    two_bw = pd.plan(profile, pd.Cluster.flat(4, 1e9), strategy="2bw")
    assert two_bw.tied_weights or len(two_bw.stages) == 1


def test_tied_weights_are_found_by_the_names_that_layers_list() -> None:
    """For layers that are no modules of the model."""
    model = zoo.make("tied").model
    names = (("0.table.weight", "0.places"), ("1.linear.weight",), ("0.table.weight", "3.head.bias"))
    graph = pd.LayerGraph.chain(
        tuple(pd.Layer(f"part{i}", "Part", parameters) for i, parameters in enumerate(names)), ((0, 2),)
    )
    (tied,) = find_tied_weights(model, graph, pd.Plan.uniform(3).stages)
    assert (tied.names, tied.stages, tied.parameter_bytes) == (("0.table.weight",), (0, 2), 9 * 8 * 8)
    inseparable = replace(graph, inseparable=graph.ties)
    with pytest.raises(pd.errors.PlanError, match=r"\(layers 'part0', 'part2'\); keep these layers in one stage"):
        find_tied_weights(model, inseparable, pd.Plan.uniform(3).stages)
    model[0].table.weight.requires_grad_(False)
    assert find_tied_weights(model, graph, pd.Plan.uniform(3).stages) == ()


def skip(self: Any, tokens: Tensor) -> Tensor:
    """No chain of modules: a skip connection, and the table of words is read once more outside of its module."""
    x = self.words(tokens)
    x = self.norm(x + torch.tanh(self.middle(x)))
    return F.linear(x, self.words.weight).transpose(1, 2)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "2bw"])
def test_a_model_that_runs_by_its_own_forward_is_cut_between_tied_layers(schedule: str) -> None:
    torch.manual_seed(5)
    parts = {"words": nn.Embedding(9, 8), "middle": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}
    model, batches = Built(skip, **parts).double(), zoo.make("tied").batches
    profile = pd.profile(model, (batches[0][0],), runs=1, warmup=0)
    plan = pd.plan(profile, pd.Cluster.flat(2), schedule=schedule, shape="1-1", microbatches=2)
    assert [(tied.names, tied.stages) for tied in plan.tied_weights] == [(("words.weight",), (0, 1))]
    reads = Reads(lambda s, k: max(0, k // 2 - (schedule == "2bw")))
    sgd = partial(torch.optim.SGD, lr=0.5)
    training = Training(model=model, data=batches, loss=F.cross_entropy, optimizer=sgd, plan=plan, epochs=3)
    training.check(reads=reads)


def normed(running_mean: Tensor | None = None) -> nn.Module:
    """Returns a linear layer and a norm, whose running statistics may be another one's."""
    norm = nn.BatchNorm1d(6)
    norm._buffers["running_mean"] = norm.running_mean if running_mean is None else running_mean
    return Built(lambda self, x: torch.tanh(self.norm(self.linear(x))), linear=nn.Linear(6, 6), norm=norm)


@pytest.mark.parametrize("shares", ["module", "statistics"])
def test_state_that_two_stages_would_move_is_refused_where_it_is_planned(shares: str) -> None:
    first = nn.BatchNorm1d(6, affine=False) if shares == "module" else normed()
    second = first if shares == "module" else normed(first.norm.running_mean)
    model = nn.Sequential(first, nn.Linear(6, 6), second, nn.Linear(6, 3))
    profile = profile_of(model, torch.randn(4, 6))
    with pytest.raises(
        pd.errors.PlanError, match=r"share a module with buffers, running statistics, .*; cut at one of \[3\]"
    ):
        pd.plan(profile, pd.Cluster.flat(2), schedule="1f1b", cuts=(2,), shape="1-1")
    free = replace(profile, graph=replace(profile.graph, ties=(), inseparable=()))  # made without the model
    plan = pd.plan(free, pd.Cluster.flat(2), schedule="1f1b", cuts=(2,), shape="1-1")
    with pytest.raises(pd.errors.PlanError, match="running statistics, which each stage would change by itself"):
        pd.Pipeline(model, plan, schedule="1f1b", loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


def train_frozen(is_tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Trains a model whose table is frozen, by a method that does not flush; the output layer shares it, or has it."""
    animal = zoo.make("tied")
    if not is_tied:
        animal.model[3].head.weight = nn.Parameter(animal.model[0].table.weight.detach().clone())
    for layer in (animal.model[0].table, animal.model[3].head):
        layer.weight.requires_grad_(False)
    with make_pipeline(animal, schedule="pipedream", seed=3) as pipeline:
        losses = [done.loss for done in pipeline.train(Fresh(animal.batches), epochs=2)]
        return losses, pipeline.state_dict()


def test_a_frozen_weight_that_stages_share_is_no_coupling() -> None:
    losses, state = train_frozen(True)
    expected, values = train_frozen(False)
    assert losses == expected
    assert all(torch.equal(state[name], value) for name, value in values.items())


def spring_trap(self: Any, x: Tensor) -> Tensor:
    """A linear layer whose own gradient is not a number where an input is marked; nothing else notices."""
    out = self.inner(x.clamp(max=3.0))
    return out + torch.sqrt(self.scale * 0.0) if bool((x > 50).any()) else out


def trapped() -> nn.Module:
    """Returns a model of three stages that has the trap in its second one."""
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
    """Returns a plan of the trapped model: three stages, unless the method wants more."""
    cuts, replicas, order = SHARED.get(schedule, ((2, 3), (1, 1, 1), ()))
    return replace(cut(trapped(), marked(())[0][0], cuts, replicas), worker_order=order)


def trap(schedule: str, bad: tuple[int, ...] = (3, 7, 11), plan: pd.Plan | None = None, **options: Any) -> Training:
    """Returns a training that skips updates whose gradients are not finite."""
    data, plan = options.pop("data", None) or marked(bad), plan or trap_plan(schedule)
    how = {"schedule": "" if "phases" in options else schedule, "on_nan": "skip"} | BY_SGD | options
    return Training(model=trapped, data=data, plan=plan, **how)


@pytest.mark.parametrize(
    ("schedule", "late", "m"),
    [
        ("1f1b", (0, 0, 0), 3),
        pytest.param("gpipe", (0, 0, 0), 3, marks=pytest.mark.slow),
        ("pipedream", (2, 1, 0), 1),
        ("pipedream_2bw", (1, 1, 1), 3),
    ],
)
def test_updates_that_are_not_finite_are_skipped_as_the_method_can(schedule: str, late: Any, m: int) -> None:
    training = trap(schedule, microbatches=m if m > 1 else None)
    trained = training.check(reads=Reads(lambda s, k: max(0, k // m - late[s])))
    # The trap is in the middle stage; a loss that is not a number spoils all of them.
    assert trained.skipped == ((3, 3, 3) if late == (0, 0, 0) else (1, 3, 1))
    assert [number for number, loss in trained.losses.items() if loss != loss] == [11]


@pytest.mark.parametrize(
    ("schedule", "replicas", "late"),
    [("1f1b", (1, 1), (0, 0)), ("pipedream", (2, 2), (1, 0)), ("pipedream", (1, 1, 1), (2, 1, 0))],
)
def test_the_schedule_counts_a_skipped_update_and_the_average_leaves_it_out(
    schedule: str, replicas: tuple[int, ...], late: tuple[int, ...]
) -> None:
    batches = marked((0, 5, 9, 13), count=19)  # the very first update is skipped, the last round of two is not full
    plan, m = cut(trapped(), batches[1][0], (2, 3)[: len(replicas) - 1], replicas), 3 if schedule == "1f1b" else None
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7)
    training = trap(schedule, data=batches, plan=plan, microbatches=m, ema=0.9, scheduler=scheduler)
    trained = training.check(reads=Reads(lambda s, k: max(0, k // (m or replicas[0]) - late[s])))
    assert min(trained.skipped) > 0


@pytest.mark.parametrize(
    "schedule",
    ["interleaved_1f1b", *(pytest.param(n, marks=pytest.mark.slow) for n in ("zbv", "chimera")), "roundpipe"],
)
def test_stages_of_one_worker_skip_and_clip_together(schedule: str) -> None:
    training = trap(schedule, microbatches=4)
    free = training.check(reads=Reads(lambda s, k: k // 4))
    clipped = replace(training, clip_grad_norm=0.05).check(reads=Reads(lambda s, k: k // 4))
    assert free.skipped == clipped.skipped == (3,) * len(trap_plan(schedule).stages)
    assert not torch.allclose(clipped.state["0.weight"], free.state["0.weight"], rtol=1e-3)


@pytest.mark.slow
def test_methods_of_several_stages_a_worker_take_turns() -> None:
    phases = "interleaved_1f1b/4:9,breadth_first/4"
    trained = trap("interleaved_1f1b", phases=phases, clip_grad_norm=0.05).check()
    assert trained.skipped == (3, 3, 3, 3)


def train_each_trap(schedules: tuple[str, ...]) -> list[Trained]:
    """Trains by one method after the other."""
    return [trap(schedule).pipeline() for schedule in schedules]


@pytest.mark.processes
@pytest.mark.slow
def test_processes_skip_what_one_does() -> None:
    for schedules, workers in ((("1f1b", "pipedream"), 3), (("interleaved_1f1b", "chimera"), 2)):
        trained = processes.team(workers).results(train_each_trap, schedules)[0]
        for alone, together in zip(train_each_trap(schedules), trained, strict=True):
            assert_equal(together, alone)


@pytest.mark.slow
def test_a_loss_scale_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def go_on(resume: bool) -> tuple[dict[str, Tensor], tuple[int, ...], float]:
        animal = zoo.make("mlp", torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
        with make_pipeline(animal, schedule="1f1b", microbatches=2, loss=steep, grad_scaler=scaler) as pipeline:
            if resume:
                pipeline.load(tmp_path)
                assert pipeline.skipped_updates() > (0, 0)
            for done in pipeline.train(Fresh(animal.batches), epochs=4 - pipeline.position[0]):
                if done.number == 6 and not resume:
                    pipeline.save(tmp_path)
            scale = stage_states(pipeline)[0].optimizer.scale
            return pipeline.state_dict(), pipeline.skipped_updates(), scale

    whole, rest = go_on(False), go_on(True)
    assert rest[1:] == whole[1:]
    assert all(torch.equal(rest[0][name], value) for name, value in whole[0].items())


def test_a_loss_scale_that_is_asked_for_is_not_the_checkpoints(tmp_path: Path) -> None:
    scales = []
    for scaler in (1024.0, 8.0):
        with make_pipeline("mlp", schedule="1f1b", microbatches=2, grad_scaler=scaler) as pipeline:
            if scales:
                pipeline.load(tmp_path)
            else:
                pipeline.save(tmp_path)
            scales.append(stage_states(pipeline)[0].optimizer.scale)
    assert scales == [1024.0, 8.0]


def test_a_loss_that_is_not_a_number_is_an_error_unless_said() -> None:
    with pytest.raises(pd.errors.WorkerError, match="the loss of minibatch 11 is nan"):
        trap("1f1b", (11,), on_nan="error").pipeline()


def steeply(output: Tensor, targets: Tensor) -> Tensor:
    """A loss with large gradients."""
    return F.cross_entropy(output, targets) * 50


def steep(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return steeply(output, batch[1])


@pytest.mark.parametrize(
    ("schedule", "clip"),
    [
        ("1f1b", 0.05),
        ("zb_h1", 0.05),  # a backward in two halves
        pytest.param("naive", None, marks=pytest.mark.slow),
        pytest.param("interleaved_1f1b", 0.05, marks=pytest.mark.slow),
        pytest.param("zbv", None, marks=pytest.mark.slow),
    ],
)
def test_a_changing_loss_scale_is_torchs(schedule: str, clip: float | None) -> None:
    # So large that the first gradients overflow; it grows until they do again.
    scaler = {"init_scale": 2.0**126, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}
    batches = [(x.float(), y) for x, y in marked((), count=24, samples=8)]
    plain, plan = trapped().float(), trap_plan(schedule)
    how = {"clip_grad_norm": clip, "grad_scaler": torch.amp.GradScaler("cpu", **scaler), "loss": steep}
    with pd.Pipeline(trapped().float(), plan, schedule=schedule, microbatches=2, **BY_SGD | how) as pipeline:
        list(pipeline.train(Fresh(batches)))
        state, skipped = pipeline.state_dict(), pipeline.skipped_updates()
        scales = {state.optimizer.scale for state in stage_states(pipeline)}
    reference_scaler = torch.amp.GradScaler("cpu", **scaler)
    skips = plain_scaled(plain, batches, steeply, reference_scaler, clip=clip)
    assert scales == {reference_scaler.get_scale()}
    assert skipped == (skips,) * len(plan.stages)
    assert 0 < skips < 20
    assert_near(state, dict(plain.state_dict()), 1e-5)


def many_samples(count: int = 4) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], pd.Plan]:
    """Returns a small model, minibatches of 2048 samples of one class, and a plan of two stages."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        batches = [(torch.randn(2048, 6), torch.zeros(2048).long()) for _ in range(count)]
    return model, batches, cut(model, batches[0][0], (1,), (1, 1))


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
        list(pipeline.train(Fresh(batches)))
        skipped, scale = pipeline.skipped_updates(), stage_states(pipeline)[0].optimizer.scale
        state = pipeline.state_dict()
    if not isinstance(scaler, torch.amp.GradScaler):
        assert skipped == (0, 0)
        return
    reference_scaler = torch.amp.GradScaler("cpu", init_scale=scaler.get_scale())
    skips = plain_scaled(plain, batches, loss, reference_scaler, autocast=torch.float16)
    assert (skipped, scale) == ((skips, skips), reference_scaler.get_scale())
    assert_near(state, dict(plain.state_dict()), 1e-3)


def test_a_constant_scale_that_leaves_out_all_updates_is_told() -> None:
    model, batches, plan = many_samples(9)
    how = {"loss": steep, "autocast": torch.float16, "grad_scaler": 2.0**24}
    pipeline = pd.Pipeline(model, plan, schedule="1f1b", microbatches=2, **BY_SGD | how)
    with pipeline, pytest.warns(UserWarning, match=r"8 updates in a row.*scale 1.67772e\+07; use a smaller one"):
        list(pipeline.train(Fresh(batches)))
    assert pipeline.skipped_updates() == (9, 9)


def test_a_constant_loss_scale_changes_nothing_but_rounding() -> None:
    without, with_scale = (
        trap("pipedream", (), options=options).pipeline() for options in ({}, {"grad_scaler": 1024.0})
    )
    assert_equal(with_scale, without, 1e-13)


def test_one_stage_has_a_changing_loss_scale_under_any_method() -> None:
    scaler_options = {"init_scale": 2.0**126, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}
    batches = [(x.float(), y) for x, y in marked((), count=24, samples=8)]
    profile = pd.Profile.of_chain((pd.LayerProfile(1.0, 2.0, 8, 8),) * 5)
    scaler = torch.amp.GradScaler("cpu", **scaler_options)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 2})
    with pd.Pipeline(
        trapped().float(), manual_plan(profile.without_tied_groups(), pd.Cluster.flat(1), (), (1,)),
        schedule="pipedream", loss=steep, optimizer=OPTIMIZERS["sgd"], grad_scaler=scaler, sample=(batches[0][0],),
    ) as pipeline:  # fmt: skip
        list(pipeline.train(Fresh(batches)))
        state, skipped = pipeline.state_dict(), pipeline.skipped_updates()
        scale = stage_states(pipeline)[0].optimizer.scale
    assert scaler.get_scale() == 2.0**126
    plain = trapped().float()
    skips = plain_scaled(plain, batches, steeply, scaler, parts=1)
    assert (skipped, scale) == ((skips,), scaler.get_scale())
    assert 0 < skips < 20
    assert_near(state, dict(plain.state_dict()), 1e-5)


LATE = {"schedule": "pipedream", "clip_grad_norm": 1.0}
REFUSED = [
    ({"schedule": "pipedream", "grad_scaler": torch.amp.GradScaler("cpu")}, "gradients of the old scale"),
    *(
        ({"grad_scaler": scaler}, "give a torch.amp.GradScaler or a positive number")
        for scaler in ("dynamic", True, float("inf"), float("nan"), 0)
    ),
    ({"on_nan": "ignore"}, "on_nan='ignore' is not known; choose one of error, continue, skip"),
    *(
        ({"clip_grad_norm": limit}, r"clip_grad_norm=.* was asked for; give a number between 0 and inf")
        for limit in (-1.0, 0.0, float("nan"), float("inf"))  # a negative one would train uphill
    ),
    *(({"ema": decay}, r"ema=.* was asked for; give a number between 0 and 1") for decay in (0.0, 1.0, 2.0)),
    (LATE, "does not flush.*Use clip='delayed_global'"),
    (LATE | {"plan": (2, 1), "clip": "delayed_global"}, "an update holds 2, 1 microbatches"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else None)
def test_scales_policies_and_clipping_without_meaning_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(pd.errors.ScheduleError, match=words):
        make_pipeline("mlp", **{"schedule": "1f1b"} | options)

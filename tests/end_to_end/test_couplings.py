"""Couplings of stages beside the data: norms over all of them, gradients that are not numbers, tied weights."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import reference
import torch
import torch.nn.functional as F
import zoo
from cases import OPTIMIZERS, Fresh, assert_near
from compensated import BasisRotation
from phased_runs import Run, check, check_resumed, go
from torch import Tensor, nn

import pipedream as pd
from pipedream.capture import capture
from pipedream.core.errors import PlanError, ScheduleError, WorkerError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.coupling import norm_delay
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.op import Kind, Op
from pipedream.planner import manual_plan
from pipedream.runtime.update.tied_weights import find_tied_weights
from pipedream.schedules import build
from pipedream.simulator import costs, simulate
from pipedream.verifier import verify
from pipedream.workflows.check import check_plan
from pipedream.workflows.methods import score

DELAYED = [
    Run("pipedream", (1, 1, 1)),
    Run("pipedream", (1, 1, 1, 1), depth=(7, 4, 2, 1), optimizer="adamw"),
    Run("pipedream_2bw/3", (1, 1, 1)),
    Run("pipedream_2bw/2", (1, 1, 1), depth=(3, 2, 1)),  # the input stage holds more than one update's microbatches
    Run("pipedream", (2, 2)),
    Run("pipedream_2bw/4", (2, 1), optimizer="adamw"),
    # A flush knows the norm of the very update; the phase behind it begins with the last norm of the one before.
    Run("1f1b/2:13,pipedream:37,gpipe/3", (1, 1), evaluate_at=(5, 23)),
]


def mark_slow(runs: list[Any], but: tuple[int, ...]) -> list[Any]:
    """Marks all but those at these places."""
    marks = [() if at in but else pytest.mark.slow for at in range(len(runs))]
    return [pytest.param(run, marks=mark, id=str(run)) for run, mark in zip(runs, marks, strict=True)]


@pytest.mark.parametrize("run", mark_slow(DELAYED, but=(0, 3)))
def test_clipping_by_an_earlier_global_norm_equals_a_serial_loop(run: Run) -> None:
    clipped = replace(run, clip=0.05, clip_by="delayed_global")
    check(clipped, go(clipped))


@pytest.mark.processes
@pytest.mark.slow
def test_processes_clip_to_the_bit_as_one_does() -> None:
    run = Run("1f1b/2:4,pipedream", (1, 1), epochs=3, evaluate_at=(7,), clip=0.05, clip_by="delayed_global")
    alone = go(run)
    outcome = processes.team(2).results(go, run)[0]  # of more, gloo adds up in another order
    assert outcome.losses == alone.losses
    assert all(torch.equal(outcome.state[name], value) for name, value in alone.state.items())


@pytest.mark.slow
def test_a_run_with_delayed_norms_goes_on_to_the_bit(tmp_path: Path) -> None:
    run = Run("1f1b/2:12,pipedream", (1, 1, 1), evaluate_at=(), clip=0.05, clip_by="delayed_global", epochs=7)
    check_resumed(run, tmp_path, go, save_at=(5, 12, 18, 24))


def profile_of(model: nn.Module, sample: Tensor) -> Profile:
    """Returns a profile that knows the layers; nothing is timed."""
    graph = capture(model, (sample,)).graph
    return Profile("untimed", graph, (LayerProfile(1.0, 2.0, 8, 8),) * len(graph.layers), 1)


def cut(model: nn.Module, sample: Tensor, cuts: tuple[int, ...], replicas: tuple[int, ...]) -> Plan:
    """Returns a plan that may part tied layers."""
    profile = profile_of(model, sample).without_tied_groups()
    return manual_plan(profile, Cluster.flat(sum(replicas)), cuts, replicas)


def stage_states(pipeline: pd.Pipeline) -> list[Any]:
    """Returns those of this process."""
    return [state for worker in pipeline._session.local.workers for state in worker.stage_states.values()]


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
    Plan.uniform(1),
    Plan.uniform(4),
    replace(Plan.uniform(4), in_flight=(8, 5, 2, 1)),
    replace(Plan.uniform(2, replicas=(2, 2)), update_delay=(1, 0), in_flight=(4, 1)),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.config} {plan.in_flight}")
@pytest.mark.parametrize(("name", "parts"), [("pipedream", None), ("pipedream_vertical_sync", None), ("2bw", 8)])
def test_the_norm_is_the_newest_that_nobody_has_to_wait_for(plan: Plan, name: str, parts: int | None) -> None:
    schedule = build(name, plan, parts)
    delay = norm_delay(schedule)
    # Without messages' time and with any compute: an update never waits for the norms of the one so many before it.
    for forward_s, backward_s in ((1.0, 2.0), (3.0, 0.5), (1.0, 0.01)):
        timed = replace(plan, stages=tuple(replace(s, forward_s=forward_s, backward_s=backward_s) for s in plan.stages))
        program = lower(build(name, timed, parts))
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
    verify(lower(replace(schedule, couples_updates=True, norm_delay=delay)))


def _last_forward(schedule: Any, update: int) -> Op:
    members = schedule.updates.members(0, update)
    last = [k for k in members if schedule.placement.replica(0, k) == 0][-1]
    return Op(Kind.FORWARD, 0, last, 0)


class Table(nn.Module):
    """Words and places, as in the zoo's transformer."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(8, width) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places[: tokens.shape[1]]

    def reset_parameters(self) -> None:
        """Gives the places their values; the words have their own."""
        nn.init.normal_(self.places, std=0.5)


class Residual(nn.Module):
    """A layer with a way around it, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


class Last(nn.Module):
    """The output layer, as a loss over classes wants it."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.head = nn.Linear(table.words.embedding_dim, table.words.num_embeddings)
        self.head.weight = table.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).transpose(1, 2)


def tied_model() -> nn.Module:
    """Returns a model whose embedding and output layer are one matrix."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        table = Table(9, 8)
        return nn.Sequential(table, Residual(8), Residual(8), Last(table)).double()


def sentences() -> list[tuple[Tensor, Tensor]]:
    """Returns one epoch: minibatches of 8 sentences, the last of 3."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(9, (27, 6), generator=generator)
    return [(tokens[i : i + 8], tokens[i : i + 8].roll(-1, 1)) for i in range(0, 27, 8)]


def token_sums(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Returns the sum over tokens and their number."""
    return -output.log_softmax(1).gather(1, targets.unsqueeze(1)).sum(), float(targets.numel())


@dataclass(frozen=True)
class Tied:
    """A run of the tied model; cuts are before these layers, or the method's own on so many workers."""

    schedule: str
    cuts: tuple[int, ...] = (1, 2, 3)
    replicas: tuple[int, ...] = (1, 1, 1, 1)
    clip: float | None = None
    optimizer: str = "adamw"
    epochs: int = 3
    workers: int = 0
    parts: int | None = 4
    rotates: bool = False

    def plan(self) -> Plan:
        """Returns the plan; nothing is timed."""
        sample = sentences()[0][0]
        if self.workers:
            cluster = Cluster.flat(self.workers)
            profile = profile_of(tied_model(), sample)
            return pd.plan(profile, cluster, schedule=self.schedule, microbatches=self.parts)
        return cut(tied_model(), sample, self.cuts, self.replicas)


def train_tied(
    run: Tied, resume: Path | None = None, save: Path | None = None, start: dict[str, Tensor] | None = None
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], bool, list[int]]:
    """Returns losses, the state, the average of the weights, whether all copies here are equal, and the drains."""
    model = tied_model()
    with pd.Pipeline(
        model, run.plan(), schedule=run.schedule, microbatches=run.parts, loss=F.cross_entropy, clip_grad_norm=run.clip,
        optimizer=OPTIMIZERS[run.optimizer], ema=0.9, seed=3, check=False,
        compensation="basis_rotation:2:one_sided" if run.rotates else None,
    ) as pipeline:  # fmt: skip
        if resume is not None:
            pipeline.load(resume)
        if start is not None:
            pipeline.load_state_dict(start)
        losses = []
        for done in pipeline.train(Fresh(sentences()), epochs=run.epochs - pipeline.position[0]):
            losses.append(done.loss)
            if save is not None and done.number + 1 == 10:
                pipeline.save(save)
            if done.number == 7:
                pipeline.evaluate(Fresh(sentences()))
        handles = [state.versions.handles for state in stage_states(pipeline)]
        copies = [named["0.words.weight"] for named in handles if "0.words.weight" in named]
        equal = all(torch.equal(copies[0], copy) for copy in copies) if copies else True
        assert model[3].head.weight is model[0].words.weight or pipeline.distributed, "the user's model stays tied"
        return losses, pipeline.state_dict(), pipeline.state_dict(ema=True), equal, pipeline.drains


def plain_tied(run: Tied, drains: list[int]) -> reference.Answer:
    """Returns what one process gives, by the method's rule: the shared weight is one parameter."""
    if run.schedule in LATE:
        model, late = tied_model(), LATE[run.schedule](run.plan())
        return reference.delayed(
            model, ["0", "1", "2", "3"], sentences() * run.epochs, token_sums, OPTIMIZERS[run.optimizer],
            stages=[[name for name, _ in model.named_parameters()]],
            phases={0: reference.Phase(lambda s, k: max(0, k - late), run.parts or 1)},
            drains=drains, seed=3, ema=0.9,
            rule=BasisRotation(lambda s: 2, sides=lambda m, n: "L" if m < n else "R") if run.rotates else None,
        )  # fmt: skip
    return reference.plain(
        tied_model(), ["0", "1", "2", "3"], sentences() * run.epochs, token_sums, OPTIMIZERS[run.optimizer],
        microbatches=4, seed=3, clip=run.clip, ema=0.9,
    )  # fmt: skip


# 2BW: w(t+1) = w(t) - lr grad f(w(t-1)); vertical sync: grad f(w(t-p+1)), both of the whole model.
LATE: dict[str, Callable[[Plan], int]] = {
    "pipedream_2bw": lambda plan: 1,
    "pipedream_vertical_sync": lambda plan: len(plan.stages) - 1,
}
LATE_TIED = [
    Tied("pipedream_2bw"),
    Tied("pipedream_2bw", cuts=(1,), replicas=(1, 1), optimizer="sgd"),
    Tied("pipedream_2bw", cuts=(1, 3), replicas=(2, 1, 2)),
    Tied("pipedream_2bw", cuts=(1, 3), replicas=(2, 1, 1), rotates=True),
    Tied("pipedream_2bw", cuts=(3,), replicas=(2, 2), optimizer="sgd", parts=6),
    Tied("pipedream_vertical_sync", cuts=(1, 3), replicas=(1, 1, 1), parts=None),
]

TIED = [
    Tied("1f1b"),
    Tied("gpipe", optimizer="sgd", clip=0.3),
    Tied("naive", cuts=(2,), replicas=(1, 1), clip=0.3),
    Tied("1f1b", cuts=(1,), replicas=(2, 1)),
    Tied("1f1b", cuts=(3,), replicas=(1, 2), optimizer="sgd", clip=0.3),
    Tied("gpipe", cuts=(2,), replicas=(3, 2)),
    Tied("zb_h1"),
    Tied("zb_h2"),
    # Several stages a worker: both ends of the model on one, or on two; with two holders of each stage, both on both.
    Tied("zbv", workers=2, clip=0.3),
    Tied("dualpipev", workers=2),
    Tied("interleaved_1f1b", workers=2),
    Tied("breadth_first", workers=2, optimizer="sgd", clip=0.3),
    Tied("chimera", workers=2),
    Tied("chimera", workers=4, clip=0.3),
    Tied("chimera_doubled", workers=2),
    Tied("roundpipe", workers=2, clip=0.3),
]


def check_tied(run: Tied, trained: tuple[list[float], dict[str, Tensor], dict[str, Tensor], bool, list[int]]) -> None:
    """Checks a run of the tied model against one process."""
    losses, state, average, equal, drains = trained
    expected = plain_tied(run, drains)
    assert losses == pytest.approx(expected.losses, rel=1e-10)
    assert_near(state, expected.state, 1e-8 if run.rotates else 1e-10)
    assert_near({name: average[name] for name in expected.ema}, expected.ema, 1e-10)
    assert torch.equal(average["3.head.weight"], average["0.words.weight"])
    assert equal


@pytest.mark.parametrize("run", mark_slow(TIED, but=(0, 4, 6, 10, 12)))
def test_weights_tied_across_stages_train_as_in_one_process(run: Tied) -> None:
    check_tied(run, train_tied(run))


@pytest.mark.slow
@pytest.mark.parametrize("run", LATE_TIED, ids=str)
def test_weights_tied_across_stages_train_as_a_serial_loop_of_late_updates(run: Tied) -> None:
    check_tied(run, train_tied(run))


def test_the_two_gradients_of_a_tied_weight_matter() -> None:
    run = replace(TIED[1], epochs=2)
    trained = train_tied(run)
    with pytest.raises(AssertionError):
        check_tied(replace(run, clip=None), trained)
    model = tied_model()
    model[3].head.weight = nn.Parameter(model[0].words.weight.detach().clone())
    untied = reference.plain(
        model, ["0", "1", "2", "3"], sentences() * run.epochs, token_sums, OPTIMIZERS[run.optimizer],
        microbatches=4, seed=3, clip=run.clip,
    )  # fmt: skip
    assert abs(untied.losses[-1] - trained[0][-1]) > 1e-4


def train_all_tied(runs: list[Tied], folder: Path, resumes: bool) -> list[Any]:
    """Trains and saves, or resumes from a checkpoint."""
    folders = [folder / str(number) for number in range(len(runs))]
    return [
        train_tied(run, path) if resumes else train_tied(run, None, path)
        for run, path in zip(runs, folders, strict=True)
    ]


IN_PROCESSES = {
    2: [replace(run, epochs=4) for run in (TIED[2], LATE_TIED[1], *(run for run in TIED if run.workers == 2))],
    3: [TIED[3]],
    5: [replace(LATE_TIED[2], epochs=4)],
}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, pytest.param(5, marks=pytest.mark.long)])
def test_processes_keep_tied_weights_equal(workers: int, tmp_path: Path) -> None:
    runs = IN_PROCESSES[workers]
    whole, rest = (
        processes.team(workers).results(train_all_tied, runs, tmp_path, resumes)[0] for resumes in (False, True)
    )
    for run, trained, resumed in zip(runs, whole, rest, strict=True):
        check_tied(run, trained)
        assert resumed[0] == trained[0][-len(resumed[0]) :]
        assert all(torch.equal(resumed[1][name], value) for name, value in trained[1].items())


@pytest.mark.slow
def test_tied_weights_go_on_from_a_checkpoint_of_any_plan(tmp_path: Path) -> None:
    run = Tied("1f1b")
    whole = train_tied(run, save=tmp_path / "apart")
    rest = train_tied(run, resume=tmp_path / "apart")
    assert rest[0] == whole[0][-len(rest[0]) :]
    assert all(torch.equal(rest[1][name], value) for name, value in whole[1].items())
    together = Tied("1f1b", cuts=(), replicas=(1,))
    check_tied(run, (whole[0], *train_tied(together, resume=tmp_path / "apart")[1:]))
    train_tied(together, save=tmp_path / "together")
    check_tied(run, (whole[0], *train_tied(run, resume=tmp_path / "together")[1:]))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=str(run), marks=() if run.clip and run.schedule == "zbv" else pytest.mark.slow)
        for run in TIED
        if run.workers and run.schedule in ("zbv", "chimera", "chimera_doubled", "roundpipe")
    ],
)
def test_workers_with_several_stages_go_on_with_tied_weights(run: Tied, tmp_path: Path) -> None:
    whole = train_tied(run, save=tmp_path)
    rest = train_tied(run, resume=tmp_path)
    assert rest[0] == whole[0][-len(rest[0]) :]
    assert all(torch.equal(rest[i][name], value) for i in (1, 2) for name, value in whole[i].items())
    assert rest[3]


def test_a_plan_that_parts_ties_holds_for_the_methods_that_can_train_it() -> None:
    profile = profile_of(tied_model(), sentences()[0][0])
    plan = pd.plan(profile, Cluster.flat(2), schedule="1f1b", cuts=(2,), shape="1-1")
    assert plan.config == "1-1"
    assert check_plan(plan, profile=profile).plan.stages[0].last == 2
    with pytest.raises(
        PlanError, match=r"layers '0' and '3' share a parameter .* untie the weight, or choose .* pipedream_2bw"
    ):
        check_plan(plan, profile=profile, schedule="pipedream")
    with pytest.raises(PlanError, match=r"share a parameter .*a method whose stages all make the same updates"):
        pd.plan(profile, Cluster.flat(2), schedule="pipedream", cuts=(2,), shape="1-1")


@pytest.mark.parametrize("run", [Tied("1f1b", epochs=1), Tied("chimera", workers=2, epochs=1)], ids=str)
def test_a_state_dict_reaches_every_holder(run: Tied) -> None:
    """Under Chimera the first rank has the second replica of the last stage."""
    start = {name: value + 0.01 for name, value in tied_model().state_dict().items()}
    trained = train_tied(run, start=start)
    model = tied_model()
    model.load_state_dict(start)
    expected = reference.plain(
        model, ["0", "1", "2", "3"], sentences(), token_sums, OPTIMIZERS["adamw"], microbatches=4, seed=3
    )
    assert_near(trained[1], expected.state, 1e-10)


def test_tied_weights_that_cannot_be_kept_equal_are_refused() -> None:
    def refuse(
        match: str, kind: type[Exception] = ScheduleError, model: Any = None, plan: Any = None, **options: Any
    ) -> None:
        with pytest.raises(kind, match=match):
            pd.Pipeline(
                model or tied_model(), plan or Tied("").plan(), loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"],
                **options,
            )  # fmt: skip

    stages = r"share '0.words.weight' \(stages 0, 3\), and was asked to train by "
    for name in ("pipedream", "paci"):
        refuse(f"{stages}'{name}', whose stages update at different times.* pipedream_2bw", schedule=name)
    refuse("'pipedream', whose stages update at different times", phases="1f1b/4:5,pipedream")
    refuse("each holder would clip", schedule="1f1b", clip_grad_norm=1.0, clip="local")
    refuse("each holder would clip", schedule="2bw", clip_grad_norm=1.0, clip="delayed_global", microbatches=4)
    viewed = tied_model()
    viewed[3].head.weight = nn.Parameter(viewed[0].words.weight.data.view(9, 8))
    refuse("share one storage under different parameters", PlanError, viewed, schedule="1f1b")


class TrapTable(Table):
    """Gives the first stage alone a gradient that is not a number, for sentences that begin with a given word."""

    def forward(self, tokens: Tensor) -> Tensor:
        output = super().forward(tokens)
        if self.training and len(tokens) and torch.equal(tokens[0], sentences()[1][0][0]):
            output.register_hook(lambda gradient: gradient * float("nan"))
        return output


def test_holders_without_a_flush_skip_an_update_together() -> None:
    model = tied_model()
    model[0].__class__ = TrapTable
    run = LATE_TIED[0]
    with pd.Pipeline(
        model, run.plan(), schedule=run.schedule, microbatches=4, loss=F.cross_entropy, on_nan="skip",
        optimizer=OPTIMIZERS["adamw"], seed=3,
    ) as pipeline:  # fmt: skip
        losses = [done.loss for done in pipeline.train(Fresh(sentences()), epochs=3)]
        assert pipeline.skipped_updates() == (3,) * 4
        handles = [state.versions.handles for state in stage_states(pipeline)]
        copies = [named["0.words.weight"] for named in handles if "0.words.weight" in named]
    assert torch.equal(*copies)
    assert torch.isfinite(copies[0]).all()
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_profiled_model_with_tied_weights_gets_pipelines_that_train() -> None:
    """By all searches; each holder counts the bytes, and the sum takes time in the simulation."""
    profile = pd.profile(tied_model(), (sentences()[0][0],), runs=1, device="meta")
    ((names, layers, size, trained),) = [astuple(tied) for tied in profile.tied]
    assert (names, layers, size, trained) == (("0.words.weight",), (0, 3), 9 * 8 * 8, True)
    rows = tuple(replace(layer, forward_s=1.0, backward_s=2.0) for layer in profile.layers)
    profile = replace(profile, layers=rows)
    cluster = Cluster.flat(2, 1e9)
    searches: list[tuple[str, dict[str, Any]]] = [
        ("1f1b", {"shape": "pipeline"}), ("gpipe", {"shape": "straight"}), ("2bw", {"shape": "1-1"}),
        ("auto", {"shape": "pipeline"}), ("interleaved_1f1b", {}), ("zbv", {}), ("2bw", {"cuts": ("2",)}),
    ]  # fmt: skip
    for schedule, how in searches:
        plan = pd.plan(profile, cluster, schedule=schedule, microbatches=4, **how)
        (tied,) = plan.tied_weights
        assert (tied.names, tied.stages) == (("0.words.weight",), (0, len(plan.stages) - 1))
        assert sum(stage.parameter_bytes for stage in plan.stages) == profile.parameter_bytes + size
        assert "tied: '0.words.weight' (stages 0," in str(plan)
        assert Plan.from_json(plan.to_json()) == plan
        slow = plan.on(Cluster.flat(2, 1e9, 10.0))  # with messages of 10 s each
        free = replace(slow, tied_weights=())
        if schedule == "gpipe":
            assert score(slow).period_s == pytest.approx(score(free).period_s + slow.costs.tied_sums_s[0])
    assert check_plan(pd.plan(profile, cluster, schedule="2bw", shape="pipeline", microbatches=4), profile=profile)
    whole_plan = pd.plan(profile, cluster, schedule="pipedream", shape="pipeline")
    assert (len(whole_plan.stages), whole_plan.tied_weights) == (1, ())
    assert "'0' and '3' share '0.words.weight' and stay in one stage" in whole_plan.note
    assert (
        "untie the weight, or choose a method whose stages all make the same updates: pipedream_2bw" in whole_plan.note
    )
    with pytest.raises(PlanError, match=r"at 0 places; .* layers '0' and '3' share '0.words.weight' and stay"):
        pd.plan(profile, cluster, schedule="pipedream", shape="straight")
    two_bw = pd.plan(profile, Cluster.flat(4, 1e9), strategy="2bw")
    assert two_bw.tied_weights or len(two_bw.stages) == 1


def test_tied_weights_are_found_by_the_names_that_layers_list() -> None:
    """For layers that are no modules of the model."""
    model = tied_model()
    names = (("0.words.weight", "0.places"), ("1.linear.weight",), ("0.words.weight", "3.head.bias"))
    graph = LayerGraph.chain(
        tuple(Layer(f"part{i}", "Part", parameters) for i, parameters in enumerate(names)), ((0, 2),)
    )
    (tied,) = find_tied_weights(model, graph, Plan.uniform(3).stages)
    assert (tied.names, tied.stages, tied.parameter_bytes) == (("0.words.weight",), (0, 2), 9 * 8 * 8)
    inseparable = replace(graph, inseparable=graph.ties)
    with pytest.raises(PlanError, match=r"\(layers 'part0', 'part2'\); keep these layers in one stage"):
        find_tied_weights(model, inseparable, Plan.uniform(3).stages)
    model[0].words.weight.requires_grad_(False)
    assert find_tied_weights(model, graph, Plan.uniform(3).stages) == ()


class Skipping(nn.Module):
    """No chain of modules: a skip connection, and the table of words is read once more outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.norm = nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = self.norm(x + torch.tanh(self.middle(x)))
        return F.linear(x, self.words.weight).transpose(1, 2)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "2bw"])
def test_a_model_that_runs_by_its_own_forward_is_cut_between_tied_layers(schedule: str) -> None:
    torch.manual_seed(5)
    model = Skipping().double()
    serial = deepcopy(model)
    profile = pd.profile(model, (sentences()[0][0],), runs=1, warmup=0)
    plan = pd.plan(profile, Cluster.flat(2), schedule=schedule, shape="1-1", microbatches=2)
    assert [(tied.names, tied.stages) for tied in plan.tied_weights] == [(("words.weight",), (0, 1))]
    sgd = partial(torch.optim.SGD, lr=0.5)
    with pd.Pipeline(model, plan, loss=F.cross_entropy, optimizer=sgd) as pipeline:
        losses = [done.loss for done in pipeline.train(Fresh(sentences()), epochs=3)]
        state = pipeline.state_dict()
    stepper, expected = sgd(serial.parameters()), []
    before = now = [p.detach().clone() for p in serial.parameters()]
    for x, y in sentences() * 3:
        read = now if schedule == "1f1b" else before
        for p, value in zip(serial.parameters(), read, strict=True):
            p.data.copy_(value)
        stepper.zero_grad()
        loss = F.cross_entropy(serial(x), y)
        loss.backward()
        for p, value in zip(serial.parameters(), now, strict=True):
            p.data.copy_(value)
        stepper.step()
        before, now = now, [p.detach().clone() for p in serial.parameters()]
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-10)
    assert_near(state, serial.state_dict(), 1e-10)


class Normed(nn.Module):
    """A linear layer and a norm, whose running statistics may be another one's."""

    def __init__(self, other: Normed | None = None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        if other is not None:
            self.norm._buffers["running_mean"] = other.norm.running_mean

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


@pytest.mark.parametrize("shares", ["module", "statistics"])
def test_state_that_two_stages_would_move_is_refused_where_it_is_planned(shares: str) -> None:
    first = nn.BatchNorm1d(6, affine=False) if shares == "module" else Normed()
    second = first if shares == "module" else Normed(first)
    model = nn.Sequential(first, nn.Linear(6, 6), second, nn.Linear(6, 3))
    profile = profile_of(model, torch.randn(4, 6))
    with pytest.raises(PlanError, match=r"share a module with buffers, running statistics, .*; cut at one of \[3\]"):
        pd.plan(profile, Cluster.flat(2), schedule="1f1b", cuts=(2,), shape="1-1")
    free = replace(profile, graph=replace(profile.graph, ties=(), inseparable=()))  # made without the model
    plan = pd.plan(free, Cluster.flat(2), schedule="1f1b", cuts=(2,), shape="1-1")
    with pytest.raises(PlanError, match="running statistics, which each stage would change by itself"):
        pd.Pipeline(model, plan, schedule="1f1b", loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


def train_frozen(is_tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Trains a model whose table is frozen, by a method that does not flush; the output layer shares it, or has it."""
    model = tied_model()
    if not is_tied:
        model[3].head.weight = nn.Parameter(model[0].words.weight.detach().clone())
    for layer in (model[0].words, model[3].head):
        layer.weight.requires_grad_(False)
    plan = Tied("", cuts=(2,), replicas=(1, 1)).plan()
    with pd.Pipeline(
        model, plan, schedule="pipedream", loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], seed=3
    ) as pipeline:
        losses = [done.loss for done in pipeline.train(Fresh(sentences()), epochs=2)]
        return losses, pipeline.state_dict()


def test_a_frozen_weight_that_stages_share_is_no_coupling() -> None:
    losses, state = train_frozen(True)
    expected, values = train_frozen(False)
    assert losses == expected
    assert all(torch.equal(state[name], value) for name, value in values.items())


class Trap(nn.Module):
    """A linear layer whose own gradient is not a number where an input is marked; nothing else notices."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 8), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x.clamp(max=3.0))
        return out + torch.sqrt(self.scale * 0.0) if bool((x > 50).any()) else out


def trapped() -> nn.Module:
    """Returns a model of three stages that has the trap in its second one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 6), nn.Identity(), Trap(), nn.Tanh(), nn.Linear(8, 3)).double()


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


SHARED = {
    "interleaved_1f1b": ((1, 2, 3), (1, 1, 1, 1), (0, 1, 0, 1)),
    "zbv": ((1, 2, 3), (1, 1, 1, 1), (0, 1, 1, 0)),
    "chimera": ((2,), (2, 2), (0, 1, 1, 0)),
    "roundpipe": ((1, 2, 3), (1, 1, 1, 1), (0, 2, 1, 0)),
}
"""Methods that put several stages on a worker: cuts, replicas, workers of the stages."""


def trap_plan(schedule: str) -> Plan:
    """Returns a plan of the trapped model: three stages, unless the method wants more."""
    cuts, replicas, order = SHARED.get(schedule, ((2, 3), (1, 1, 1), ()))
    return replace(cut(trapped(), marked(())[0][0], cuts, replicas), worker_order=order)


def train_marked(
    schedule: str, batches: list[tuple[Tensor, Tensor]], **options: Any
) -> tuple[dict[str, Tensor], tuple[int, ...], list[float]]:
    """Returns the state, the updates that each stage skipped, and the losses."""
    with pd.Pipeline(
        trapped(),
        trap_plan(schedule),
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS["sgd"],
        schedule=None if "phases" in options else schedule,
        **{"on_nan": "skip", "check": False} | options,
    ) as pipeline:
        losses = [done.loss for done in pipeline.train(Fresh(batches))]
        return pipeline.state_dict(), pipeline.skipped_updates(), losses


def train_each_marked(schedules: tuple[str, ...]) -> list[Any]:
    """Trains by one method after the other."""
    return [train_marked(schedule, marked((3, 7, 11))) for schedule in schedules]


EACH_LAYER = [["0."], ["2."], ["4."]]


def train_skipping(
    batches: list[tuple[Tensor, Tensor]],
    stages: list[list[str]],
    late: tuple[int, ...],
    *,
    together: bool,
    rounds: int = 1,
    decay: float = 1.0,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Trains in rounds, stage s by gradients at the weights late[s] updates ago. Skips updates that are not finite,
    at all stages together or each by itself: the schedule, by which the rate decays after each third update, counts
    it, the average of the weights does not.

    Returns the weights, their average, and the updates that each stage skipped.
    """
    model = trapped()
    named = [[(n, p) for n, p in model.named_parameters() if n[:2] in prefixes] for prefixes in stages]
    newest = [[(n, nn.Parameter(p.detach().clone())) for n, p in stage_parameters] for stage_parameters in named]
    average = {n: p.detach().clone() for stage_parameters in newest for n, p in stage_parameters}
    steppers = [OPTIMIZERS["sgd"](stage_parameters) for stage_parameters in newest]
    rate = steppers[0].param_groups[0]["lr"]
    versions = [[[p.detach().clone() for _, p in stage_parameters]] for stage_parameters in newest]
    skipped = [0] * len(stages)
    for begin in range(0, len(batches), rounds):
        members, gradients = batches[begin : begin + rounds], []
        for x, y in members:
            with torch.no_grad():
                for s, stage_parameters in enumerate(named):
                    for (_, p), value in zip(
                        stage_parameters, versions[s][max(0, begin // rounds - late[s])], strict=True
                    ):
                        p.copy_(value)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        means = [
            {
                n: sum(g[n] for g in gradients if n in g) / len(gradients)
                for n, _ in stage_parameters
                if any(n in g for g in gradients)
            }
            for stage_parameters in newest
        ]
        finite = [all(bool(g.isfinite().all()) for g in stage_gradients.values()) for stage_gradients in means]
        for s, stage_parameters in enumerate(newest):
            if all(finite) if together else finite[s]:
                for n, p in stage_parameters:
                    p.grad = means[s].get(n)
                steppers[s].param_groups[0]["lr"] = rate * decay ** (begin // rounds // 3) * len(members) / rounds
                steppers[s].step()
                for n, p in stage_parameters:
                    average[n].mul_(0.9).add_(p.detach(), alpha=0.1)
            else:
                skipped[s] += 1
            versions[s].append([p.detach().clone() for _, p in stage_parameters])
    return {n: p.detach() for stage_parameters in newest for n, p in stage_parameters}, average, skipped


@pytest.mark.parametrize(
    "schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow), "pipedream", "pipedream_2bw"]
)
def test_updates_that_are_not_finite_are_skipped_as_the_method_can(schedule: str) -> None:
    batches = marked((3, 7, 11))
    flushes = schedule in ("1f1b", "gpipe")
    late = {"pipedream": (2, 1, 0), "pipedream_2bw": (1, 1, 1)}.get(schedule, (0, 0, 0))
    options = {} if schedule == "pipedream" else {"microbatches": 3}
    state, skipped, losses = train_marked(schedule, batches, **options)
    expected, _, counts = train_skipping(batches, EACH_LAYER, late, together=flushes)
    assert list(skipped) == counts
    # The trap is in the middle stage; a loss that is not a number spoils all of them.
    assert counts == ([3, 3, 3] if flushes else [1, 3, 1])
    assert [number for number, loss in enumerate(losses) if loss != loss] == [11]
    assert_near(state, expected, 1e-10)


@pytest.mark.parametrize(
    ("schedule", "replicas", "late"),
    [("1f1b", (1, 1), (0, 0)), ("pipedream", (2, 2), (1, 0)), ("pipedream", (1, 1, 1), (2, 1, 0))],
)
def test_the_schedule_counts_a_skipped_update_and_the_average_leaves_it_out(
    schedule: str, replicas: tuple[int, ...], late: tuple[int, ...]
) -> None:
    batches = marked((0, 5, 9, 13), count=19)  # the very first update is skipped, the last round of two is not full
    stages = [["0."], ["2."], ["4."]] if len(replicas) == 3 else [["0."], ["2.", "4."]]
    plan = cut(trapped(), batches[1][0], (2, 3)[: len(replicas) - 1], replicas)
    with pd.Pipeline(
        trapped(), plan, schedule=schedule, microbatches=3 if schedule == "1f1b" else None, loss=F.cross_entropy,
        optimizer=OPTIMIZERS["sgd"], on_nan="skip", ema=0.9,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7),
    ) as pipeline:  # fmt: skip
        for _ in pipeline.train(Fresh(batches)):
            pass
        results = pipeline.state_dict(), pipeline.state_dict(ema=True), pipeline.skipped_updates()
    rounds = 1 if schedule == "1f1b" else replicas[0]
    state, average, skipped = train_skipping(
        batches, stages, late, together=schedule == "1f1b", rounds=rounds, decay=0.7
    )
    assert results[2] == tuple(skipped)
    assert min(skipped) > 0
    assert_near(results[0], state, 1e-10)
    assert_near(results[1], average, 1e-10)


@pytest.mark.parametrize(
    "schedule",
    ["interleaved_1f1b", *(pytest.param(n, marks=pytest.mark.slow) for n in ("zbv", "chimera")), "roundpipe"],
)
def test_stages_of_one_worker_skip_and_clip_together(schedule: str) -> None:
    batches = marked((3, 7, 11))
    state, skipped, _ = train_marked(schedule, batches, microbatches=4)
    expected, *_ = train_skipping(batches, EACH_LAYER, (0, 0, 0), together=True)
    assert skipped == (3,) * len(trap_plan(schedule).stages)
    assert_near(state, expected, 1e-10)
    alone, together = (
        train_marked(name, batches, microbatches=4, clip_grad_norm=0.05)[0] for name in ("1f1b", schedule)
    )
    assert_near(together, alone, 1e-10)
    assert not torch.allclose(together["0.weight"], state["0.weight"], rtol=1e-3)


@pytest.mark.slow
def test_methods_of_several_stages_a_worker_take_turns() -> None:
    batches = marked((3, 7, 11))
    phases = "interleaved_1f1b/4:9,breadth_first/4"
    state, skipped, _ = train_marked("interleaved_1f1b", batches, phases=phases, clip_grad_norm=0.05)
    assert skipped == (3, 3, 3, 3)
    assert_near(state, train_marked("1f1b", batches, microbatches=4, clip_grad_norm=0.05)[0], 1e-10)


@pytest.mark.processes
@pytest.mark.slow
def test_processes_skip_what_one_does() -> None:
    for schedules, workers in ((("1f1b", "pipedream"), 3), (("interleaved_1f1b", "chimera"), 2)):
        trained = processes.team(workers).results(train_each_marked, schedules)[0]
        for alone, (state, skipped, losses) in zip(train_each_marked(schedules), trained, strict=True):
            assert skipped == alone[1]
            assert str(losses) == str(alone[2])
            assert all(torch.equal(state[name], value) for name, value in alone[0].items())


@pytest.mark.slow
def test_a_loss_scale_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def go_on(resume: bool) -> tuple[dict[str, Tensor], tuple[int, ...], float]:
        animal = zoo.make("mlp", torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
        with pd.Pipeline(
            animal.model, Run("", (1, 1)).plan, schedule="1f1b", microbatches=2, loss=steep, grad_scaler=scaler,
            optimizer=OPTIMIZERS["sgd"],
        ) as pipeline:  # fmt: skip
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
    animal = zoo.make("mlp")
    scales = []
    for scaler in (1024.0, 8.0):
        with pd.Pipeline(
            animal.model, Run("", (1, 1)).plan, schedule="1f1b", microbatches=2, loss=animal.loss,
            optimizer=OPTIMIZERS["sgd"], grad_scaler=scaler,
        ) as pipeline:  # fmt: skip
            if scales:
                pipeline.load(tmp_path)
            else:
                pipeline.save(tmp_path)
            scales.append(stage_states(pipeline)[0].optimizer.scale)
    assert scales == [1024.0, 8.0]


def test_a_loss_that_is_not_a_number_is_an_error_unless_said() -> None:
    with pytest.raises(WorkerError, match="the loss of minibatch 11 is nan"):
        train_marked("1f1b", marked((11,)), **{"on_nan": "error"})


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
    with pd.Pipeline(
        trapped().float(), plan, schedule=schedule, microbatches=2, loss=steep,
        optimizer=OPTIMIZERS["sgd"], clip_grad_norm=clip, grad_scaler=torch.amp.GradScaler("cpu", **scaler),
    ) as pipeline:  # fmt: skip
        for _ in pipeline.train(Fresh(batches)):
            pass
        state, skipped = pipeline.state_dict(), pipeline.skipped_updates()
        scales = {state.optimizer.scale for state in stage_states(pipeline)}
    reference_scaler = torch.amp.GradScaler("cpu", **scaler)
    skips = plain_scaled(plain, batches, steeply, reference_scaler, clip=clip)
    assert scales == {reference_scaler.get_scale()}
    assert skipped == (skips,) * len(plan.stages)
    assert 0 < skips < 20
    assert_near(state, dict(plain.state_dict()), 1e-5)


def many_samples(count: int = 4) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Plan]:
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
    with pd.Pipeline(
        model, plan, schedule=schedule, microbatches=2, loss=loss, optimizer=OPTIMIZERS["sgd"],
        autocast=torch.float16, grad_scaler=scaler,
    ) as pipeline:  # fmt: skip
        for _ in pipeline.train(Fresh(batches)):
            pass
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
    pipeline = pd.Pipeline(
        model, plan, schedule="1f1b", microbatches=2, loss=steep, optimizer=OPTIMIZERS["sgd"], autocast=torch.float16,
        grad_scaler=2.0**24,
    )  # fmt: skip
    with pipeline, pytest.warns(UserWarning, match=r"8 updates in a row.*scale 1.67772e\+07; use a smaller one"):
        for _ in pipeline.train(Fresh(batches)):
            pass
    assert pipeline.skipped_updates() == (9, 9)


def test_a_constant_loss_scale_changes_nothing_but_rounding() -> None:
    batches = marked(())
    without, _, _ = train_marked("pipedream", batches)
    with_scale, skipped, _ = train_marked("pipedream", batches, grad_scaler=1024.0)
    assert skipped == (0, 0, 0)
    assert_near(with_scale, without, 1e-13)


def test_one_stage_has_a_changing_loss_scale_under_any_method() -> None:
    scaler_options = {"init_scale": 2.0**126, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}
    batches = [(x.float(), y) for x, y in marked((), count=24, samples=8)]
    profile = Profile.of_chain((LayerProfile(1.0, 2.0, 8, 8),) * 5)
    scaler = torch.amp.GradScaler("cpu", **scaler_options)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 2})
    with pd.Pipeline(
        trapped().float(), manual_plan(profile.without_tied_groups(), Cluster.flat(1), (), (1,)),
        schedule="pipedream", loss=steep, optimizer=OPTIMIZERS["sgd"], grad_scaler=scaler, sample=(batches[0][0],),
    ) as pipeline:  # fmt: skip
        for _ in pipeline.train(Fresh(batches)):
            pass
        state, skipped = pipeline.state_dict(), pipeline.skipped_updates()
        scale = stage_states(pipeline)[0].optimizer.scale
    assert scaler.get_scale() == 2.0**126
    plain = trapped().float()
    skips = plain_scaled(plain, batches, steeply, scaler, parts=1)
    assert (skipped, scale) == ((skips,), scaler.get_scale())
    assert 0 < skips < 20
    assert_near(state, dict(plain.state_dict()), 1e-5)


def test_loss_scales_and_policies_that_make_no_sense_are_refused() -> None:
    plan = Run("", (1, 1)).plan
    refused("pipedream", plan, "gradients of the old scale", grad_scaler=torch.amp.GradScaler("cpu"))
    for scaler in ("dynamic", True, float("inf"), float("nan"), 0):
        refused("1f1b", plan, "give a torch.amp.GradScaler or a positive number", grad_scaler=scaler)
    refused("1f1b", plan, "on_nan='ignore' is not known; choose one of error, continue, skip", on_nan="ignore")
    for limit in (-1.0, 0.0, float("nan"), float("inf")):  # a negative one would train uphill
        refused("1f1b", plan, r"clip_grad_norm=.* was asked for; give a number between 0 and inf", clip_grad_norm=limit)
    for decay in (0.0, 1.0, 2.0):
        refused("1f1b", plan, r"ema=.* was asked for; give a number between 0 and 1", ema=decay)


def refused(schedule: str, plan: Plan, match: str, **options: Any) -> None:
    """Checks that a pipeline is refused."""
    animal = zoo.make("mlp")
    with pytest.raises(ScheduleError, match=match):
        pd.Pipeline(animal.model, plan, schedule=schedule, loss=animal.loss, optimizer=OPTIMIZERS["sgd"], **options)


def test_clipping_that_has_no_meaning_is_refused_with_the_reason() -> None:
    plan = Run("", (1, 1)).plan
    refused("pipedream", plan, "does not flush.*Use clip='delayed_global'", clip_grad_norm=1.0)
    uneven = Run("", (2, 1)).plan
    refused("pipedream", uneven, "an update holds 2, 1 microbatches", clip_grad_norm=1.0, clip="delayed_global")

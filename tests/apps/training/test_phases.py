"""Phases: a run whose method changes at a drain trains as plain PyTorch would, each phase by its own rule."""

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cases
import delayed
import pytest
import torch
import zoo
from cases import FLUSHING, OPTIMIZERS, Case, Fresh, check, make_pipeline, phased, run
from marks import slow, spread, thinned

import pipedream as pd
from pipedream.apps.training.job import profile_recipe
from pipedream.core.schedule.lowering import with_common_channels
from pipedream.extensions.torch_csv.notation import write as to_torch_csv
from pipedream.runtime.session.phase_order import PhaseEnd, find_phase
from pipedream.testing import MethodRules, Reads, Trained
from pipedream.workflows import prepare

by = partial(delayed.turn, **OPTIMIZERS["sgd"].keywords)
SYNCHRONOUS = {m: by(Reads(lambda s, k, m=m: k // m), m) for m in (3, 4)}


def check_papers(case: Case, outcome: Trained, rules: dict[int, MethodRules]) -> None:
    """Checks a run against the phases' papers."""
    case.training().assert_serial(outcome, 1e-9, rules=rules)


def latest(outcome: Trained, phase: int) -> list[int]:
    """Returns the greatest staleness of each stage in a phase."""
    return [max(late) for _, late in sorted(outcome.by_phase[phase].items())]


def t1(until: int, late: Callable[[int], float]) -> Callable[[int, int], float]:
    """Returns PipeMare's first technique: alpha / tau^p, p = 1 - min(k / K, 1)."""
    return lambda s, k: 1.0 / max(late(s), 1) ** (1 - min(k / until, 1))


PIPEMARE = phased("1f1b/4:13,pipemare/2+t1=30", epochs=7)


@pytest.mark.slow
def test_pipemare_with_all_of_its_three_techniques() -> None:
    """A synchronous warm-up (T3); rates by stage (T1), counted since the start; weights corrected back (T2)."""
    tau = lambda s: 2 * (2 - s) // 2  # noqa: E731 - of stages 0, 1, 2, in updates of two microbatches
    late = by(delayed.pipemare(3, 2), 2, rate=t1(30, tau))
    outcome = run(PIPEMARE)
    check_papers(PIPEMARE, outcome, {0: SYNCHRONOUS[4], 13: late})
    assert [begin for begin, _ in outcome.phases.values()] == [0, 13]
    assert latest(outcome, 1) == [2, 1, 0]
    for wrong in (by(late.reads, 2, t1(43, tau)), replace(late, reads=delayed.paci(3, 2))):
        with pytest.raises(AssertionError):
            check_papers(PIPEMARE, outcome, {0: SYNCHRONOUS[4], 13: wrong})


@pytest.mark.parametrize(
    ("name", "m", "delay"),
    [
        ("pb_lwp", 1, 2.0),
        ("pipeoptim", 1, 1.0),
        *(slow(*row) for row in (("spectrain", 1, 1.0), ("spectrain_v2", 1, 1.0), ("pipemare", 3, 2 / 3))),
    ],
)
def test_predictions_go_by_the_rate_that_t1_leaves(name: str, m: int, delay: float) -> None:
    """By the rate of the coming update, which is the stage's own; its delay is a mean over the microbatches."""
    case = replace(PIPEMARE, phases=f"{name}/{m}+t1=60" if m > 1 else f"{name}+t1=60", epochs=4)
    check_papers(case, run(case), {0: by(delayed.PAPERS[name](3, m), m, rate=t1(60, lambda s: delay * (2 - s)))})


@pytest.mark.slow
def test_tags_begin_anew_behind_another_method() -> None:
    """Graphs that are led to another version, one set of weights, a stash: each where the others were before."""
    case = replace(PIPEMARE, phases="1f1b/3:6,timeprest/3:15,v_timeprest/2:21,timeprest_interpolated/3:29,timeprest/3")
    outcome = run(case)
    tagged, live = by(delayed.timeprest(3, 3), 3), by(delayed.v_timeprest(3, 2), 2)
    between = by(delayed.timeprest_interpolated(3, 3), 3)
    check_papers(case, outcome, {0: SYNCHRONOUS[3], 6: tagged, 15: live, 21: between, 29: tagged})
    assert latest(outcome, 1) == latest(outcome, 4) == [2, 2, 2]
    assert latest(outcome, 3) == [2, 1, 0]


def test_averages_of_updates_go_on_into_a_phase_that_needs_them_too() -> None:
    case = replace(PIPEMARE, phases="pipemare/2:13,pipemare/2", epochs=4)
    outcome = run(case)
    check_papers(case, outcome, {0: by(delayed.pipemare(3, 2), 2)})
    assert 13 in outcome.drains


@pytest.mark.slow
def test_compensations_change_with_the_phase() -> None:
    """The velocity goes on through all phases: it is the user's optimizer's."""
    late = lambda s: 2 - s  # noqa: E731
    stash = Reads(lambda s, k: max(0, k - late(s)))
    case = phased("pipedream+spike:17,1f1b/4:29,pipedream+none:41,pipedream+spike+t1=60")
    made_up, rescheduled = by(stash, 1, spike=late), by(stash, 1, rate=t1(60, late), spike=late)
    check_papers(case, run(case), {0: made_up, 17: SYNCHRONOUS[4], 29: by(stash, 1), 41: rescheduled})


RUNS = [
    # Synchronous, asynchronous, synchronous again; the middle one is PipeMare's warm-up and the hybrid's finish in one.
    phased("1f1b/4:13,pipedream:37,1f1b/4"),
    slow(phased("pipedream:20,pipedream_vertical_sync:40,pipedream_2bw/3", optimizer="adamw", clip_grad_norm=0.1)),
    # Replicas: the first phase ends in the middle of a round of the next, which ends at a whole round of its own.
    phased("1f1b/4:7,pipedream:30,1f1b/2", (2, 1)),
    phased("pipedream:3e,1f1b/3:8e,pipedream", (2, 1), clip_grad_norm=0.1, evaluate_at=(2, 23)),  # 15 tear a round
    slow(phased("pipedream:9,gpipe/3", (1, 3), depth="full", optimizer="adamw")),
    slow(phased("zb_h1/4:13,pipedream:30,zb_h2/4", clip_grad_norm=0.1)),
    # A loop that is left at a border, and within a phase.
    phased("1f1b/2:5,pipedream", (1, 1), leave_at=4, evaluate_at=(4,)),
    slow(phased("1f1b/2:6,pipedream:40,1f1b/4", (1, 1), leave_at=17, evaluate_at=())),
    slow(phased("1f1b/2:2e,pipedream:33,gpipe/2", animal="lstm", optimizer="adamw")),
]


@pytest.mark.parametrize("case", spread(thinned(RUNS)), ids=str)
def test_a_run_in_phases_trains_as_plain_pytorch(case: Case) -> None:
    outcome = run(case)
    check(case, outcome)
    chosen, size = prepare.read_run_phases(None, None, case.phases), len(zoo.make(case.animal).batches)
    assert sorted(outcome.phases) == list(range(len(chosen)))
    assert outcome.phases[len(chosen) - 1][1] == case.epochs * size
    for (phase, (_, end)), (_, (begin, _)) in pairwise(sorted(outcome.phases.items())):
        assert begin == end
        assert end in outcome.drains, "a change of phase is a recorded drain"
        intended = chosen[phase].until or chosen[phase].until_epoch * size
        assert intended <= end < intended + max(case.replicas) + (3 if intended - 1 in case.evaluate_at else 0)
        if chosen[phase].until_epoch or chosen[phase].name in FLUSHING:
            assert end == intended or intended - 1 in case.evaluate_at
    # Staleness is each method's own.
    for phase in outcome.by_phase:
        for stage, staleness in enumerate(latest(outcome, phase)):
            in_flight = case.plan().in_flight[stage]
            late = {"pipedream": in_flight - 1, "pipedream_2bw": 1, "pipedream_vertical_sync": case.stages - 1}
            assert staleness == late.get(chosen[phase].name, 0)


IN_PROCESSES = {
    2: [
        phased("1f1b/2:4,pipedream:11,gpipe/3", (1, 1), epochs=3, evaluate_at=(5,)),
        phased("pipedream:1e,1f1b/4", (2,), epochs=2, evaluate_at=()),
        phased("1f1b/2:4,pipemare/2+t1=9:8,pipedream_2bw/3+error_feedback", (1, 1), epochs=3, evaluate_at=(5,)),
    ],
    3: [
        phased("1f1b/4:4,pipedream:9,pipedream_2bw/4", (2, 1), epochs=3, evaluate_at=(5,)),
        phased("pipedream:1e,pipedream_vertical_sync", (1, 1, 1), animal="cnn", epochs=2, evaluate_at=()),
    ],
}


@pytest.mark.parametrize(
    "case",
    [
        phased("1f1b/4:12,pipedream:20,1f1b/2", evaluate_at=(), optimizer="adamw", epochs=6),
        slow(phased("pipedream:12,pipedream_2bw/3:4e,pipedream", (2, 1), evaluate_at=())),
        slow(phased("1f1b/4:12,pipemare/2+t1=40:20,pipedream+spike", (1, 1), evaluate_at=(), epochs=9)),
        slow(phased("pipedream+error_feedback:12,pipedream_2bw/3+error_feedback:20,pb_lwp", evaluate_at=())),
        slow(phased("1f1b/4:12,pipedream+basis_rotation=2=one_sided:20,pipedream", evaluate_at=(), optimizer="adamw")),
    ],
    ids=str,
)
def test_a_run_goes_on_to_the_bit_in_any_phase(case: Case, tmp_path: Path) -> None:
    """Within each phase, and at their borders, 20 (where a drain is due anyway) among them."""
    cases.check_resumed(case, tmp_path, (4, 12, 20, 27))


def test_a_compensation_of_the_run_is_for_the_phases_that_do_not_flush() -> None:
    def compensations(phases: str, **options: Any) -> list[str]:
        with make_pipeline("mlp", (1, 1, 1), phases=phases, **options) as pipeline:
            return [" ".join(map(str, phase.program.updates.compensation)) for phase in pipeline.prepared]

    text = "1f1b:5,pipedream:9,pipedream+t1=7:12,one_step_ef/2"
    assert compensations(text) == ["", "", "t1:7", "error_feedback:1.0"]
    assert compensations(text, compensation="spike") == ["", "spike", "t1:7", "spike"]
    assert compensations(text, compensation=()) == ["", "", "t1:7", ""]
    for phases, options in (("1f1b+spike:5,pipedream", {}), ("1f1b:5,gpipe/2", {"compensation": "spike"})):
        with pytest.raises(pd.PipelineError, match="spike was asked for with a method that flushes"):
            compensations(phases, **options)


PHASES = {
    "pipedream_2bw/3+error_feedback=0.5+t1=500:2e": pd.Phase(
        "pipedream_2bw", until_epoch=2, microbatches=3, compensation=["error_feedback:0.5", "t1:500"]
    ),
    "a/my-own.csv/4:200": pd.Phase("a/my-own.csv", until=200, microbatches=4),
    "../methods.py:two_by_two/2+spike:3e": pd.Phase(
        "../methods.py:two_by_two", until_epoch=3, microbatches=2, compensation=["spike"]
    ),
    "C:\\x.CSV:700": pd.Phase("C:\\x.CSV", until=700),
    "one_step_ef/4+none:5": pd.Phase("one_step_ef", until=5, microbatches=4, compensation=()),
}


def test_phases_as_text() -> None:
    for text, phase in PHASES.items():
        assert prepare.read_run_phases(None, None, f" {text}, methods.py") == (phase, pd.Phase("methods.py"))
        assert str(phase) == text
    phases = prepare.read_run_phases(None, None, "1f1b/4:200,pipedream:3e,1f1b/4")
    ends = [PhaseEnd(str(phase), phase.until, phase.until_epoch) for phase in phases]
    at = [find_phase(ends, *position) for position in ((0, 0), (199, 1), (200, 1), (250, 2), (300, 3), (900, 9))]
    assert at == [0, 0, 1, 1, 2, 2]
    assert find_phase(ends, 10, 3) == 0, "phases come one after the other"


COUNT = "was asked for; give a count from 1 on"
PLAIN_SGD, NEED_VELOCITY = {"optimizer": partial(torch.optim.SGD, lr=0.1)}, ("pipedream+spike", "pb_lwp")


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("1f1b:5", "the last phase, 1f1b:5, ends before the run"),
        ("1f1b,pipedream", "phase 1f1b needs one end"),
        ("1f1b:5,pipedream:5,1f1b", r"end at \[5, 5\]; these are counts since the start"),
        ("1f1b:0,pipedream", f"until=0 {COUNT}"),
        ("1f1b:x,pipedream", "phase '1f1b:x' is not known; write METHOD"),
        ("nothing:5,pipedream", "schedule 'nothing' is not known"),
        ("pipedream/4:5,1f1b", "does not split it, but 4 microbatches"),
        ("pipedream+spike+none", "compensation 'none' is not known"),
        ([pd.Phase("1f1b", until=5, until_epoch=1), pd.Phase("pipedream")], "needs one end"),
        (lambda: pd.Phase("1f1b", until=2.5), COUNT),
        (lambda: pd.Phase("1f1b", until_epoch=True), COUNT),
        (lambda: pd.Phase("1f1b", microbatches=0), COUNT),
        (3, "phases is 3, neither a text nor a list of Phase"),
        ({"phases": "1f1b", "schedule": "gpipe"}, "each phase has its own"),
        ({"phases": "1f1b", "microbatches": 4}, "each phase has its own"),
        *(({"phases": f"1f1b/2:900,{text}"} | PLAIN_SGD, "needs momentum=|without momentum") for text in NEED_VELOCITY),
    ],
)
def test_phases_that_make_no_sense_are_refused(phases: Any, message: str) -> None:
    options = phases if isinstance(phases, dict) else {"phases": phases}
    with pytest.raises(pd.PipelineError, match=message):
        phases() if callable(phases) else make_pipeline("mlp", (1, 1, 1), **options)


def test_common_channels_are_the_deepest_and_of_one_placement() -> None:
    deep, three = replace(pd.Plan.uniform(3), in_flight=(7, 4, 1)), pd.Plan.uniform(3)
    deeper, other = pd.lower(pd.schedules.build("pipedream", deep)), pd.lower(pd.schedules.build("gpipe", three, 4))
    programs = with_common_channels([deeper, other])
    assert [p.channels for p in programs] == [programs[0].channels] * 2
    for common, a, b in zip(programs[0].channels, deeper.channels, other.channels, strict=True):
        assert common.depth == max(a.depth, b.depth)
    assert any(a.depth != b.depth for a, b in zip(deeper.channels, other.channels, strict=True))
    for program in programs:
        pd.verify(program)
    with pytest.raises(pd.PipelineError, match="take methods of one placement"):
        with_common_channels([deeper, pd.lower(pd.schedules.build("pipedream", pd.Plan.uniform(2, replicas=(2, 1))))])


def make(seed: int = 0, phases: Any = "") -> pd.Recipe:
    """Returns a small recipe."""
    animal = zoo.make("mlp", torch.float32)
    return pd.Recipe(
        model=animal.model, loss=animal.loss, optimizer=OPTIMIZERS["sgd"], train=Fresh(animal.batches),
        test=Fresh(animal.batches), epochs=6, phases=phases, name="small",
    )  # fmt: skip


@pytest.mark.slow
def test_a_recipe_in_phases_leaves_a_report_that_marks_them(tmp_path: Path) -> None:
    text = "1f1b/2:4,pipedream:22,gpipe/3"
    summary = pd.run(make, phases=text, out=tmp_path / "whole", quiet=True, evaluate_every=0)
    assert summary["schedule"] == summary["configuration"]["phases"] == text
    rows = [(phase["schedule"], phase["microbatches"], phase["begin"], phase["end"]) for phase in summary["phases"]]
    assert rows == [("1f1b", 2, 0, 4), ("pipedream", 1, 4, 22), ("gpipe", 3, 22, 30)]
    assert summary["configuration"]["schedule"] == "pipedream", "figures are of the longest phase"
    trace = json.loads((tmp_path / "whole" / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    assert names == ["measured 1f1b", "measured pipedream", "measured gpipe"]
    begins = [min(event["ts"] for event in trace if event["ph"] == "X" and event["pid"] == run) for run in range(3)]
    assert begins == [0, *sorted(begins[1:])], "phases have one zero of time"
    page = (tmp_path / "whole" / "report.html").read_text()
    assert page.count('class="phase"') == 3
    # A run that was left in its second phase goes on with the phases that it had; the recipe's own come last.
    first = pd.run(make, phases=text, minibatches=10, out=tmp_path / "parts", quiet=True)
    assert [phase["schedule"] for phase in first["phases"]] == ["1f1b", "pipedream"]
    rest = pd.run(lambda seed: make(seed, "naive:1,gpipe"), resume=tmp_path / "parts", quiet=True, evaluate_every=0)
    assert [(phase["schedule"], phase["end"]) for phase in rest["phases"]] == [("pipedream", 22), ("gpipe", 30)]
    assert rest["phases"][0]["begin"] == first["minibatches"]
    assert page.count('class="phase"') > (tmp_path / "parts" / "report.html").read_text().count('class="phase"')


@pytest.mark.slow
def test_the_recipes_phases_are_taken_unless_others_are_said(tmp_path: Path) -> None:
    make_in_phases = lambda seed: make(seed, [pd.Phase("1f1b", until=3, microbatches=2), pd.Phase("pipedream")])  # noqa: E731
    options: dict[str, Any] = {"minibatches": 6, "quiet": True}
    for chosen, schedule in (
        ({"out": tmp_path / "1"}, "1f1b/2:3,pipedream"),
        ({"out": tmp_path / "2", "phases": "naive:2,gpipe/2"}, "naive:2,gpipe/2"),
        ({"out": tmp_path / "3", "compensation": "spike"}, "1f1b/2:3,pipedream+spike"),
        ({"out": tmp_path / "4", "schedule": "gpipe", "checkpoint_every": 3}, "gpipe"),
        ({"resume": tmp_path / "4", "minibatches": 7}, "gpipe"),  # what is not chosen is as it was
    ):
        summary = pd.run(make_in_phases, **options | chosen)
        assert summary["schedule"] == schedule
        assert summary["configuration"]["phases"] == (None if schedule == "gpipe" else schedule)
    with pytest.raises(pd.PipelineError, match="each phase has its own"):
        pd.run(make_in_phases, schedule="gpipe", phases="naive:2,gpipe/2", out=tmp_path / "5", **options)


def test_a_phase_whose_end_lies_behind_is_told() -> None:
    batches = Fresh(zoo.make("mlp").batches)  # five minibatches an epoch
    with make_pipeline("mlp", phases="1f1b/2:7,pipedream:1e,gpipe/2") as pipeline:
        with pytest.warns(UserWarning, match=r"phase pipedream:1e is skipped.* minibatch 7, after 1 whole"):
            list(pipeline.train(batches, epochs=2))
        assert pipeline.trained == {0: (0, 7), 2: (7, 10)}
        assert [pipeline.timeline(phase).name for phase in (0, 2)] == ["1f1b", "gpipe"]
        with pytest.raises(pd.PipelineError, match="phase 7 was requested, but the run has phases 0 to 2"):
            pipeline.timeline(7)


@pytest.mark.slow
def test_a_checkpoints_phases_are_taken_up_as_they_were_asked(tmp_path: Path) -> None:
    plan = zoo.plan_of(zoo.make("mlp", torch.float32), 2, (1, 1))
    (tmp_path / "mine.csv").write_text(to_torch_csv(pd.schedules.build("gpipe", pd.Plan.uniform(2), 4)))
    mine = replace(pd.schedules.build("gpipe", plan, 3), name="my own")
    options: dict[str, Any] = {"plan": plan, "checkpoint_every": 3, "quiet": True, "evaluate_every": 0}

    def both(name: str, phases: Any, first: dict[str, Any] | None = None, **rest: Any) -> tuple[Any, Any, Any]:
        recipe = lambda seed: make(seed, phases)  # noqa: E731
        begun = pd.run(recipe, out=tmp_path / name, minibatches=3, **options, **(first or {}))
        summary = pd.run(recipe, resume=tmp_path / name, minibatches=9, **options | {"plan": None}, **rest)
        trained = [(phase["schedule"], phase["begin"], phase["end"]) for phase in summary["phases"]]
        return begun["schedule"], trained, summary["configuration"]["compensation"]

    path = tmp_path / "mine.csv"
    text, trained, _ = both("csv", [pd.Phase(str(path), until=5), pd.Phase("pipedream")])
    assert (text, [begin for _, begin, _ in trained]) == (f"{path}:5,pipedream", [3, 5])
    text, trained, _ = both("object", [pd.Phase(mine, until=5), pd.Phase("pipedream")])
    assert (text, *trained[0]) == ("<my own>:5,pipedream", "my own", 3, 5)
    with pytest.raises(pd.PipelineError, match=r"phase .<my own>:5' was a Schedule object.*give the same phases again"):
        pd.run(make, resume=tmp_path / "object", minibatches=10, **options)
    # What is not said is the checkpoint's, and what is said is not.
    run = "1f1b/2:2,pipedream"
    assert both("kept", run, {"compensation": "spike"})[2] == ["spike"]
    assert both("changed", run, {"compensation": "spike"}, compensation=())[2] == []
    with pytest.raises(pd.PipelineError, match=r"phases=.* was given with microbatches=2, but each phase has its own"):
        both("split", run, microbatches=2)


def test_a_phase_that_the_plan_has_no_memory_for_is_refused(tmp_path: Path) -> None:
    def wide(seed: int = 0) -> pd.Recipe:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 3))  # can be cut at one place
        data = [(torch.randn(2048, 8), torch.randint(3, (2048,))) for _ in range(4)]
        loss = torch.nn.functional.cross_entropy
        return pd.Recipe(model=model, loss=loss, optimizer=OPTIMIZERS["sgd"], train=data, name="wide")

    profile = profile_recipe(wide())
    split: dict[str, Any] = {"schedule": "pipedream_2bw", "microbatches": 8}
    plan = pd.plan(profile, pd.Cluster.flat(2), **split, shape="pipeline")
    tight = pd.Cluster.flat(2, memory_bytes=max(stage.peak_bytes for stage in plan.stages) + 1)
    plan = replace(plan, cluster=tight)
    phases = {"phases": "pipedream_2bw/8:2,pipedream:3,1f1b/8"}
    for options, phase in (
        (phases | {"cluster": tight}, "pipedream:3"),
        (phases | {"plan": plan}, "pipedream:3"),
        (split | {"cluster": tight, "compensation": "error_feedback"}, "pipedream_2bw/8.error_feedback"),
    ):
        with pytest.raises(pd.PipelineError, match=f"in phase {phase} the plan 1-1 does not fit: .*needs"):
            pd.run(wide, out=tmp_path / "tight", workers=2, quiet=True, **options)
    prepare.check_phases_fit(plan, prepare.read_run_phases(None, None, "pipedream_2bw/8:2,1f1b/8"), profile)


@pytest.mark.slow
def test_a_report_is_of_a_phase_whose_spans_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a long run the second phase pushes out the first one's."""
    options: dict[str, Any] = {"quiet": True, "evaluate_every": 0}
    pd.run(make, minibatches=1, out=tmp_path / "first", **options)  # measures what the runtime costs, with all spans
    monkeypatch.setattr("pipedream.services.results.recorder._TABLE_ROWS", 40)
    summary = pd.run(make, phases="1f1b/2:20,pipedream", out=tmp_path / "run", **options)
    assert [phase["end"] - phase["begin"] for phase in summary["phases"]] == [20, 10]
    assert summary["configuration"]["schedule"] == "pipedream"
    assert all(stage["busy_share"] for stage in summary["stages"])
    # A run that goes on where it has ended has nothing to tell.
    again = pd.run(make, resume=tmp_path / "run", **options)
    assert [(phase["begin"], phase["end"]) for phase in again["phases"]] == [(30, 30)]


def test_each_phase_has_workers_of_its_own_and_keeps_what_is_the_users() -> None:
    calls: list[str] = []

    def make_optimizer(named: Any) -> torch.optim.Optimizer:
        calls.append("optimizer")
        return OPTIMIZERS["sgd"](named)

    def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
        calls.append("scheduler")
        return torch.optim.lr_scheduler.StepLR(optimizer, 3)

    batches = Fresh(zoo.make("mlp").batches)
    former: list[weakref.ref[Any]] = []
    phases = "1f1b/4:4,pipedream:8,gpipe/2"
    gc.disable()
    try:
        with make_pipeline(
            "mlp", (2, 1, 1), phases=phases, optimizer=make_optimizer, scheduler=make_scheduler
        ) as pipeline:
            for done in pipeline.train(batches, epochs=2):
                if done.number in (0, 4):
                    former += [weakref.ref(state) for _, state in pipeline._local.stage_states]
            assert len(former) == 2 * 4
            assert not any(reference() for reference in former), "their versions would keep memory"
    finally:
        gc.enable()
    assert calls == ["optimizer", "scheduler"] * 4


def test_a_weight_that_the_loop_writes_where_a_phase_changes_is_noticed() -> None:
    batches = Fresh(zoo.make("mlp").batches)

    def train() -> None:
        with make_pipeline("mlp", (1, 1), phases="1f1b/2:3,pipedream") as pipeline:
            for done in pipeline.train(batches, epochs=1):
                if done.number == 2:
                    with torch.no_grad():
                        next(iter(pipeline._local.model.parameters())).mul_(2)

    with pytest.raises(pd.PipelineError, match=r"weight .* was written while the pipeline trained"):
        train()

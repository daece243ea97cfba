"""Optimizers in the memory of the machine: the same bits, checkpoints, memory, and what is refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from cases import OPTIMIZERS, Case, run, stage_states
from marks import slow
from torch import Tensor, nn
from training import plan_of

import pipedream as pd
from pipedream.extensions.host_weights.cpu_optimizer import CpuOptimizerWeights, check_movable
from pipedream.testing import assert_equal
from pipedream.workflows import check, methods, prepare

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def make() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(4)]


def pipeline(state: str | None, schedule: Any = "1f1b", optimizer: Any = ADAMW, **options: Any) -> pd.Pipeline:
    options = {"microbatches": 1 if schedule == "pipedream" else 4, "loss": F.cross_entropy} | options
    plan = plan_of(make(), batches()[0][0], (3, 5), options.pop("replicas", None))
    return pd.Pipeline(make(), plan, schedule=schedule, optimizer=optimizer, optimizer_state=state, **options)


@pytest.mark.parametrize(
    "case",
    [
        Case("mlp", "1f1b", 3, microbatches=4, optimizer="adamw", clip_grad_norm=0.1, scheduled=True, ema=0.9),
        Case("mlp", "pipedream", 3, replicas=(2, 1, 1), optimizer="adamw", evaluate_at=(3,)),
        slow(Case("mlp", "pipedream_2bw", 3, microbatches=4, optimizer="nadam", leave_at=5)),
        slow(Case("mlp", "pipedream_2bw", 2, microbatches=4, compensation="error_feedback")),
        slow(Case("cnn", "zb_h1", 3, microbatches=4, autocast=torch.bfloat16)),
        slow(Case("transformer", "pipemare", 3, microbatches=2, optimizer="adamw")),
    ],
    ids=str,
)
def test_the_place_of_the_optimizer_changes_no_bit(case: Case) -> None:
    device, host = run(case), run(replace(case, optimizer_state="host"))
    assert_equal(host, device)


def test_the_optimizer_steps_copies_in_memory_of_its_own() -> None:
    """Also where the schedule is not known by its name."""
    schedule = pd.schedules.build("1f1b", plan_of(make(), batches()[0][0], (3, 5)), 4)
    with pipeline("host", schedule, microbatches=None) as trained:
        list(trained.train(batches()))
        for state in stage_states(trained):
            handles, stepped = state.versions.handles, state.optimizer.stepped.weights
            groups = [weight for group in state.optimizer.optimizer.param_groups for weight in group["params"]]
            assert [id(weight) for weight in groups] == [id(weight) for weight in stepped.values()]
            assert all(torch.equal(weight, handles[name]) for name, weight in stepped.items())
            assert not {weight.data_ptr() for weight in stepped.values()} & {p.data_ptr() for p in handles.values()}


def test_attributes_of_parameters_are_seen_by_the_optimizer() -> None:
    handle = nn.Parameter(torch.arange(3.0))
    handle.no_decay = True
    hosted = CpuOptimizerWeights({"bias": handle}, {"bias": torch.zeros(3)}, lambda gradients: (gradients, None))
    assert hosted.weights["bias"].no_decay
    assert torch.equal(hosted.weights["bias"], handle)


@pytest.mark.parametrize(("before", "after"), [("host", None), (None, "host")])
def test_a_checkpoint_goes_on_with_the_optimizer_elsewhere(before: Any, after: Any, tmp_path: Path) -> None:
    case = Case("mlp", "1f1b", 3, microbatches=4, optimizer="adamw", optimizer_state=before, evaluate_at=())
    case.training().resumed(tmp_path, (3, 7), replace(case, optimizer_state=after).training())


def test_loaded_weights_are_trained() -> None:
    states = []
    for state in ("host", "device"):
        with pipeline(state) as trained:
            for _ in range(2):
                trained.load_state_dict(make().state_dict())
                list(trained.train(batches()))
            states.append(trained.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_what_cannot_be_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.zeros(2))
    capturable, holding = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)
    capturable.param_groups[0]["capturable"] = True
    holding.state[weight]["seen"] = Mock(torch.Tensor, device=torch.device("cuda", 0))
    check_movable(torch.optim.AdamW([weight], fused=True))
    for call, words in (
        (partial(check_movable, capturable), "'host' was asked for with SGD, which has capturable=True, .*; leave"),
        (partial(check_movable, holding), "SGD, which holds 'seen' on cuda:0"),
        (partial(pipeline, "gpu"), "optimizer_state='gpu' was asked for; give device or host"),
        (partial(pipeline, "host", "spectrain", OPTIMIZERS["sgd"], microbatches=1), "'spectrain', which reads weights"),
        (partial(pipeline, "host", "pipedream", replicas=(2, 1, 1), sums="every:2"), "which averages weights over rep"),
    ):
        with pytest.raises(pd.PipelineError, match=words):
            call()
    monkeypatch.setattr("pipedream.services.weights.memory.host_bytes", lambda: 0)
    with pytest.raises(pd.PipelineError, match="of 3 stages were to be kept in the memory of one machine"):
        pipeline("host")
    with pipeline("device"):
        pass


def on_gpus(profile: pd.Profile) -> pd.Profile:
    """Returns a profile of devices that compute beside the host."""
    return replace(profile, runtime=replace(profile.runtime, overlap_device=True))


def test_a_drain_waits_for_no_update_before_a_forward_that_does_not_exist() -> None:
    """On 2 workers F takes 3 s, B 6 s, U 4.5 s beside them: 3 + 3 + 6 + 3 + 6 + 6 + 4.5 s for two minibatches."""
    layers = (pd.LayerProfile(1.0, 2.0, output_bytes=0, activation_bytes=0, parameter_bytes=1000),) * 6
    profile = on_gpus(pd.Profile.of_chain(layers, batch=16, optimizer_bytes=12_000, update_s=9.0))
    plan = pd.plan(
        profile, pd.Cluster.flat(2), schedule="pipedream_2bw", microbatches=1, shape="straight", optimizer_state="host"
    )
    assert pd.simulate(plan, minibatches=2).makespan_s == pytest.approx(31.5)


def test_a_plan_counts_device_and_host() -> None:
    """Weights of 8 kB on 2 workers, an optimizer's state of twice that. With 2BW gradients are there twice where a
    thread makes updates."""
    layers = (pd.LayerProfile(1.0, 2.0, output_bytes=0, activation_bytes=0, parameter_bytes=1000),) * 8
    cpu = pd.Profile.of_chain(layers, batch=16, optimizer_bytes=16_000)
    gpu = on_gpus(cpu)
    cluster = pd.Cluster((pd.Level(2, 1e9),), host_bytes=32_000)
    ask = partial(pd.plan, schedule="1f1b", microbatches=4, shape="straight")
    for schedule, profile, state, expected in (
        ("1f1b", cpu, None, 16_000),
        ("1f1b", cpu, "host", 20_000),
        ("1f1b", gpu, None, 16_000),
        ("1f1b", gpu, "host", 8000),
        ("pipedream_2bw", cpu, None, 20_000),
        ("pipedream_2bw", cpu, "host", 28_000),
        ("pipedream_2bw", gpu, "host", 16_000),
    ):
        plan = ask(profile, cluster, schedule=schedule, optimizer_state=state)
        assert plan.choices.optimizer_state == (state or "device")
        assert set(plan.worker_bytes.values()) == {expected}, "weights, gradients, state"
        assert check.check_plan(plan, profile=profile).plan.stages == plan.stages
        assert check.check_plan(plan).plan.worker_bytes == plan.worker_bytes
        assert max(pd.simulate(plan, minibatches=2).peak_bytes) == expected
        is_apart = profile is gpu and state == "host"
        assert {stage.memory.host_bytes for stage in plan.stages} == {16_000 * is_apart}
    assert "optimizers: in the memory of the machine, 32.0 kB" in str(plan)
    short = replace(cluster, host_bytes=31_999)
    with pytest.raises(pd.PipelineError, match=r"of 2 stages were to be kept .* 32.0 kB, 1.00 B more than the 32.0 kB"):
        ask(gpu, short, optimizer_state="host")
    two = pd.Cluster((pd.Level(1, 1e9), pd.Level(2, 1e9)), host_bytes=16_000)
    ask(gpu, two, optimizer_state="host")
    with pytest.raises(pd.PipelineError, match=r"of 1 stages were to be kept .* 16.0 kB"):
        ask(gpu, replace(two, host_bytes=15_999), optimizer_state="host")


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream_2bw"])
def test_moving_an_optimizer_later_predicts_what_planning_does(schedule: str, gpus: bool) -> None:
    layer = pd.LayerProfile(1.0, 2.0, output_bytes=10, activation_bytes=500, parameter_bytes=1000, temporary_bytes=70)
    profile = pd.Profile.of_chain((layer,) * 4, batch=16, optimizer_bytes=8000, input_shapes=((16, 47),))
    profile, cluster = on_gpus(profile) if gpus else profile, replace(pd.Cluster.flat(2), host_bytes_per_s=4e3)
    ask = partial(pd.plan, profile, cluster, schedule=schedule, microbatches=4, shape="straight")
    plans, phases = [ask(optimizer_state=state) for state in ("device", "host")], (pd.Phase(schedule, microbatches=4),)
    for planned, target in (plans, plans[::-1]):
        moved = planned.choosing(optimizer_state=target.choices.optimizer_state)
        assert prepare.follow_moves(moved, planned, phases).stages == target.stages
    assert prepare.follow_moves(plans[0], plans[0], phases) is plans[0]
    least, most = sorted(max(plan.worker_bytes.values()) for plan in plans)
    full = replace(plans[0].choosing(optimizer_state="host"), cluster=replace(cluster, memory_bytes=least))
    if gpus:
        assert prepare.follow_moves(full, plans[0], phases).stages == plans[1].stages
    else:
        with pytest.raises(pd.PipelineError, match=f"stage 0 of the plan .* needs {most / 1e3:.1f} kB, a worker has"):
            prepare.follow_moves(full, plans[0], phases)


def test_activations_moved_later_count_elsewhere() -> None:
    layers = (pd.LayerProfile(1.0, 2.0, output_bytes=10, activation_bytes=8000, parameter_bytes=1000),) * 4
    cluster, phases = pd.Cluster.flat(2), (pd.Phase("1f1b", microbatches=4),)
    planned = pd.plan(pd.Profile.of_chain(layers, batch=16), cluster, schedule="1f1b", microbatches=4, shape="straight")
    moved = prepare.follow_moves(planned.choosing(activations="host"), planned, phases)
    for before, stage in zip(planned.stages, moved.stages, strict=True):
        # A quarter of a microbatch's is in memory.
        assert before.peak_bytes - stage.peak_bytes == stage.memory.moved_bytes - stage.activation_bytes // 4 // 4 > 0


def test_a_pipeline_predicts_where_its_optimizer_is() -> None:
    with pipeline("device", "pipedream") as device, pipeline("host", "pipedream") as host:
        pairs = zip(device.plan.stages, host.plan.stages, strict=True)
        assert [after.peak_bytes - before.peak_bytes for before, after in pairs] == [300, 200, 100]


def test_copies_of_a_hosted_optimizer_take_time() -> None:
    """At the rate that was measured, else at that of the datasheet; on a CPU nothing is copied there."""
    layers = (pd.LayerProfile(1.0, 2.0, output_bytes=0, activation_bytes=0, parameter_bytes=1000),) * 4
    profile = on_gpus(pd.Profile.of_chain(layers, batch=16, device="A100-80GB"))
    cluster = pd.Cluster.flat(2, device="A100-80GB")
    ask = partial(pd.plan, schedule="1f1b", microbatches=4, shape="straight", strategy="search")
    for rate, expected in ((1e3, 1e3), (None, 0.8 * 31.5e9)):
        on_device, weights_on_host = (
            ask(profile, replace(cluster, host_bytes_per_s=rate), optimizer_state=state) for state in ("device", "host")
        )
        assert weights_on_host.cluster.host_bytes_per_s == expected
        copies_s = 2 * 2000 / expected  # gradients, and then weights, of 2 kB
        for before, stage in zip(on_device.stages, weights_on_host.stages, strict=True):
            assert stage.update_s == pytest.approx(before.update_s + copies_s)
        assert methods.score(weights_on_host).period_s == pytest.approx(methods.score(on_device).period_s + copies_s)
    cpu = pd.Profile.of_chain(layers, batch=16, device="cpu")
    plan = ask(cpu, replace(pd.Cluster.flat(2), host_bytes_per_s=1.0), optimizer_state="host")
    assert {stage.update_s for stage in plan.stages} == {0.0}

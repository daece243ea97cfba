"""Bytes are exact, seconds are sane, and the model is left as it was."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from built import Built, unchanged
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.profiler.measure import fixed_s, measure
from pipedream.profiler.stopwatch import HostStopwatch
from pipedream.profiler.update import measure_update


def chain(*modules: nn.Module) -> pd.LayerGraph:
    return pd.LayerGraph.chain(tuple(pd.Layer(str(i), type(m).__name__) for i, m in enumerate(modules)))


SAMPLE = (torch.randn(2, 4),)


def profile_of(*modules: nn.Module, sample: Any = SAMPLE, **options: Any) -> pd.Profile:
    options = {"model_name": "T", "preserve_state": pd.capture.preserve_state, "warmup": 0, "runs": 1} | options
    return measure(modules, options.pop("graph", chain(*modules)), sample, **options)


@pytest.mark.parametrize(
    ("module", "x", "activation_bytes"),
    [
        (nn.BatchNorm1d(6), torch.randn(8, 6), 8 * 6 * 4 + 2 * 6 * 4),  # the input and two statistics, and no buffers
        (nn.Linear(4, 2), torch.randn(1000, 4)[:8], 8 * 4 * 4),  # of a larger tensor only the view
    ],
)
def test_kept_bytes_by_hand(module: nn.Module, x: Tensor, activation_bytes: int) -> None:
    assert profile_of(module, sample=(x,)).layers[0].activation_bytes == activation_bytes


def test_frozen_weights_are_told_apart() -> None:
    modules = nn.Linear(3, 5).requires_grad_(False), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    modules[1][0].weight.requires_grad_(False)
    profile = profile_of(*modules, sample=(torch.randn(4, 3),))
    assert [(layer.parameter_bytes, layer.frozen_bytes) for layer in profile.layers] == [(80, 80), (240, 100)]
    assert "frozen: 180 B of the weights" in str(profile)


@pytest.mark.parametrize(("batch", "widths", "inplace"), [(5, [9, 4, 7], False), (2, [3, 6, 1], True)])
def test_bytes_of_linear_and_relu_by_turns_are_exact(batch: int, widths: list[int], inplace: bool) -> None:
    modules: list[nn.Module] = []
    parameters, outputs, activations = [], [], []
    for fan_in, fan_out in pairwise(widths):
        modules += [nn.Linear(fan_in, fan_out), nn.ReLU(inplace=inplace)]
        parameters += [4 * (fan_in * fan_out + fan_out), 0]
        outputs += [4 * batch * fan_out] * 2
        # A Linear saves its input: counted here for the raw data, else already in the ReLU, which saves its output.
        activations += [4 * batch * fan_in if len(modules) == 2 else 0, 4 * batch * fan_out]
    profile = profile_of(*modules, sample=(torch.randn(batch, widths[0]),))
    assert [layer.parameter_bytes for layer in profile.layers] == parameters
    assert [layer.output_bytes for layer in profile.layers] == outputs
    assert [layer.activation_bytes for layer in profile.layers] == activations
    assert profile.parameter_bytes == sum(p.nbytes for module in modules for p in module.parameters())
    assert (profile.batch, profile.input_shapes) == (batch, ((batch, widths[0]),))


def test_optimizer_state_is_measured() -> None:
    module, optimizer = nn.Linear(3, 3), partial(torch.optim.Adam, lr=0.1)
    profile = profile_of(module, sample=(torch.ones(2, 3),), optimizer=optimizer, runs=2)
    # Two moments, and one step count a parameter.
    assert (profile.optimizer, profile.optimizer_bytes) == ("Adam", 2 * 4 * 12 + 2 * 4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Returns the time that stopwatches read, moved by hand."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("pipedream.profiler.stopwatch.time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


class Timed(torch.optim.SGD):
    """Takes 3 seconds, and another for each byte that has a gradient."""

    def __init__(self, named: Any, clock: SimpleNamespace) -> None:
        super().__init__([parameter for _, parameter in named], lr=0.1)
        self.clock = clock

    def step(self, closure: Any = None) -> None:
        self.clock.now_s += 3 + sum(p.nbytes for p in self.param_groups[0]["params"] if p.grad is not None)


class EndingSchedule(torch.optim.lr_scheduler.ConstantLR):
    """Takes 10 seconds a step, and has only two."""

    def step(self, epoch: Any = None) -> None:
        super().step()
        assert self.last_epoch <= 2
        getattr(self.optimizer, "clock", None).now_s += 10 * (self.last_epoch > 0)


@pytest.mark.parametrize("widths", [(1,), (2, 5, 3)])
def test_an_update_has_a_fixed_part_and_one_by_bytes(widths: tuple[int, ...], clock: SimpleNamespace) -> None:
    """What one parameter takes alone cannot be divided."""
    parameters, ran = [(str(width), nn.Parameter(torch.zeros(width))) for width in widths], []
    what = partial(Timed, clock=clock), parameters, HostStopwatch(torch.device("cpu")), lambda: ran.append(clock.now_s)
    cost = measure_update(*what, scheduler=EndingSchedule, warmup=1, runs=5)
    assert ran == [number * (13.0 + 4 * sum(widths)) for number in range(6)], "between the steps over all parameters"
    assert cost.update_s == 13 + 4 * sum(widths)
    assert cost.update_fixed_s == pytest.approx(13 if len(widths) > 1 else 0.0)


def test_the_optimizer_gets_the_users_names_and_no_frozen_parameter() -> None:
    module, frozen, names = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), []

    def factory(named: Any) -> torch.optim.Optimizer:
        names.extend(name for name, _ in named)
        return torch.optim.SGD(named, lr=0.1)

    layers = (pd.Layer("body.0", "Linear", ("body.0.weight", "body.0.bias")), pd.Layer("body.1", "Linear"))
    graph = pd.LayerGraph.chain((*layers, pd.Layer("body.0@2", "Linear", layers[0].parameters)))
    profile = profile_of(module, frozen, module, graph=graph, sample=(torch.randn(1, 2),), optimizer=factory)
    assert names == ["body.0.weight", "body.0.bias"]
    assert [layer.parameter_bytes for layer in profile.layers] == [24, 24, 0], "a weight counts where it is first used"


class Ticks(torch.autograd.Function):
    """Moves a clock in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: SimpleNamespace, forward_s: float, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now_s += forward_s
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.clock.now_s += ctx.backward_s
        return gradient, None, None, None


def slows(clock: SimpleNamespace, step_s: float) -> nn.Module:
    """Takes a step longer each time; its backward twice as long."""

    def forward(module: Any, x: Tensor) -> Tensor:
        module.calls += 1
        return Ticks.apply(x, clock, module.calls * step_s, 2 * module.calls * step_s)

    return Built(forward, calls=0)


def test_seconds_are_medians_of_the_runs_after_the_warm_up(clock: SimpleNamespace) -> None:
    profile = profile_of(nn.Linear(4, 4), slows(clock, 1.0), slows(clock, 10.0), warmup=2, runs=7)
    linear, *slower = profile.layers
    assert (linear.forward_s, linear.backward_s, linear.forward_spread_s) == (0.0, 0.0, 0.0)
    for layer, step_s in zip(slower, (1.0, 10.0), strict=True):
        # The first call is for the bytes, two warm up: the runs take 4 to 10 steps, their quartiles 5.5 and 8.5.
        assert (layer.forward_s, layer.forward_spread_s) == (7 * step_s, 3 * step_s)
        assert (layer.backward_s, layer.backward_spread_s) == (14 * step_s, 6 * step_s)
    assert profile.runs == 7


def test_forward_backward_and_loss_stand_in_their_own_columns(clock: SimpleNamespace) -> None:
    first, wait = profile_of(nn.Linear(4, 4), Built(lambda _, x: Ticks.apply(x, clock, 3.0, 10.0)), runs=3).layers
    assert (first.forward_s, first.backward_s) == (0.0, 0.0)
    assert (wait.forward_s, wait.backward_s) == (3.0, 10.0)
    profile = profile_of(nn.Linear(4, 4), loss=lambda output: Ticks.apply(output.sum(), clock, 3.0, 10.0), runs=3)
    assert (profile.forward_s, profile.backward_s, profile.loss_s) == (0.0, 0.0, 13.0)


def test_the_first_layer_takes_no_gradient_for_the_data_and_a_frozen_one_has_no_backward(
    clock: SimpleNamespace,
) -> None:
    for trains in (False, True):
        ticking = Built(lambda _, x: Ticks.apply(x, clock, 0.0, 1.0))
        profile = profile_of(nn.Flatten(), ticking, nn.Linear(4, 4).requires_grad_(trains), ticking)
        assert [layer.backward_s for layer in profile.layers] == [0.0, 0.0, 0.0, float(trains)]


def test_the_model_and_the_sample_are_left_as_they_were() -> None:
    modules = nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Dropout(0.5).eval(), nn.Linear(4, 2)
    modules[3].weight.grad = torch.full((2, 4), 7.0)
    x = torch.randn(8, 4)
    with unchanged(*modules, also=(x,)):
        profile_of(*modules, sample=(x,), optimizer=partial(torch.optim.SGD, lr=1.0), loss=torch.sum, runs=2)


def test_a_model_in_evaluation_mode_is_measured_in_training_mode() -> None:
    modes: list[bool] = []
    spy = nn.Identity().eval()
    spy.register_forward_hook(lambda module, *_: modes.append(module.training))
    profile_of(spy, nn.BatchNorm1d(4).eval())
    assert (set(modes), spy.training) == ({True}, False)
    modes.clear()
    profile_of(spy, nn.BatchNorm1d(4))
    assert set(modes) == {False}, "the user's choice for one of several layers"


def test_loss_device_dtype_and_versions_are_noted_and_survive_a_file() -> None:
    target = torch.tensor([0, 1, 1])
    options = {"loss": lambda output: F.cross_entropy(output, target), "autocast": torch.bfloat16, "runs": 3}
    profile = profile_of(nn.Linear(4, 2), sample=(torch.randn(3, 4),), **options)
    assert (profile.dtype, profile.device[:5], profile.layers[0].output_bytes) == ("bfloat16", "cpu: ", 3 * 2 * 2)
    assert set(profile.versions) == {"python", "torch", "pipedream"}
    assert pd.Profile.from_json(profile.to_json()) == profile
    assert profile_of(nn.Linear(4, 2).double(), sample=(torch.randn(3, 4).double(),)).dtype == "float64"


def wears_out(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    if module.calls > 3:  # the first call is for the bytes
        raise ValueError("worn out")
    return x * module.weight


def measure_worn() -> pd.Profile:
    worn = Built(wears_out, weight=nn.Parameter(torch.ones(())), calls=0)
    graph = pd.LayerGraph.chain((pd.Layer("a", "Linear", ("a.weight",)), pd.Layer("b", "Fails", ("b.weight",))))
    return profile_of(nn.Linear(4, 4), worn, graph=graph, optimizer=partial(torch.optim.SGD, lr=0.1), runs=10)


GOOD = nn.Linear(4, 4)
WRONG_RATE = partial(torch.optim.SGD, rate=1)


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda: profile_of(GOOD, nn.Linear(5, 4)), r"layer '1' \(Linear\).*shape \[2, 4\].*RuntimeError"),
        (lambda: profile_of(GOOD, loss=lambda output: output), r"the loss.*one number, found shape \(2, 4\)"),
        (lambda: profile_of(GOOD, optimizer=WRONG_RATE), r"optimizer step over 2 parameters.*TypeError"),
        (lambda: profile_of(nn.Linear(4, 4, device="meta")), r"layer '0'.*meta.*to_empty"),
        (lambda: profile_of(GOOD, device="cuda"), r"measured on cuda, but is on cpu.*model.to\('cuda'\)"),
        (lambda: profile_of(GOOD, sample=torch.randn(2, 4)), r"write \(x,\)"),
        (lambda: profile_of(GOOD, runs=0), "runs=0"),
        (lambda: profile_of(GOOD, graph=chain(GOOD, GOOD)), "found 1 modules, 2 layers"),
        (measure_worn, r"^the layer 'b' \(Fails\) should run .* raised ValueError: worn out"),
        (lambda: pd.profile(GOOD, torch.ones(8, 4), microbatches=0), "microbatches=0 was given; give at least 1"),
    ],
)
def test_each_failure_names_its_place(fails: Callable[[], object], words: str) -> None:
    with pytest.raises(pd.errors.ProfileError, match=words):
        fails()


WHOLE = [(1.0, 0.0), (3.0, 0.0), (2.0, 0.5)]


def test_the_fixed_part_of_known_seconds() -> None:
    """Of 8 samples t = 1: all fixed; t = 3: 1 fixed, 2 of them the samples'; t = 2: 0.4, less than it scatters."""
    halves = (1.0, 2.0, 1.2)
    assert fixed_s(lambda part: halves, (torch.ones(8),), 8, WHOLE, warmup=1, runs=3) == [1.0, 1.0, 0.0]
    # Of 3 samples the half is 1: t(3) = 3 = f + 3 k, t(1) = 2 = f + k: f = 1.5.
    assert fixed_s(lambda part: (2.0,), (torch.ones(3),), 3, WHOLE[1:2], warmup=0, runs=1) == [1.5]
    # A quarter: t(8) = 3 = f + 8 k, t(2) = 0.6 = f + 2 k: f = -0.2.
    quarters = fixed_s(lambda part: (0.6,), (torch.ones(8),), 8, WHOLE[1:2], warmup=0, runs=1, parts=4)
    assert quarters == pytest.approx([-0.2])

    def fails(part: Any) -> list[float]:
        raise pd.errors.ProfileError("a layer knows its batch")

    assert fixed_s(fails, (torch.ones(8),), 8, WHOLE, warmup=1, runs=3) == [0.0] * 3


def test_a_layer_of_known_fixed_time_is_measured(clock: SimpleNamespace) -> None:
    parts = (4.0, 0.0), (0.0, 1.0), (2.0, 0.5)
    layers = [Built(lambda _, x, f=f, k=k: Ticks.apply(x, clock, f + k * len(x), 0.0)) for f, k in parts]
    profile = pd.profile(nn.Sequential(*layers), torch.ones(8, 2), warmup=1, runs=3)
    assert [layer.forward_s for layer in profile.layers] == [4.0, 8.0, 6.0]
    assert [layer.forward_fixed_s for layer in profile.layers] == [4.0, 0.0, 2.0]


def _period_s(plan: pd.Plan) -> float:
    first, last = (pd.simulate(plan, minibatches=count).makespan_s for count in (8, 16))
    return (last - first) / 8


def test_splitting_pays_the_fixed_part_each_time() -> None:
    """Two stages of 1 + 1 s of which 0.5 + 0.5 are fixed, in m microbatches: (m + 1)(1 / m + 1) s under GPipe."""
    layer = pd.LayerProfile(1.0, 1.0, 0, 0, forward_fixed_s=0.5, backward_fixed_s=0.5)
    profile = pd.Profile.of_chain((layer,) * 2, batch=64)
    for m in (1, 2, 4, 8):
        plan = pd.plan(profile, pd.Cluster.flat(2), schedule="gpipe", microbatches=m, shape="straight")
        assert _period_s(plan) == pytest.approx((m + 1) * (1 / m + 1))
    best = pd.plan(profile, pd.Cluster.flat(2), schedule="auto", shape="straight")
    assert best.microbatches in (1, 2), "finer splits cost more than they hide"
    assert pd.Plan.from_json(best.to_json()) == best
    with pytest.raises(ValueError, match="cannot be greater"):
        pd.LayerProfile(1.0, 1.0, 0, 0, forward_fixed_s=2.0)


def test_layers_that_are_faster_in_small_batches_are_planned_by_the_microbatch() -> None:
    """3 s at once and 4 x 0.25 s in parts: PipeDream's cut is after the first layer, that of 1F1B in the middle."""
    slow = pd.LayerProfile(3.0, 3.0, 0, 0, forward_fixed_s=-2 / 3, backward_fixed_s=-2 / 3)
    profile = pd.Profile.of_chain((slow, *(pd.LayerProfile(1.0, 1.0, 0, 0),) * 3), batch=64)
    profile = replace(profile, parts=4)
    assert pd.Profile.from_json(profile.to_json()) == profile
    assert [profile.in_parts(m).forward_s for m in (1, 2, 4, 8)] == pytest.approx([6.0, 6.0 - 2 / 3, 4.0, 4.0])
    for schedule, m, cut, period_s in (("pipedream", None, 1, 6.0), ("gpipe", 4, 2, 5.0), ("gpipe", 8, 2, 4.5)):
        plan = pd.plan(profile, pd.Cluster.flat(2), schedule=schedule, microbatches=m, shape="straight")
        assert plan.stages[1].first == cut
        assert _period_s(plan) == pytest.approx(period_s)

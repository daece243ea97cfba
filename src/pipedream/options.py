"""The only list of training options, each with its default, its meaning and its checks.

    ModelOptions      how a model is trained, whoever runs it, with its `ChoiceOptions`
      Recipe          ... with the model and its data (`pipedream.apps.training.recipe`)
    MethodOptions     how workers run it
      PipelineOptions both: the keyword arguments of `pipedream.Pipeline`
      TrainingOptions what one run of a recipe chooses (`pipedream.apps.training.options`)

`keywords` lets a function take these fields as keyword arguments that a type checker checks.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from pipedream.core.errors import PipelineError
from pipedream.core.flags import Panel, option, option_of
from pipedream.core.plan.choices import Chooser
from pipedream.core.plan.ranks import TensorLayout
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.update_policy import Policy
from pipedream.plan_request import PlanRequest
from pipedream.services.callbacks.callbacks import Callback, monitored
from pipedream.services.failure.verdict import STUCK_AFTER_S

_ELSEWHERE = "the recipe's or the plan's"


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(Chooser):
    """What to trade otherwise than a recipe or a plan does, as in `PlanRequest` (docs/less_communication.md).

    Attributes:
        sums: a recipe's is left out where no stage has replicas.
        messages: also a pair.
        activations: 'none' keeps what the plan moves.
    """

    sums: str | None = option_of(PlanRequest, "sums", default=None, unset=_ELSEWHERE)
    messages: str | Sequence[str] | None = option_of(PlanRequest, "messages", unset=_ELSEWHERE)
    activations: str | None = option_of(PlanRequest, "activations", default=None, unset=_ELSEWHERE)
    optimizer_state: str | None = option_of(PlanRequest, "optimizer_state", unset=_ELSEWHERE)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ChoiceOptions):
    """Options of a model's training, on however many workers.

    Attributes:
        metrics: name -> ``metric(output, targets)``, which returns the samples' mean or (sum, weight); see `targets`. A
            root or F1 is refused for several microbatches; an evaluation gives its mean over batches.
        inputs: batch -> the model's input: a tuple for several, a mapping for keyword arguments; by default the first
            of a pair, else the batch. If the model computes the loss it is the whole batch, also of a pair.
        targets: batch -> what loss and metrics get besides the output. By default the second of a pair if the loss is
            one of torch's own, else the whole batch; ``targets=lambda batch: batch[1]`` lets your own be written as
            (output, targets).
        batch_dim: dimension of the samples, along which a minibatch is split into microbatches. A number for all
            inputs, or a mapping from an input's name (its position, if positional) to its dimension, None for an input
            that is not split, or 'items' for a list with an item for each sample; others have 0. Tensors that have
            another size there go to every microbatch. A mapping's number of samples is the most frequent size, else it
            is that of the first input.
        weight: batch -> number that the loss is a mean over (samples, tokens), for losses that do not return it.
        scheduler: factory from an optimizer to a learning-rate scheduler; stepped once per update, ReduceLROnPlateau
            once per evaluation.
        monitor: what a ReduceLROnPlateau follows: 'loss' or a metric's name.
        clip_grad_norm: greatest norm of an update's gradients.
        clip: 'global' (norm over all stages; flushing methods only), 'local' (each stage's norm, against
            clip_grad_norm / sqrt(stages)), or 'delayed_global': the global norm of an earlier update, for methods
            without a flush (`core.schedule.update_policy`).
        ema: decay of an exponential moving average of the weights, between 0 and 1.
        autocast: dtype of the forwards, torch.bfloat16 or 'bfloat16'.
        compile: True compiles the modules that lie within one stage with torch.compile; a text names its backend, a
            mapping holds its arguments. Compiled modules draw their own random numbers, so dropout masks differ from
            those without it, and may depend on the stages.
        on_nan: 'error' at a loss that is not a number, or weights that are not finite; 'continue' past it; or 'skip'
            updates whose gradients are not finite (docs/couplings.md).
        grad_scaler: a constant factor on the loss, or a torch.amp.GradScaler whose state is copied (needs a flush).
        sample: the model's input for one minibatch, to profile it and find its layers; by default a recipe's first
            training batch.
        compensation: correction of stale gradients in place of the method's own: one or several of
            `core.schedule.delay_compensation`, or texts: 'spike', 'nesterov', 'error_feedback', 't1:500'; () for none.
            It applies to phases that do not flush and name none themselves.
        loggers: objects with ``log_metrics(metrics, step)``, as Lightning's and those of `pipedream.loggers`, or with
            ``log(done)``. Rank 0 alone calls them, and closes them when the pipeline closes.
        callbacks: `pipedream.callbacks.Callback` objects, such as early stopping.
        phases: methods that take turns, each until a minibatch or an epoch (`Phase`), or as text
            (`services.phases`): ``"1f1b/4:200,pipedream"``. Each change drains the pipeline. Excludes schedule and
            microbatches.
        layout: how tensors are sharded over the ranks of a worker that has several (`pipedream.Layout`).
        parallelize: ``parallelize(name, layer, device_mesh)`` is called for each layer of a worker that is a mesh. It
            may call torch's `parallelize_module`, whose placements come before those of the layout.
    """

    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    inputs: Callable[[Any], Any] | None = None
    targets: Callable[[Any], Any] | None = None
    batch_dim: int | Mapping[str | int, int | str | None] = 0
    weight: Callable[[Any], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    monitor: str = "loss"
    clip_grad_norm: float | None = None
    clip: str = "global"
    ema: float | None = None
    autocast: Any = None
    compile: bool | str | Mapping[str, Any] = Panel.RUN.option(
        False, "Compile the modules that lie within one stage with torch.compile."
    )
    on_nan: str = "error"
    grad_scaler: Any = None
    sample: Any = None
    compensation: Any = Panel.METHOD.option(
        None,
        "Compensation of stale gradients: spike, nesterov, error_feedback, basis_rotation, t1:500 (smaller rates for "
        "the first 500 updates), ... or none; repeatable.",
        metavar="NAME[:NUMBER]",
        unset="the recipe's",
        kind=list[str],
        read=lambda texts: [text for text in texts if text != "none"],
    )
    loggers: Iterable[Any] = ()
    callbacks: Sequence[Callback] = ()
    phases: str | Sequence[Any] | None = Panel.METHOD.option(
        None,
        "Methods to train with in turn. M is the number of microbatches; END is the minibatch at which the method "
        "ends, or the epoch if an 'e' follows. For example 1f1b/4:200,pipedream:3e,1f1b/4.",
        metavar="METHOD[/M][+COMPENSATION]:END,...",
    )
    layout: TensorLayout | None = None
    parallelize: Callable[[str, Any, Any], Any] | None = None

    def policy(self, *, scaling: str = "") -> Policy:
        """Returns the rules that couple the stages, see `Policy`.

        Raises:
            ScheduleError: clip_grad_norm, clip, ema or on_nan has no meaning.
        """
        return Policy(self.clip_grad_norm, self.clip, self.on_nan, scaling, self.ema)

    def problems(self) -> Iterator[str]:
        """Yields errors of functions and metrics."""
        for name in ("inputs", "targets", "weight", "scheduler", "parallelize"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                yield f"{name} is {value!r}, which cannot be called{_advise_factory(value)}"
        if not isinstance(self.compile, (bool, str, Mapping)):
            yield f"compile is {self.compile!r}, neither True, a backend nor a mapping of torch.compile's arguments"
        dims = self.batch_dim.values() if isinstance(self.batch_dim, Mapping) else [self.batch_dim]
        allowed = (None, "items") if isinstance(self.batch_dim, Mapping) else ()
        if not all(type(dim) is int or dim in allowed for dim in dims):
            yield (
                f"batch_dim is {self.batch_dim!r}, neither a number nor a mapping from inputs to numbers, None or "
                "'items'"
            )
        has_callbacks = isinstance(self.callbacks, Sequence) and all(isinstance(c, Callback) for c in self.callbacks)
        if not has_callbacks:
            yield f"callbacks is {self.callbacks!r}, not a list of pipedream.callbacks.Callback objects"
        followed = {self.monitor, *monitored(self.callbacks if has_callbacks else ())}
        if not isinstance(self.metrics, Mapping) or not all(map(callable, self.metrics.values())):
            yield "metrics is not a dict of functions metric(output, batch)"
        elif wrong := followed - {"loss", *self.metrics}:
            yield f"monitor is {min(wrong)!r}, but an evaluation has {', '.join(['loss', *self.metrics])}"
        if not isinstance(self.loggers, Iterable) or isinstance(self.loggers, str):
            yield f"loggers is {self.loggers!r}, not a list of loggers"
        if self.layout is not None and not isinstance(self.layout, TensorLayout):
            yield f"layout is {self.layout!r}, not a pipedream.Layout"


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The method, and the devices of the workers.

    Attributes:
        schedule: a method's name (`pipedream show`), a CSV file of PyTorch's, or a Schedule; by default the plan's
            method, or PipeDream's.
        seed: seeds all randomness inside the layers, and a recipe; 0 by default.
        device: 'cpu', 'cuda' (each process its own: LOCAL_RANK) or 'cuda:N'.
        stuck_after_s: ends a run on several processes if an operation or the loader takes longer than this and than 20
            times its longest time so far; 0 for no limit.
        check: before the first update, compares the first minibatch (loss, gradients, buffers) with a plain run of the
            model on the same data; costs one minibatch (docs/models.md).
    """

    schedule: str | Schedule | None = None
    microbatches: int | None = option_of(PlanRequest, "microbatches")
    seed: int | None = Panel.RUN.option(
        None, "Random seed for the recipe and all layers.", unset="0, or the resumed run's"
    )
    device: str = option("cpu", "Device of the workers.", metavar="cpu|cuda")
    check: bool = Panel.RUN.option(
        True, "Compare the first minibatch (loss, gradients, buffers) with the model itself."
    )
    stuck_after_s: float = Panel.FAILURES.option(
        STUCK_AFTER_S,
        "End the run if an op or the data loader takes longer than this; 0: never.",
        "--stuck-after",
        least=0,
    )

    def __post_init__(self) -> None:
        if not self.stuck_after_s >= 0:
            raise PipelineError(f"stuck_after_s={self.stuck_after_s} was asked for; give seconds, or 0 for no limit")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(MethodOptions, ModelOptions):
    """The keyword arguments of `pipedream.Pipeline`.

    Attributes:
        loss: ``loss(output, batch)`` -> scalar tensor or (sum, weight); torch's own losses are called with (output,
            targets). None takes ``.loss`` of the model's output; microbatches are then weighted by what the torch
            losses inside the model average over.
        optimizer: factory from a list of (name, parameter) to a torch optimizer; called once per stage.
        weights: initial weights: a state dict's file (``torch.save``), safetensors, or a folder of these, of which each
            rank reads only its part; by default the model's own.
    """

    loss: Any = None
    optimizer: Callable[[list[tuple[str, Any]]], Any]
    weights: str | os.PathLike[str] | None = Panel.RUN.option(
        None, "Weights to start from: a state dict, safetensors, or a folder with the latter.", metavar="PATH"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [*self.problems(), *optimizer_problems(self.optimizer)]:
            raise PipelineError(f"the pipeline cannot be built: {'; '.join(wrong)}; see pipedream.Pipeline")


def optimizer_problems(optimizer: Any) -> Iterator[str]:
    """Yields errors of an optimizer's factory."""
    if hasattr(optimizer, "param_groups"):
        yield f"optimizer is a {type(optimizer).__name__} object{_advise_factory(optimizer)}"
    elif not callable(optimizer):
        yield f"optimizer is {optimizer!r}; give a factory, as in partial(torch.optim.SGD, lr=0.1)"


def _advise_factory(instance: Any) -> str:
    """Suggests a factory in place of a finished optimizer or scheduler."""
    kind = type(instance)
    if hasattr(instance, "param_groups"):
        settings = {k: v for k, v in instance.param_groups[0].items() if k in instance.defaults}
        several = ", for several groups a function of a list of (name, parameter)" * (len(instance.param_groups) > 1)
    elif hasattr(instance, "optimizer"):
        settings, several = dict(vars(instance)), ""
    else:
        return ""
    usual = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    settings = {
        name: value for name, value in settings.items() if name in usual and name not in ("optimizer", "last_epoch")
    }
    chosen = [f"{name}={value!r}" for name, value in settings.items() if repr(value) != repr(usual[name])]
    place = kind.__module__
    if place.startswith("torch.optim."):
        place = "torch.optim.lr_scheduler" if place.endswith("lr_scheduler") else "torch.optim"
    call = ", ".join([f"{place}.{kind.__qualname__}", *chosen])
    return f", but each stage makes its own: give a factory, as in partial({call}){several}"


def model_options(options: ModelOptions) -> dict[str, Any]:
    """Returns the fields of `ModelOptions` by name."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(ModelOptions)}


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options for JSON: functions and mappings by name; other objects are left out."""
    texts = {name: _make_plain(value) for name, value in options.items()}
    return {name: value for name, value in texts.items() if value is not ...}


def _make_plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike) or type(value).__name__ == "dtype":
        return str(value)
    if isinstance(value, (tuple, list)) and all(isinstance(item, (int, float, str)) for item in value):
        return list(value)
    if isinstance(value, Mapping):
        return sorted(map(str, value))
    if isinstance(value, partial):
        chosen = (f"{name}={setting}" for name, setting in plain(value.keywords).items())
        return f"{_make_plain(value.func)}({', '.join(chosen)})"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return ...


_Fields = ParamSpec("_Fields")
_Options = TypeVar("_Options")
_First = TypeVar("_First")
_Second = TypeVar("_Second")
_Third = TypeVar("_Third")
_Result = TypeVar("_Result")


class keywords(Generic[_Fields, _Options]):
    """Decorator that passes keyword arguments as the function's last parameter, an options dataclass.

    ``@keywords(TrainingOptions) def run(recipe, options)`` is called ``run(recipe, epochs=3, seed=1)``.
    """

    def __init__(self, options: Callable[_Fields, _Options]) -> None:
        self._options = options

    @overload
    def __call__(
        self, function: Callable[[_First, _Options], _Result]
    ) -> Callable[Concatenate[_First, _Fields], _Result]: ...

    @overload
    def __call__(
        self, function: Callable[[_First, _Second, _Third, _Options], _Result]
    ) -> Callable[Concatenate[_First, _Second, _Third, _Fields], _Result]: ...

    def __call__(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        *others, last = inspect.signature(function).parameters.values()
        names = {parameter.name for parameter in others}
        options_of = inspect.signature(self._options).parameters

        @wraps(function)
        def called(*positional: Any, **named: Any) -> _Result:
            make: Callable[..., _Options] = self._options
            fields = {name: value for name, value in named.items() if name not in names}
            if unknown := next((name for name in fields if name not in options_of), ""):
                near = "".join(f"; did you mean {name!r}?" for name in get_close_matches(unknown, options_of, n=1))
                where = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{where}() got an unexpected keyword argument {unknown!r}{near}")
            options = make(*positional[len(others) :], **fields)
            first = positional[: len(others)]
            return function(*first, **{name: named[name] for name in names & set(named)}, **{last.name: options})

        called.__signature__ = inspect.Signature([*others, *options_of.values()])  # type: ignore[attr-defined]
        return called

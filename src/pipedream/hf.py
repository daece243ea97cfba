"""A `Trainer` of transformers that trains in a pipeline (extra `hf`).

    trainer = pipedream.hf.Trainer(model, args, train_dataset=..., schedule="1f1b")
    trainer.train()

The pipeline takes the place of the Trainer's training dataloader and yields each minibatch once the weights have been
updated with it. Epochs, logs, callbacks, evaluations and checkpoints therefore remain the Trainer's own.
"""

import copy
import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import get_last_checkpoint, has_length

from pipedream.core.errors import PipelineError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.pipeline import Pipeline
from pipedream.plan_request import AUTO
from pipedream.runtime.comm.process_group import gather_json
from pipedream.runtime.data.rng import preserved_rng
from pipedream.runtime.results import Done
from pipedream.schedules import properties_of
from pipedream.services.joining.joining import run_on_rank_0
from pipedream.workflows.plan import plan as make_plan
from pipedream.workflows.profile import profile

_STATE_FILE = "trainer_state.json"  # the Trainer's own, there
_STATE = "pipeline"  # the pipeline's part of a folder checkpoint-N

# The tests have a table of the other arguments, which act as in the plain Trainer.
REFUSED_ARGUMENTS = (
    "auto_find_batch_size deepspeed enable_jit_checkpoint fp16 fsdp optim_target_modules parallelism_config "
    "use_liger_kernel"
)
_UNSPLIT = "gradient_accumulation_steps with a schedule that splits no minibatch"
_ADVICE = {  # what to write instead
    "auto_find_batch_size": "set per_device_train_batch_size",
    "deepspeed": "leave it out: the stages divide the weights",
    "enable_jit_checkpoint": "set save_strategy='steps'",
    "fp16": "set bf16=True, or give options={'autocast': 'float16', 'grad_scaler': torch.amp.GradScaler()}",
    "fsdp": "leave it out: the stages divide the weights",
    "optimizers": "give optimizer_cls_and_kwargs=(kind, {...}), or options={'optimizer': make, 'scheduler': make}",
    "create_optimizer": "give options={'optimizer': make}",
    "create_scheduler": "give options={'scheduler': make}",
    "create_optimizer_and_scheduler": "give options={'optimizer': make, 'scheduler': make}",
    _UNSPLIT: "set it to 1, or take the schedule 1f1b or pipedream_2bw",
    "lr_scheduler_type": "set lr_scheduler_type='reduce_lr_on_plateau'",
    "router_aux_loss_coef": "set it to 0",
    "training_step": "override compute_loss",
    "use_liger_kernel": "apply its layers to the model before",
}
_OWN_ARGUMENTS = (  # which have other values here, or are read ahead of the steps
    "gradient_accumulation_steps bf16 max_grad_norm ignore_data_skip save_only_model include_num_input_tokens_seen"
)
FOLLOWED_METHODS = (
    "train evaluate predict evaluation_loop prediction_step log save_model end get_train_dataloader "
    "get_eval_dataloader get_test_dataloader num_examples get_batch_samples get_decay_parameter_names "
    "get_optimizer_cls_and_kwargs add_callback pop_callback remove_callback is_local_process_zero "
    "is_world_process_zero create_model_card log_metrics metrics_format save_metrics save_state "
    "get_num_trainable_parameters _get_dataloader _get_train_sampler _get_eval_sampler _get_num_items_in_batch "
    "_evaluate _save_checkpoint _determine_best_metric _maybe_log_save_evaluate compute_loss call_model_init "
    "push_to_hub init_hf_repo _push_from_checkpoint _set_signature_columns_if_needed"
)


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` that trains in a pipeline: workers share one process, or have one each under torchrun.

    A minibatch is the batches of an update, split into ``gradient_accumulation_steps`` microbatches. During training
    the stages hold the weights; after `train` every rank has the whole model.

    Args:
        args, others: as for `transformers.Trainer`.
        plan: by default the model is profiled and planned.
        schedule: a method's name.
        workers: for the default plan; under torchrun, the number of processes.
        options: for `Pipeline`; they override those that follow from `args`.

    Attributes:
        pipeline: while `train` runs, else None.

    Raises:
        PipelineError: an argument that a pipeline cannot follow.
    """

    model: Any

    def __init__(
        self,
        model: Any = None,
        args: transformers.TrainingArguments | None = None,
        *,
        plan: Plan | None = None,
        schedule: str = "1f1b",
        workers: int = 2,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        args = args or transformers.TrainingArguments()
        parts = args.gradient_accumulation_steps
        _check(type(self), args, others, {"schedule": schedule, "microbatches": parts} | dict(options or {}))
        self.pipeline: Pipeline | None = None
        self._plan, self._schedule, self._workers, self._options = plan, schedule, workers, dict(options or {})
        self._user_args, self._open = args, ExitStack()
        self._checkpoint: Path | None = None
        self._first = -1  # number of the epoch's first minibatch
        self._late: list[dict[str, float]] = []
        self._tokens: dict[int, int] = {}  # number of an update in its epoch -> input tokens
        args = copy.copy(args)
        self._accumulated, args.gradient_accumulation_steps = args.gradient_accumulation_steps, 1
        args.bf16, args.max_grad_norm = False, 0.0  # the pipeline does both
        args.ignore_data_skip = True  # the pipeline continues at its own position
        if args.world_size > 1:  # each rank has the whole data: the pipeline divides the work
            args.save_only_model |= args.process_index > 0
            args.distributed_state.num_processes = 1
            args.distributed_state.distributed_type = type(args.distributed_state.distributed_type).NO
        super().__init__(model, args, **others)
        self._values = [dict(vars(self.args)), dict(vars(self._user_args))]
        self._optimizer_args: Any = None  # of the first train(), as in the plain Trainer
        self._from_user: _UserOptimizers | None = None
        self.accelerator.device_placement = False
        cast(Any, self.callback_handler).call_event = self._call_event

    def _follow_arguments(self, where: str) -> None:
        """Lets both copies of the arguments have what was set in one; refuses what the Trainer was built from."""
        both, changed = (self.args, self._user_args), dict[str, Any]()
        for args, before in zip(both, self._values, strict=True):
            changed |= {
                n: v for n, v in vars(args).items() if n not in before or (v is not before[n] and v != before[n])
            }
        built = {*_OWN_ARGUMENTS.split(), *REFUSED_ARGUMENTS.split()}
        if names := sorted(built & changed.keys()):
            raise PipelineError(
                f"{where} set args.{names[0]}, which a pipeline follows only if it is set before the Trainer is made; "
                "make a new Trainer"
            )
        for args in both:
            vars(args).update(changed)
        self._values = [dict(vars(args)) for args in both]

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **options: Any) -> Any:
        self._follow_arguments("what ran before train()")
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # type: ignore[no-untyped-call]
        self._checkpoint = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        _check_training(self, self._user_args, self.callback_handler.callbacks, resumes=bool(resume_from_checkpoint))
        make, attributes = self.get_train_dataloader, vars(self)
        attributes["get_train_dataloader"] = lambda: _Stream(self, self._make_loader(make))
        try:
            with self._open:
                output = super().train(resume_from_checkpoint, *others, **options)
                assert self.pipeline is not None
                if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
                    self.pipeline.load(Path(self.state.best_model_checkpoint) / _STATE)
                state = self._collect_weights(self.pipeline)
        finally:
            self.pipeline = None
            del attributes["get_train_dataloader"]
        self.model.load_state_dict(state, assign=True)
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            if buffer.is_meta:  # of another rank's stage, and in no state dict
                module, _, attribute = name.rpartition(".")
                setattr(self.model.get_submodule(module), attribute, self._first_buffers[name])
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()
        return output

    def _make_loader(self, make: Callable[[], Any]) -> Any:
        """Returns the loader; the samples of an update's batches are collated together, if there are several."""
        collate, steps = self.data_collator, self._accumulated
        self.data_collator = cast(Any, list) if steps > 1 else collate
        self.args.gradient_accumulation_steps = steps  # samplers read it
        try:
            self._loader = make()
        finally:
            self.data_collator, self.args.gradient_accumulation_steps = collate, 1
        return self._loader

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) * self._accumulated

    def _call_event(self, event: str, args: Any, state: Any, control: Any, **options: Any) -> Any:
        """Calls callbacks, with the user's arguments; refuses what they change where nothing would follow it."""
        if event == "on_step_end":
            state.epoch = self._done["epoch"]
        before = _list_rates(self)
        control = cast(Any, transformers.trainer_callback.CallbackHandler).call_event(
            self.callback_handler, event, self._user_args, state, control, **options
        )
        if self.pipeline is not None and before != _list_rates(self):
            raise PipelineError(
                f"a callback's {event} changed the optimizer or its schedule, which no stage follows; "
                "set them in TrainingArguments, or use pipedream.Pipeline(scheduler=...)"
            )
        self._follow_arguments(f"a callback's {event}")
        stops = control.should_training_stop or control.should_epoch_stop
        if stops and event == "on_step_begin" and self._accumulated > 1:
            raise PipelineError("a callback's on_step_begin stops within an update; stop in on_step_end")
        return control

    def _collect_weights(self, pipeline: Pipeline) -> dict[str, Any]:
        """Returns the whole model's weights on every rank."""
        state, whole = pipeline.state_dict(), {}
        for name, value in self.model.state_dict().items():
            whole[name] = state.get(name, torch.empty_like(value, device="cpu")).to(self.args.device)
            if pipeline.distributed:
                torch.distributed.broadcast(whole[name], 0)
        return whole

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Opens the pipeline; returns a dummy optimizer, which only carries the learning rates that callbacks see."""
        self.model.train()
        self._optimizer_args = self._optimizer_args or copy.copy(self.args)
        self._first_buffers = dict(self.model.named_buffers(remove_duplicate=False))
        self._from_user = self._from_user or _UserOptimizers.read(self.model, self.optimizer, self.lr_scheduler)
        self.pipeline = self._open.enter_context(self._make_pipeline())
        self._group = torch.distributed.new_group(backend="gloo") if self.pipeline.distributed else None
        if self._checkpoint is not None:
            self.pipeline.load(self._checkpoint / _STATE)
            self._late = list(self.pipeline.extra["late"])
            if has_length(self._loader):  # as the plain Trainer counts, also if a callback had ended an epoch
                done, updates = self.state.global_step + len(self._late), -(-len(self._loader) // self._accumulated)
                self.pipeline._training.seek(*divmod(done, updates))
        self.model_wrapped = torch.nn.Module()  # the loop around a pipeline touches no gradients
        self.accelerator._models.append(self.model_wrapped)  # an evaluation prepares nothing
        trial = self._make_optimizer([("dummy", torch.zeros(1, requires_grad=True))])
        rates = [{n: group[n] for n in ("lr", "initial_lr") if n in group} for group in trial.param_groups]
        groups = [{"params": [torch.zeros(1, requires_grad=True)], **rate} for rate in rates]
        self.optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate)
        if self._from_user.scheduler is not None:
            self.lr_scheduler = self._make_scheduler(self.optimizer)
            if [group["lr"] for group in self.optimizer.param_groups] != self._from_user.rates:
                raise _refuse_given("the optimizer's rates are not those at the scheduler's first step")
        return self.optimizer

    def _make_pipeline(self) -> Pipeline:
        args, loader = self._user_args, self._loader
        with preserved_rng(loader):
            sample = next(iter(_Batches(self, loader, 0, 1)))
        accumulated = min(self._accumulated, find_batch_size(sample) or 1)  # type: ignore[no-untyped-call]
        own_loss = _find_own_loss(self, sample)
        options: dict[str, Any] = {
            "schedule": self._schedule,
            "microbatches": accumulated if accumulated > 1 else None,
            "optimizer": self._make_optimizer,
            "scheduler": self._make_scheduler,
            "clip_grad_norm": args.max_grad_norm or None,
            "autocast": "bfloat16" if args.bf16 else None,
            "seed": args.seed,
            "device": args.device.type,
            "sample": own_loss["inputs"](sample) if own_loss else sample,
        }
        options |= own_loss | self._options
        if self._plan is None:
            self._plan = _plan_first(self, options)
        # Layers are found in this sample: a user's plan is of a batch without the number of items.
        return Pipeline(self.model, replace(self._plan, graph=None), **options)

    def _make_optimizer(self, named: list[tuple[str, Any]]) -> Any:
        """Makes a stage's optimizer with all groups of the whole model's: those given, or with and without decay."""
        recipe, args = cast(_UserOptimizers, self._from_user), self._optimizer_args
        if recipe.optimizer is not None:
            (kind, options), places, groups = recipe.optimizer, recipe.places, copy.deepcopy(recipe.groups)
        else:
            decaying = set(self.get_decay_parameter_names(self.model))
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(args, self.model)
            places, groups = {n: int(n not in decaying) for n, _ in named}, [{"weight_decay": args.weight_decay}]
            groups.append({"weight_decay": 0.0})
        for place, group in enumerate(groups):  # perhaps none: schedulers count groups, and logs have the first's rate
            group["params"] = [value for name, value in named if places.get(name, 0) == place]
        return kind(groups, **options)

    def _make_scheduler(self, optimizer: Any) -> Any:
        scheduler = cast(_UserOptimizers, self._from_user).scheduler
        if scheduler is not None:
            return scheduler[0](optimizer, **scheduler[1])

        def make(steps: int) -> Any:
            options: Any = self.args.lr_scheduler_kwargs
            warmup = self.args.get_warmup_steps(steps)
            kind = self.args.lr_scheduler_type
            return transformers.get_scheduler(kind, optimizer, warmup, steps, scheduler_specific_kwargs=options)

        saved = self._checkpoint and transformers.TrainerState.load_from_json(str(self._checkpoint / _STATE_FILE))
        scheduler = make(self.state.max_steps)
        if not saved or saved.max_steps == self.state.max_steps or isinstance(scheduler, ReduceLROnPlateau):
            return scheduler
        before, scheduler = make(saved.max_steps), make(self.state.max_steps)
        pairs = zip(before.lr_lambdas, scheduler.lr_lambdas, strict=True)
        scheduler.lr_lambdas = [partial(_change_schedule, saved.global_step, *pair) for pair in pairs]
        return scheduler

    def training_step(self, model: Any, inputs: Mapping[str, Any], *others: Any) -> torch.Tensor:
        """Returns the loss of a minibatch that the pipeline has trained."""
        self._done = inputs
        return torch.tensor(inputs["loss"], device=self.args.device)

    def _get_learning_rate(self) -> float:
        return float(self._done["rate"])

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        self.state.num_input_tokens_seen += int(inputs["tokens"])

    def _count_tokens(self, batches: Sequence[Any]) -> int:
        counter: Any = copy.copy(self)
        counter.state = transformers.TrainerState()
        for batch in batches:
            super(Trainer, counter)._track_num_input_tokens(batch)  # type: ignore[no-untyped-call]
        return int(counter.state.num_input_tokens_seen)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # not counted

    def evaluation_loop(self, *positional: Any, **options: Any) -> Any:
        if self.pipeline is None:
            return super().evaluation_loop(*positional, **options)
        self.pipeline.drain()  # so that the model has its newest weights
        output = super().evaluation_loop(*positional, **options)
        if self.pipeline.distributed:  # rank 0 has the outputs; callbacks decide by the metrics on every rank
            output = output._replace(metrics=gather_json(output.metrics, self._group)[0])
        return output

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and self.pipeline is not None and not skip_scheduler:
            name = str(self.args.metric_for_best_model).removeprefix("eval_")
            self.pipeline.followed.step_schedulers(metrics[f"eval_{name}"])
        return metrics

    def prediction_step(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
        if self.pipeline is None:
            return super().prediction_step(model, inputs, *others, **options)
        pipeline = self.pipeline

        def run(**inputs: Any) -> Any:
            for output in [*pipeline.predict([inputs])]:
                return output
            raise _Recorded  # rank 0 has the output

        try:
            return super().prediction_step(cast(Any, _Called(self.model, run)), inputs, *others, **options)
        except _Recorded:
            return None, None, None

    def log(self, logs: dict[str, float], *others: Any) -> None:
        for name in ("grad_norm", "total_flos"):  # nobody counts them
            logs.pop(name, None)
        super().log(logs, *others)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.pipeline is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or str(self.args.output_dir))
        self.pipeline.save_pretrained(folder)
        if self.args.should_save:
            torch.save(self._user_args, folder / "training_args.bin")
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
        if _internal_call and not self._user_args.save_only_model:  # of a checkpoint
            self.pipeline.drain()
            late = [_read_done(self, done) for done in self.pipeline.ready]
            if self.args.should_save:
                shutil.rmtree(folder / _STATE, ignore_errors=True)  # of an earlier run, which the Trainer overwrites
            self.pipeline.save(folder / _STATE, extra={"late": late})


class _UserOptimizers(NamedTuple):
    """What `optimizers=` has, to be made anew on each stage: classes and their arguments; None where it has none.

    Attributes:
        groups: the options of each parameter group.
        places: a weight's name -> its group.
        rates: of the groups, after the scheduler's first step.
    """

    optimizer: tuple[Any, dict[str, Any]] | None = None
    scheduler: tuple[Any, dict[str, Any]] | None = None
    groups: Sequence[dict[str, Any]] = ()
    places: Mapping[str, int] = {}
    rates: Sequence[Any] = ()

    @classmethod
    def read(cls, model: Any, optimizer: Any, scheduler: Any) -> "_UserOptimizers":
        if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
            raise PipelineError("optimizers= has a scheduler of another optimizer, which changes no rate; give both")
        if optimizer is None:
            return cls()
        if optimizer.state or any(vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
            raise _refuse_given(f"{type(optimizer).__name__} has state, or hooks")
        places = {id(weight): n for n, group in enumerate(optimizer.param_groups) for weight in group["params"]}
        weights = dict(model.named_parameters(remove_duplicate=False))
        if places.keys() - {id(weight) for weight in weights.values()}:
            raise _refuse_given("the optimizer has a weight that is not the model's")
        if names := [name for name, weight in weights.items() if weight.requires_grad and id(weight) not in places]:
            raise PipelineError(f"optimizers= has {names[0]} in no group; freeze it with requires_grad_(False)")
        groups = [{n: v for n, v in g.items() if n not in ("params", "param_names")} for g in optimizer.param_groups]
        rates, rule = [group["lr"] for group in groups], None
        if scheduler is not None:
            if scheduler.last_epoch:
                raise _refuse_given(f"{type(scheduler).__name__} has made steps")
            state = vars(scheduler) | {"last_epoch": -1}
            state |= {name: state[f"{name}s"] for name in ("lr_lambda", "min_lr") if f"{name}s" in state}
            rule = type(scheduler), _collect_arguments(scheduler, state)
            for group in groups:  # its first step has changed the other
                group["lr"] = group.get("initial_lr", group["lr"])
        named = {name: places[id(weight)] for name, weight in weights.items() if id(weight) in places}
        return cls((type(optimizer), _collect_arguments(optimizer, optimizer.defaults)), rule, groups, named, rates)


def _collect_arguments(instance: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments, after the first, from which an instance was made; refuses those that it does not keep."""
    names = [*inspect.signature(type(instance)).parameters][1:]
    if missing := [name for name in names if name not in values]:
        raise _refuse_given(f"{type(instance).__name__} does not keep its argument {missing[0]}")
    return {name: values[name] for name in names}


def _refuse_given(what: str) -> PipelineError:
    return PipelineError(f"optimizers= cannot be made anew on each stage: {what}; {_ADVICE['optimizers']}")


class _Recorded(Exception):
    """Ends a loss that has called the model."""


class _Called:
    """Stands for the model in `compute_loss`; its output is computed elsewhere."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *positional: Any, **inputs: Any) -> Any:
        return self._call(*positional, **inputs)


def _list_rates(trainer: Trainer) -> str:
    groups = trainer.optimizer.param_groups if trainer.optimizer is not None else []
    rates = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    schedule = vars(trainer.lr_scheduler).items() if trainer.lr_scheduler is not None else ()
    return repr((rates, [item for item in schedule if item[0] != "optimizer"]))


def _change_schedule(
    resumed_at: int, before: Callable[[int], float], after: Callable[[int], float], step: int
) -> float:
    """Returns a rate's factor: at first that of the checkpoint's schedule, as in the plain Trainer."""
    return before(step) if step == resumed_at else after(step)


def _plan_first(trainer: Trainer, options: Mapping[str, Any]) -> Plan:
    """Plans; keeps profile and plan in the output folder, so that a resumed run measures nothing."""
    folder, device = Path(str(trainer.args.output_dir)), options["device"]
    file = (trainer._checkpoint.parent if trainer._checkpoint else folder) / "profile.json"

    def read_profile() -> str:
        return file.read_text(encoding="utf-8") if trainer._checkpoint and file.is_file() else ""

    text = run_on_rank_0(read_profile, device)
    measured = Profile.from_json(text, str(file)) if text else profile(trainer.model, options["sample"], device=device)
    plan = make_plan(
        measured,
        None if torch.distributed.is_initialized() else Cluster.local(trainer._workers),
        shape="pipeline",
        schedule=trainer._schedule,
        microbatches=options["microbatches"],
    )
    if trainer.args.should_save:
        measured.save(folder / "profile.json")
        plan.save(folder / "plan.json")
    return plan


def _find_own_loss(trainer: Trainer, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options that compute the Trainer's loss in the last stage; none if the model computes it."""
    if not _has_own_loss(trainer):
        return {}
    calls: list[dict[str, Any]] = []

    def record(*positional: Any, **inputs: Any) -> None:
        if positional:
            raise PipelineError("compute_loss calls the model with positional arguments; give their names")
        calls.append(inputs)
        raise _Recorded

    with suppress(_Recorded):
        _compute_loss(trainer, record, sample)
    if not calls:
        raise PipelineError("compute_loss does not call the model; let it call model(**inputs), once")
    changed = {name: value for name, value in calls[0].items() if value is not sample.get(name)}
    for name, value in changed.items():
        if isinstance(value, torch.Tensor):
            raise PipelineError(
                f"compute_loss gives the model another {name!r} than the batch has; make it in the data collator"
            )
    if _divides_by_items(trainer, sample) and _count_items(trainer, sample) != int(sample["num_items_in_batch"]):
        raise PipelineError("get_batch_samples counts other items than the labels, as a loss of the Trainer needs them")
    names = calls[0].keys() - changed.keys()
    return {
        "inputs": lambda batch: {name: item for name, item in batch.items() if name in names} | changed,
        "loss": lambda output, batch: _compute_loss(trainer, lambda **_: output, batch),
        "weight": partial(_count_items, trainer) if _divides_by_items(trainer, sample) else None,
    }


def _has_own_loss(trainer: Trainer) -> bool:
    overrides = getattr(trainer.compute_loss, "__func__", None) is not transformers.Trainer.compute_loss
    return overrides or trainer.label_smoother is not None or trainer.compute_loss_func is not None


def _compute_loss(trainer: Trainer, call: Callable[..., Any], batch: Mapping[str, Any]) -> Any:
    """Returns the loss of a microbatch, a mean over its items."""
    inputs = dict(batch)
    items = inputs.pop("num_items_in_batch", None)
    loss = trainer.compute_loss(cast(Any, _Called(trainer.model, call)), inputs, num_items_in_batch=items)
    # Divided by the items of the whole update.
    return loss * items / max(_count_items(trainer, batch), 1) if _divides_by_items(trainer, batch) else loss


def _divides_by_items(trainer: Trainer, batch: Mapping[str, Any]) -> bool:
    stated = getattr(trainer, "loss_is_scaled_for_ga", None)
    is_scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None if stated is None else stated
    return bool(is_scaled) and "num_items_in_batch" in batch


def _count_items(trainer: Trainer, batch: Mapping[str, Any]) -> int:
    return int(trainer._get_num_items_in_batch([batch], trainer.args.device))  # type: ignore[arg-type]


class _Stream:
    """The finished minibatches of a pipeline, as a loader: each "batch" is what is known of one."""

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self._trainer, self._loader, self._epoch = trainer, loader, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return -(-len(self._loader) // self._trainer._accumulated)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, float]]:
        trainer, pipeline = self._trainer, self._trainer.pipeline
        assert pipeline is not None
        done_before = trainer.state.global_step + len(trainer._late)
        while trainer._late:  # of minibatches that a checkpoint has in its weights, and the Trainer has yet to count
            yield trainer._late.pop(0)
        if pipeline.position[0] > self._epoch:
            return
        if pipeline.position[0] < self._epoch:  # a callback ended that epoch
            pipeline._training.seek(self._epoch, 0)
        steps = trainer.state.max_steps - done_before + pipeline.position[1]
        trainer._first = pipeline.drain() - pipeline.position[1]
        trainer._tokens.clear()
        trainer.model.train()  # as the plain Trainer does before each batch
        for done in pipeline.train(_Batches(trainer, self._loader, self._epoch, steps)):
            yield _read_done(trainer, done)
            trainer.model.train()


def _read_done(trainer: Trainer, done: Done) -> dict[str, float]:
    """Returns what the Trainer needs of a finished minibatch."""
    update, steps = done.number - trainer._first, trainer._accumulated
    total = len(trainer._loader) if has_length(trainer._loader) else trainer.state.max_steps * steps
    end, tokens = min((update + 1) * steps, total), trainer._tokens.get(update, 0)
    if trainer._group is not None and trainer.args.include_num_input_tokens_seen != "no":
        tokens = max(gather_json(tokens, trainer._group))  # only ranks that read the data count
    return {"loss": done.loss, "tokens": tokens, "rate": done.rate, "epoch": done.epoch + end / total}


class _Batches:
    """An epoch's minibatches up to the last step, with the number of items by which the Trainer divides a loss."""

    def __init__(self, trainer: Trainer, loader: Any, epoch: int, steps: int) -> None:
        self._trainer, self._loader, self._epoch, self._steps = trainer, loader, epoch, steps

    def __iter__(self) -> Iterator[Any]:
        trainer, steps = self._trainer, self._trainer._accumulated
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(self._epoch)
        batches = iter(self._loader)
        for update in range(self._steps):
            group = [*islice(batches, steps)]
            if not group:
                return
            if len(group) < steps and not has_length(self._loader):
                raise PipelineError(
                    f"the data ended after {len(group)} of an update's {steps} batches, which the plain Trainer adds "
                    "to the next update; give data with a length, or of whole updates"
                )
            collate = trainer.data_collator
            if trainer.args.include_num_input_tokens_seen != "no":
                trainer._tokens[update] = trainer._count_tokens(group if steps == 1 else [*map(collate, group)])
            batch = group[0] if steps == 1 else collate([*chain(*group)])
            (batch,), items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
            counted = (trainer.model_accepts_loss_kwargs or _has_own_loss(trainer)) and items is not None
            yield {**batch, "num_items_in_batch": items} if counted else batch


def _check(
    kind: type[Trainer],
    args: transformers.TrainingArguments,
    others: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Refuses what is set, or overridden, and not followed."""
    schedule, splits = options["schedule"], (options["microbatches"] or 1) > 1
    config: Any = args.accelerator_config
    bases = kind.__mro__[: kind.__mro__.index(transformers.Trainer)]
    place = bases.index(Trainer)
    # What a base after this class overrides is not called where this class has its own.
    overridden = {n for base in bases[:place] for n in vars(base)}
    overridden |= {n for base in bases[place + 1 :] for n in vars(base)} - vars(Trainer).keys()
    accumulates = overridden & {"get_train_dataloader", "get_batch_samples"} and args.gradient_accumulation_steps > 1
    refused = {name: getattr(args, name, None) or others.get(name) for name in REFUSED_ARGUMENTS.split()} | {
        "activation_offloading": getattr(args, "activation_offloading", False),  # of SFTTrainer
        "optim": "lomo" in args.optim,
        "lr_scheduler_type": args.lr_scheduler_type == "greedy",
        "gradient_accumulation_kwargs": config.gradient_accumulation_kwargs,
        "load_best_model_at_end with save_only_model": args.load_best_model_at_end and args.save_only_model,
        "gradient_accumulation_steps with a get_train_dataloader or get_batch_samples of your own": accumulates,
        _UNSPLIT: splits and schedule != AUTO and not properties_of(schedule).splits_minibatch,
    }
    _refuse(refused, overridden)


def _check_training(trainer: Trainer, args: Any, callbacks: Sequence[Any], resumes: bool) -> None:
    """Refuses what can be set after the Trainer was made."""
    refused = {
        f"{type(callback).__name__}.{event}": getattr(type(callback), event)
        is not getattr(transformers.TrainerCallback, event)
        for callback in callbacks
        if not type(callback).__module__.startswith("transformers.")
        for event in ("on_pre_optimizer_step", *["on_substep_end"] * (args.gradient_accumulation_steps > 1))
    }
    refused["router_aux_loss_coef"] = getattr(trainer, "aux_loss_enabled", False)  # of SFTTrainer
    refused["ignore_data_skip with resume_from_checkpoint"] = resumes and args.ignore_data_skip
    refused["a second train(), which needs the first one's optimizer,"] = not resumes and trainer._first >= 0
    _refuse(refused, set(vars(trainer)))


def _refuse(refused: Mapping[str, Any], replaced: set[str]) -> None:
    names = {name: name for name, value in refused.items() if value}
    for name in sorted(replaced.difference(FOLLOWED_METHODS.split(), ["loss_is_scaled_for_ga"])):
        if hasattr(transformers.Trainer, name) and not name.startswith("__"):
            names[name] = f"a {name} of your own"
    if names:
        default = "leave it out, or use pipedream.Pipeline"
        texts = [f"{text}: not possible in a pipeline; {_ADVICE.get(name, default)}" for name, text in names.items()]
        raise PipelineError("\n".join(texts))

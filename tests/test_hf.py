"""The Trainer of transformers, trained in a pipeline: what its users see is what they see of the plain one."""

import dataclasses
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from marks import slow, thinned
from torch import Tensor, nn

import pipedream as pd
from pipedream.apps.training.job import profile_recipe

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::FutureWarning",
        "ignore:.*pin_memory.*:UserWarning",
        "ignore:the loader's batch has",
        "ignore:Cannot (locate|pickle):Warning",
    ),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed; pip install accelerate"),
]
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed; pip install trl")


def libraries() -> tuple[Any, Any]:
    """Returns transformers, whose import takes seconds that most runners need not spend, and what is for it."""
    return import_module("transformers"), import_module("pipedream.hf")


def make_data(samples: int) -> list[dict[str, Tensor]]:
    rows = torch.randint(1, 32, (samples, 8), generator=torch.Generator().manual_seed(1))
    labels = rows.clone()
    labels[::3, :3] = -100  # padding, so that microbatches weigh differently
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]))}


def make_tokenizer() -> Any:
    tokenizers = import_module("tokenizers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, "w0")
    make = libraries()[0].PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0", eos_token="w1")


SETTINGS: dict[str, Any] = {
    **{"per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 1e-2, "lr_scheduler_type": "cosine"},
    **{"logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False},
}


class Words(nn.Module):
    """A model of words whose loss is over `num_items_in_batch`."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.norm = nn.Embedding(32, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.head, self.ones = nn.Linear(6, 32), nn.Buffer(torch.ones(6), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **rest: Any) -> dict[str, Tensor]:
        logits = self.head(self.norm(torch.tanh(self.inner(self.embed(input_ids) * self.ones))))
        items = rest.get("num_items_in_batch")
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="mean" if items is None else "sum")
        return {"loss": loss if items is None else loss / items, "logits": logits}

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(state_dict, folder / "model.safetensors")


@cache
def make_plan(schedule: str, microbatches: int | None) -> pd.Plan:
    profile = pd.profile(Words().double(), torch.utils.data.default_collate(make_data(8)), runs=1)
    return pd.plan(profile, pd.Cluster.flat(2), shape="pipeline", schedule=schedule, microbatches=microbatches)


def squares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses = outputs["logits"].square().sum(-1)[labels != -100]
    return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(make_data(self.samples))


def make_trainer(
    kind: str,
    folder: Path,
    samples: Any = 9,
    callbacks: Any = (),
    methods: Any = None,
    rest: Any = None,
    optimizers: Callable[[nn.Module], Any] = lambda _: (None, None),
    **changes: Any,
) -> Any:
    """Returns a Trainer of `Words`: "plain" or of a "pipeline", with `methods` of that base."""
    transformers, hf = libraries()
    base = hf.Trainer if kind == "pipeline" else transformers.Trainer
    settings = SETTINGS | {"gradient_accumulation_steps": 4, "save_strategy": "no"}
    args = transformers.TrainingArguments(str(folder / base.__module__), **settings | changes)
    trainer_class = type("Own", (base,), {name: method(base) for name, method in (methods or {}).items()})
    rest = rest or {}
    if kind == "pipeline":
        steps = args.gradient_accumulation_steps
        rest = {"plan": make_plan(rest.get("schedule", "1f1b"), steps if steps > 1 else None)} | rest
    model = Words().double().eval()  # as from_pretrained leaves it
    return trainer_class(
        model,
        args,
        optimizers=optimizers(model),
        train_dataset=make_data(samples) if isinstance(samples, int) else samples,
        eval_dataset=make_data(5),
        callbacks=[callback() for callback in callbacks],
        **rest,
    )


def run(kind: str, folder: Path, resume: str | None = None, **options: Any) -> Any:
    """Returns a Trainer after its training."""
    trainer = make_trainer(kind, folder, **options)
    trainer.train(**{} if resume is None else {"resume_from_checkpoint": f"{trainer.args.output_dir}/{resume}"})
    return trainer


KWARGS, SAVING = "gradient_accumulation_kwargs", {"save_strategy": "steps", "save_steps": 2}
BEST = SAVING | {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
UNTIMED = ("runtime", "_per_second", "grad_norm", "total_flos")


def assert_same(folder: Path, **options: Any) -> Any:
    """Logs, state and weights are those of the plain Trainer; returns this one."""
    plain, trainer = (run(kind, folder, **options) for kind in ("plain", "pipeline"))
    histories = [
        [{k: v for k, v in entry.items() if not k.endswith(UNTIMED)} for entry in each.state.log_history]
        for each in (trainer, plain)
    ]
    assert len(histories[0]) == len(histories[1])
    for entry, expected in zip(*histories, strict=True):
        assert entry == pytest.approx(expected, abs=1e-5)  # losses are logged in float32
    for name in ("global_step", "epoch", "max_steps", "num_input_tokens_seen"):
        assert getattr(trainer.state, name) == pytest.approx(getattr(plain.state, name)), name
    expected_weights = plain.model.state_dict()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=1e-8)
    return trainer


def acting(event: str, step: int, act: Callable[..., Any]) -> Callable[[], Any]:
    """Returns a class of callbacks that `act` on (control, optimizer, scheduler, args) at a step's event."""
    transformers, _ = libraries()

    def at_event(self: Any, args: Any, state: Any, control: Any, **options: Any) -> None:
        if state.global_step == step:
            act(control, options["optimizer"], options["lr_scheduler"], args)

    return type("Acting", (transformers.TrainerCallback,), {event: at_event})


def setting(*names: str) -> Callable[..., None]:
    return lambda control, *_: [setattr(control, name, True) for name in names]  # type: ignore[return-value]


def giving(kind: str = "", **of_scheduler: Any) -> Callable[[nn.Module], Any]:
    """Returns what makes `optimizers=`: groups that decay and that do not, each in one stage, and a scheduler."""

    def make(model: Any) -> tuple[Any, Any]:
        weights = [*model.parameters()]
        groups = [
            {"params": weights[:3], "weight_decay": 0.1, "lr": 0.03},
            {"params": weights[3:], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))
        return optimizer, getattr(torch.optim.lr_scheduler, kind)(optimizer, **of_scheduler) if kind else None

    return make


PLATEAU = {"patience": 0, "factor": 0.5, "threshold": 0.9}
SAME: dict[str, dict[str, Any]] = {
    **{f"drop_last, {n}": {"samples": n, "dataloader_drop_last": True} for n in (2, 3, 7, 9, 10, 16)},
    **{f"all, {n}": {"samples": n} for n in (1, 3, 7, 10)},
    "max_steps": {"samples": 10, "max_steps": 5, "dataloader_drop_last": True},
    "half an epoch": {"samples": 18, "num_train_epochs": 1.5},
    "without accumulation": {"gradient_accumulation_steps": 1, "dataloader_drop_last": True},
    "stream": {"samples": Stream(16), "max_steps": 5},
    "stream, without accumulation": {"samples": Stream(5), "max_steps": 8, "gradient_accumulation_steps": 1},
    "rebalanced": {"samples": 18, "train_sampling_strategy": "batch_rebalance"},
    "by length": {"samples": 18, "train_sampling_strategy": "group_by_length"},
    "tokens": {"include_num_input_tokens_seen": "all"},
    "tokens without padding": {"include_num_input_tokens_seen": "non_padding"},
    "rate": {"rest": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}},
    "optimizer": {"optim": "adafactor", "weight_decay": 0.1, "max_grad_norm": 0.0},
    "evaluations": {"eval_strategy": "epoch", "eval_on_start": True, "rest": {"compute_metrics": accuracy}},
    "evaluations by steps": {"eval_strategy": "steps", "eval_steps": 1, "logging_strategy": "epoch"},
    "best": BEST | {"learning_rate": 0.2, "save_total_limit": 1},
    "smoothed": {"label_smoothing_factor": 0.1, "eval_strategy": "epoch"},
    "loss": {"rest": {"compute_loss_func": squares}, "eval_strategy": "epoch", "samples": 18},
    "bfloat16": {"bf16": True, "max_steps": 3},
    "schedule": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}, "warmup_steps": 1},
    "plateau": {
        **{"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": PLATEAU | {"min_lr": [1e-3, 3e-3]}},
        **{"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "rest": {"compute_metrics": accuracy}},
        **{"metric_for_best_model": "accuracy", "num_train_epochs": 4},
    },
    "given optimizer": {"optimizers": giving(), "warmup_steps": 1},
    "given lambdas": {
        "optimizers": giving("LambdaLR", lr_lambda=[lambda step: (step + 1) / 9, lambda step: 0.7**step])
    },
    "given rates": {"optimizers": giving("LinearLR", total_iters=3), "num_train_epochs": 3},
    "given plateau": {"optimizers": giving("ReduceLROnPlateau", **PLATEAU), "metric_for_best_model": "eval_loss"}
    | {"eval_strategy": "epoch", "num_train_epochs": 4},
}


@pytest.mark.parametrize("name", thinned(SAME, 9))
def test_it_is_the_plain_trainer(tmp_path: Path, name: str) -> None:
    """Numbers of updates, logs and weights, however the data divides."""
    trainer = assert_same(tmp_path, **SAME[name])
    assert trainer.model.training or SAME[name].get("eval_strategy")


EPOCHS: dict[str, Any] = {"samples": 18, "num_train_epochs": 3}
ACTS: dict[str, tuple[str, int, Callable[..., None], dict[str, Any]]] = {
    "epoch": ("on_step_end", 1, setting("should_epoch_stop"), EPOCHS),
    "epoch, evaluated": ("on_step_end", 2, setting("should_epoch_stop"), EPOCHS | {"eval_strategy": "epoch"}),
    "training": ("on_step_end", 2, setting("should_training_stop"), EPOCHS),
    "log and evaluation": ("on_step_end", 2, setting("should_log", "should_evaluate"), {"logging_steps": 50}),
    "save": ("on_step_end", 2, setting("should_save"), {}),
    "at its begin": ("on_step_begin", 2, setting("should_training_stop"), {"gradient_accumulation_steps": 1}),
}


@pytest.mark.parametrize("name", thinned(ACTS))
def test_what_a_callback_orders_is_done(tmp_path: Path, name: str) -> None:
    event, step, act, changes = ACTS[name]
    assert_same(tmp_path, callbacks=[acting(event, step, act)], **changes)


def clip(*of_trainer: Any) -> None:
    of_trainer[-1].max_grad_norm = 0.01


UNFOLLOWED: dict[str, tuple[str, Callable[..., Any], str]] = {
    "rate": ("on_step_end", lambda _, optimizer, *__: optimizer.param_groups[0].update(lr=0), "changed the optimizer"),
    "scheduler": (
        "on_log",
        lambda _, __, scheduler, ___: setattr(scheduler, "base_lrs", [1e-9 for _ in scheduler.base_lrs]),
        "on_log changed the optimizer or its schedule",
    ),
    "clipping": ("on_step_end", clip, r"on_step_end set args.max_grad_norm, which .* make a new Trainer"),
    "accumulation": ("on_step_end", lambda *of: setattr(of[-1], "gradient_accumulation_steps", 2), "make a new Trai"),
    "half an update": ("on_step_begin", setting("should_training_stop"), "stops within an update; stop in on_step_end"),
    "gradients": ("on_pre_optimizer_step", clip, "Acting.on_pre_optimizer_step: not possible in a pipeline"),
    "parts of an update": ("on_substep_end", clip, "Acting.on_substep_end: not possible in a pipeline"),
}


@pytest.mark.parametrize("name", thinned(UNFOLLOWED))
def test_what_a_callback_cannot_change_is_an_error(tmp_path: Path, name: str) -> None:
    event, act, message = UNFOLLOWED[name]
    with pytest.raises(pd.PipelineError, match=message):
        run("pipeline", tmp_path, callbacks=[acting(event, 1, act)])


def with_items_doubled(base: Any) -> Any:
    def get_batch_samples(self: Any, *positional: Any) -> Any:
        samples, items = base.get_batch_samples(self, *positional)
        return samples, None if items is None else 2 * items  # of an epoch's end

    return get_batch_samples


def with_own_prediction(base: Any) -> Any:
    def prediction_step(self: Any, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs["loss"], outputs["logits"], inputs["labels"]

    return prediction_step


def with_own_loss(act: Callable[[Any, Any], Any] = lambda model, inputs: model(**inputs)) -> Callable[[Any], Any]:
    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **how: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = act(model, inputs)
        loss = squares(outputs, labels, **how)
        return (loss, outputs) if return_outputs else loss

    return lambda _: compute_loss


ALONE, DOUBLED = {"gradient_accumulation_steps": 1}, {"get_batch_samples": with_items_doubled}
OWN_LOSSES: dict[str, tuple[Callable[[Any, Any], Any], ...]] = {
    "does not call the model; let it": (lambda model, inputs: {"logits": inputs["input_ids"].double()[..., None]},),
    "gives the model another 'input_ids' than": (lambda model, inputs: model(input_ids=inputs["input_ids"] + 0),),
    "calls the model with positional arguments": (lambda model, inputs: model(inputs["input_ids"]),),
    "get_batch_samples counts other items than the labels": (),
}


@pytest.mark.parametrize("words", OWN_LOSSES)
def test_an_own_loss_that_does_more_is_refused(tmp_path: Path, words: str) -> None:
    methods = {"compute_loss": with_own_loss(*OWN_LOSSES[words])} | ({} if OWN_LOSSES[words] else DOUBLED)
    with pytest.raises(pd.PipelineError, match=words):
        run("pipeline", tmp_path, methods=methods, **ALONE)


def calling(name: str) -> Callable[[Any], Any]:
    return lambda base: lambda self, *positional, **options: getattr(base, name)(self, *positional, **options)


METHODS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "get_train_dataloader": (lambda _: lambda self: torch.utils.data.DataLoader(self.train_dataset, 3), ALONE),
    "get_batch_samples": (with_items_doubled, ALONE),
    "compute_loss": (with_own_loss(), {"eval_strategy": "epoch"}),
    "_get_train_sampler": (lambda _: lambda self, *_: torch.utils.data.SequentialSampler(self.train_dataset), {}),
    "prediction_step": (with_own_prediction, {"eval_strategy": "steps", "eval_steps": 1}),
    **{name: (calling(name), {"eval_strategy": "epoch"}) for name in ("evaluate", "evaluation_loop", "log")},
}


@pytest.mark.parametrize("name", thinned(METHODS, 4))
def test_methods_of_a_subclass_that_act_as_in_the_plain_trainer(tmp_path: Path, name: str) -> None:
    method, changes = METHODS[name]
    assert_same(tmp_path, methods={name: method}, **changes)


@pytest.mark.parametrize(
    "name",
    [
        *("training_step", "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"),
        *("floating_point_ops", "_prepare_inputs", "create_accelerator_and_postprocess"),
        *("_run_epoch", "gradient_accumulation_steps with a get_train_dataloader or get_batch_samples"),
    ],
)
def test_other_methods_of_a_subclass_are_refused(tmp_path: Path, name: str) -> None:
    method = "get_batch_samples" if " " in name else name
    with pytest.raises(pd.PipelineError, match=f"{name} of your own"):
        run("pipeline", tmp_path, methods={method: calling(method)})


@pytest.mark.parametrize("collator", thinned(["DataCollatorForLanguageModeling", "DataCollatorWithPadding"]))
def test_batches_of_a_collator_act_as_dicts(collator: str) -> None:
    transformers, _ = libraries()
    tokenizer = make_tokenizer()
    options = {"mlm": False} if "Language" in collator else {}
    batch = getattr(transformers, collator)(tokenizer, **options)(
        [{k: v[4:] for k, v in row.items()} for row in make_data(8)]
    )
    assert not isinstance(batch, dict)
    outcomes = []
    for each in (batch, dict(batch)):
        recipe = pd.Recipe(Words(), None, partial(torch.optim.SGD, lr=0.1), [each] * 2)
        plan = pd.plan(
            profile_recipe(recipe, runs=1), pd.Cluster.flat(2), shape=(1, 1), schedule="1f1b", microbatches=2
        )
        with pd.Pipeline(recipe.model, plan, loss=None, optimizer=recipe.optimizer, sample=each) as pipeline:
            losses = [done.loss for done in pipeline.train(recipe.train)]
            outcomes.append((losses, pipeline.evaluate([each]), next(pipeline.predict([each]))["logits"].tolist()))
    assert outcomes[0] == outcomes[1]


def test_a_model_is_made_and_uploaded_as_by_the_plain_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, hf = libraries()
    uploads: list[Any] = []
    done = SimpleNamespace(done=lambda: True)
    api = SimpleNamespace(upload_folder=lambda **how: uploads[-1].append(how["commit_message"]) or done)
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: api)
    monkeypatch.setattr(
        transformers.Trainer, "init_hf_repo", lambda self: vars(self).update(push_in_progress=None, hub_model_id="mine")
    )
    monkeypatch.setattr(transformers.Trainer, "create_model_card", lambda *_, **__: None)
    weights = []
    for base in (transformers.Trainer, hf.Trainer):
        uploads.append([])
        args = transformers.TrainingArguments(str(tmp_path), push_to_hub=True, **SETTINGS | SAVING)
        trainer = base(None, args, model_init=lambda: Words().double(), train_dataset=make_data(8))
        trainer.train()
        trainer.push_to_hub()
        weights.append(trainer.model.state_dict())
    assert uploads[0] == uploads[1] != []
    torch.testing.assert_close(*weights, rtol=0, atol=1e-8)


def test_a_second_training_is_refused(tmp_path: Path) -> None:
    trainer = run("pipeline", tmp_path, num_train_epochs=1)
    with pytest.raises(pd.PipelineError, match=r"a second train\(\), which needs the first one's optimizer"):
        trainer.train()
    trainer.training_step = lambda *_: None
    with pytest.raises(pd.PipelineError, match=r"a training_step of your own: .*; override compute_loss"):
        trainer.train()


def test_a_stream_that_ends_within_an_update_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(pd.PipelineError, match="ended after 1 of an update's 4 batches"):
        run("pipeline", tmp_path, samples=Stream(10), max_steps=5)


@pytest.mark.parametrize("stops", [slow(False), True])
def test_a_resumed_training_counts_as_the_plain_one(tmp_path: Path, stops: bool) -> None:
    """Tokens and epochs too; also after a callback had ended an epoch, which the plain Trainer does not know then."""
    saving = SAVING | {"include_num_input_tokens_seen": "all"}
    saving |= {} if stops else {"optimizers": giving("LinearLR", total_iters=6)}
    callbacks = [acting("on_step_end", 1, setting("should_epoch_stop"))] if stops else []
    assert_same(tmp_path, callbacks=callbacks, **EPOCHS | saving)
    assert_same(
        tmp_path, resume="checkpoint-4", **EPOCHS | saving | {"num_train_epochs": 3 + stops}
    )  # another schedule


# Of names that end in "_", all that begin so.
FOLLOWED = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_ args average_tokens_across_devices
    batch_eval_metrics bf16 bf16_full_eval callbacks compute_loss_func compute_metrics data_collator data_seed
    dataloader_ ddp_ debug disable_tqdm do_ eval_ fp16_full_eval fsdp_config full_determinism gradient_
    greater_is_better hub_ ignore_data_skip include_ label_names label_smoothing_factor learning_rate length_column_name
    liger_kernel_config load_best_model_at_end local_rank log_ logging_ lr_scheduler_ max_grad_norm max_steps
    metric_for_best_model model model_init neftune_noise_alpha num_train_epochs optim optim_args
    optimizer_cls_and_kwargs optimizers output_dir per_device_ prediction_loss_only preprocess_logits_ processing_class
    project push_to_hub remove_unused_columns report_to restore_callback_ resume_from_checkpoint run_name save_ seed
    skip_memory_metrics tf32 torch_ trackio_ train_dataset train_sampling_strategy use_cache use_cpu warmup_
    weight_decay
    """
EVENTS = {
    "as in the plain Trainer": """
        on_init_end on_train_begin on_train_end on_epoch_begin on_epoch_end on_step_begin on_optimizer_step on_step_end
        on_evaluate on_predict on_save on_log on_prediction_step
        """,
    "refused, or never": "on_pre_optimizer_step on_substep_end on_push_begin",
}


def test_every_argument_and_event_of_transformers_is_followed_or_refused() -> None:
    """A new one of a later transformers makes this fail: follow it, or add it to those that are refused."""
    transformers, hf = libraries()
    names = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    names += [name for name in inspect.signature(transformers.Trainer.__init__).parameters if name != "self"]
    expected = [*FOLLOWED.split(), *hf.REFUSED_ARGUMENTS.split()]
    pattern = re.compile("|".join(name + ".*" * name.endswith("_") for name in expected))
    assert [name for name in names if not pattern.fullmatch(name)] == []
    events = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]
    assert sorted(events) == sorted(" ".join(EVENTS.values()).split())
    assert all(hasattr(transformers.Trainer, name) for name in hf.FOLLOWED_METHODS.split())


REFUSALS: dict[str, Any] = {
    **dict.fromkeys(("auto_find_batch_size", "enable_jit_checkpoint", "fp16", "use_liger_kernel"), True),
    **{"deepspeed": "config", "fsdp": "full_shard", "parallelism_config": "config", "optim_target_modules": ["inner"]},
}


REFUSED_VALUES: dict[str, Any] = {
    "lr_scheduler_type": {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"},
    "load_best_model_at_end with save_only_model": BEST | {"save_only_model": True},
    "optim": {"optim": "lomo"},
    KWARGS: {"accelerator_config": {KWARGS: {"sync_each_batch": True}}},
}


def test_each_refused_argument_is_refused(tmp_path: Path) -> None:
    transformers, hf = libraries()
    assert sorted(REFUSALS) == sorted(hf.REFUSED_ARGUMENTS.split())
    for name, value in REFUSALS.items():
        args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
        others = {} if hasattr(args, name) else {name: value}
        if not others:
            setattr(args, name, value)  # some cannot be given without a GPU or another package
        with pytest.raises(pd.PipelineError, match=f"{name}: not possible in a pipeline"):
            hf.Trainer(Words(), args, train_dataset=make_data(2), **others)
    for name, changes in REFUSED_VALUES.items():
        with pytest.raises(pd.PipelineError, match=f"{name}: not possible in a pipeline"):
            make_trainer("pipeline", tmp_path, **changes)
    args = transformers.TrainingArguments(str(tmp_path), gradient_accumulation_steps=2)
    with pytest.raises(pd.PipelineError, match="gradient_accumulation_steps with a schedule that splits no minibatch"):
        hf.Trainer(Words(), args, schedule="pipedream")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


RATES = torch.optim.lr_scheduler
REFUSED_OPTIMIZERS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "Adagrad has state, or hooks; give optimizer_cls": lambda model, _: (torch.optim.Adagrad(model.parameters()), None),
    "has a scheduler of another optimizer": lambda _, optimizer: (None, RATES.ConstantLR(optimizer)),
    "has a weight that is not the model's": lambda *_: (adamw(Words()), None),
    "head.bias in no group; freeze it": lambda model, _: (torch.optim.SGD([*model.parameters()][:-1]), None),
    "ConstantLR has made steps": lambda _, each: (each, [rate := RATES.ConstantLR(each), rate.step()][0]),
    "OneCycleLR does not keep its argument max_lr": lambda _, each: (each, RATES.OneCycleLR(each, 0.1, 9)),
    "rates are not those at the scheduler's first step": lambda _, each: (
        *(each, [RATES.ConstantLR(each), each.param_groups[0].update(lr=3)][0]),
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("words", REFUSED_OPTIMIZERS)
def test_optimizers_that_no_stage_can_make_anew_are_refused(tmp_path: Path, words: str) -> None:
    with pytest.raises(pd.PipelineError, match=f"optimizers= .*{words}"):
        run("pipeline", tmp_path, optimizers=lambda model: REFUSED_OPTIMIZERS[words](model, adamw(model)))


OF_RANKS: dict[str, Any] = {
    **{"include_num_input_tokens_seen": "all", "eval_strategy": "epoch"} | SAVING,
    **{"samples": 18, "rest": {"compute_metrics": accuracy}, "lr_scheduler_type": "reduce_lr_on_plateau"},
    **{"lr_scheduler_kwargs": PLATEAU, "num_train_epochs": 4, "save_total_limit": 9},
}


def train_as_a_rank(folder: Path) -> list[tuple[Any, Any]]:
    """Trains, and again from a checkpoint; returns the log and the weights of both as this rank has them."""
    rank = str(torch.distributed.get_rank())
    # As torchrun sets them, for accelerate.
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    warnings.simplefilter("ignore")
    trainers = [run("pipeline", folder, resume, **OF_RANKS) for resume in (None, "checkpoint-4")]
    for trainer in trainers:
        trainer.evaluate()
    return [(trainer.state.log_history, trainer.model.state_dict()) for trainer in trainers]


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_train_as_the_plain_trainer(tmp_path: Path) -> None:
    """Every rank ends with the same weights, figures and evaluations, also after a resume."""
    plain = run("plain", tmp_path, **OF_RANKS)
    plain.evaluate()
    for ended in processes.results(train_as_a_rank, 2, tmp_path, timeout_s=240.0):
        for history, weights in ended:
            for key in ("loss", "eval_loss", "eval_accuracy", "learning_rate", "epoch", "num_input_tokens_seen"):
                expected, actual = (
                    [entry[key] for entry in log if key in entry] for log in (plain.state.log_history, history)
                )
                np.testing.assert_allclose(actual[: len(expected)], expected, rtol=1e-4, err_msg=key)
            torch.testing.assert_close(weights, dict(plain.model.state_dict()), rtol=0, atol=1e-8)


@pytest.mark.slow
def test_predictions_and_files_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    plain, trainer = (run(kind, tmp_path, **SAVING) for kind in ("plain", "pipeline"))
    expected, actual = (each.predict(make_data(3)).predictions for each in (plain, trainer))
    np.testing.assert_allclose(actual, expected, atol=1e-8)
    places = [Path(each.args.output_dir) for each in (plain, trainer)]
    trainer.save_model(str(places[1] / "end"))
    saved = import_module("safetensors.torch").load_file(places[1] / "end" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())
    names = [{path.name for path in place.iterdir()} for place in places]
    assert names[1] == names[0] | {"end"}


def test_a_resumed_training_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is planned for another number of microbatches."""
    trainer = run("pipeline", tmp_path, **SAVING, rest={"plan": None})
    folder = Path(trainer.args.output_dir)
    assert pd.Plan.load(folder / "plan.json").workers == 2
    monkeypatch.setattr("pipedream.hf.profile", None)
    resumed = run("pipeline", tmp_path, "checkpoint-2", **SAVING, rest={"plan": None, "workers": 1})
    assert pd.Plan.load(folder / "plan.json").workers == 1
    torch.testing.assert_close(resumed.model.state_dict(), trainer.model.state_dict(), rtol=0, atol=1e-8)


def make_tuners(folder: Path, kind: str = "Llama", **changes: Any) -> Iterator[Any]:
    """Yields a trainer that tunes in a pipeline, and then the plain one."""
    trl, (transformers, hf) = import_module("trl"), libraries()
    rows = import_module("datasets").Dataset.from_list(make_data(9))
    tokenizer, options = make_tokenizer(), {**SETTINGS, "max_length": None, "eval_strategy": "epoch", "bf16": False}
    options["dataset_kwargs"] = {"skip_prepare_dataset": True}
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1
    )
    for base in (type("Tuner", (hf.Trainer, trl.SFTTrainer), {}), trl.SFTTrainer):
        torch.manual_seed(0)
        args = trl.SFTConfig(str(folder), gradient_accumulation_steps=2, **options | changes)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        yield base(model, args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)


@needs_trl
@pytest.mark.parametrize("changes", [{}, {"loss_type": "dft"}], ids=str)
def test_a_trainer_of_trl_tunes_as_the_plain_one(tmp_path: Path, changes: Any) -> None:
    logs = []
    for trainer in make_tuners(tmp_path, **changes):
        trainer.train()
        logs.append([{k: v for k, v in log.items() if not k.endswith(UNTIMED)} for log in trainer.state.log_history])
    for entry, expected in zip(*logs, strict=True):
        assert entry == pytest.approx(expected, abs=1e-4)


@needs_trl
@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [("Llama", {"activation_offloading": True}, "activation_offloading"), ("Mixtral", {}, "router_aux_loss_coef")],
)
def test_what_a_trainer_of_trl_is_refused(tmp_path: Path, kind: str, changes: Any, name: str) -> None:
    with pytest.raises(pd.PipelineError, match=f"{name}: not possible in a pipeline"):
        next(make_tuners(tmp_path, kind, **changes)).train()


@pytest.mark.slow
def test_a_trainer_resumes_under_a_method_without_a_flush(tmp_path: Path) -> None:
    how = EPOCHS | ALONE | SAVING | {"rest": {"schedule": "pipedream", "options": {"clip": "local"}}}
    first, second = (run("pipeline", tmp_path, resume, **how) for resume in (None, "checkpoint-6"))
    assert second.state.log_history[-2] == first.state.log_history[-2]
    torch.testing.assert_close(second.model.state_dict(), first.model.state_dict(), rtol=0, atol=1e-8)

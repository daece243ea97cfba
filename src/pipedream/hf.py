"""A `Trainer` of transformers that trains in a pipeline (extra `hf`).

    trainer = pipedream.hf.Trainer(model, args, train_dataset=..., schedule="1f1b")
    trainer.train()

The pipeline takes the place of the Trainer's training dataloader and yields each minibatch once the weights have been
updated with it. Epochs, logs, callbacks, evaluations and checkpoints therefore remain the Trainer's own.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint, has_length

from pipedream.core.errors import PipelineError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan
from pipedream.pipeline import Pipeline
from pipedream.runtime.comm.process_group import gather_json
from pipedream.runtime.data.rng import preserved_rng
from pipedream.runtime.stage.stage_module import restoring_modes
from pipedream.workflows.plan import plan as make_plan
from pipedream.workflows.profile import profile

_STATE = "pipeline"  # the pipeline's part of a folder checkpoint-N


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` that trains in a pipeline: workers share one process, or have one each under torchrun.

    A minibatch has ``per_device_train_batch_size * gradient_accumulation_steps`` samples, split into
    ``gradient_accumulation_steps`` microbatches. During training the stages hold the weights; after `train` every rank
    has the whole model.

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
        model: Any,
        args: transformers.TrainingArguments,
        *,
        plan: Plan | None = None,
        schedule: str = "1f1b",
        workers: int = 2,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        _check(type(self), args, others)
        self.pipeline: Pipeline | None = None
        self._plan, self._schedule, self._workers, self._options = plan, schedule, workers, dict(options or {})
        self._user_args, self._open = args, ExitStack()
        self._checkpoint: Path | None = None
        self._late_losses: list[float] = []
        args = copy.copy(args)
        args.per_device_train_batch_size *= args.gradient_accumulation_steps
        args.gradient_accumulation_steps = 1
        args.bf16, args.max_grad_norm = False, 0.0  # the pipeline does both
        args.ignore_data_skip = True  # the pipeline continues at its own position
        if args.world_size > 1:  # each rank has the whole data: the pipeline divides the work
            args.save_only_model |= args.process_index > 0
            args.distributed_state.num_processes = 1
            args.distributed_state.distributed_type = type(args.distributed_state.distributed_type).NO
        super().__init__(model, args, **others)
        self.accelerator.device_placement = False
        self.add_callback(_Epochs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **options: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # type: ignore[no-untyped-call]
        self._checkpoint = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        try:
            with self._open:
                output = super().train(resume_from_checkpoint, *others, **options)
                assert self.pipeline is not None
                if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
                    self.pipeline.load(Path(self.state.best_model_checkpoint) / _STATE)
                state = self._collect_weights(self.pipeline)
        finally:
            self.pipeline = None
        self.model.load_state_dict(state, assign=True)
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()
        return output

    def _collect_weights(self, pipeline: Pipeline) -> dict[str, Any]:
        """Returns the whole model's weights on every rank."""
        state, whole = pipeline.state_dict(), {}
        for name, value in self.model.state_dict().items():
            whole[name] = state.get(name, torch.empty_like(value, device="cpu")).to(self.args.device)
            if pipeline.distributed:
                torch.distributed.broadcast(whole[name], 0)
        return whole

    def get_train_dataloader(self) -> Any:
        return _Stream(self, super().get_train_dataloader())

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Opens the pipeline; returns a dummy optimizer, which only carries the learning rates that are logged."""
        self.pipeline = self._open.enter_context(self._make_pipeline())
        self._group = torch.distributed.new_group(backend="gloo") if self.pipeline.distributed else None
        if self._checkpoint is not None:
            self.pipeline.load(self._checkpoint / _STATE)
            self._late_losses = list(self.pipeline.extra["losses"])
        self.model_wrapped = torch.nn.Module()  # the loop around a pipeline touches no gradients
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.args.learning_rate)
        return self.optimizer

    def _make_pipeline(self) -> Pipeline:
        loader, args = super().get_train_dataloader(), self._user_args
        with preserved_rng(loader):
            sample = next(iter(_Batches(self, loader, 0)))
        accumulated = args.gradient_accumulation_steps
        options = {
            "schedule": self._schedule,
            "microbatches": accumulated if accumulated > 1 else None,
            "optimizer": self._make_optimizer,
            "scheduler": self._make_scheduler,
            "clip_grad_norm": args.max_grad_norm or None,
            "autocast": "bfloat16" if args.bf16 else None,
            "seed": args.seed,
            "device": args.device.type,
            "sample": sample,
        } | self._options
        if self._plan is None:
            is_alone = not torch.distributed.is_initialized()
            self._plan = make_plan(
                profile(self.model, sample, device=options["device"]),
                Cluster.local(self._workers) if is_alone else None,
                shape="pipeline",
                schedule=self._schedule,
                microbatches=options["microbatches"],
            )
        # Layers are found in this sample: a user's plan is of a batch without the number of items.
        return Pipeline(self.model, replace(self._plan, graph=None), **options)

    def _make_optimizer(self, named: list[tuple[str, Any]]) -> Any:
        """Makes a stage's optimizer with the groups of `transformers.Trainer`: with weight decay, and without."""
        decaying = set(self.get_decay_parameter_names(self.model))
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        decays = {True: self.args.weight_decay, False: 0.0}
        groups = [
            {"params": [value for name, value in named if (name in decaying) is decays_here], "weight_decay": decay}
            for decays_here, decay in decays.items()
        ]
        return kind([group for group in groups if group["params"]], **options)

    def _make_scheduler(self, optimizer: Any) -> Any:
        options: Any = self.args.lr_scheduler_kwargs
        return transformers.get_scheduler(
            self.args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=self.args.get_warmup_steps(self.state.max_steps),
            num_training_steps=self.state.max_steps,
            scheduler_specific_kwargs=options,
        )

    def training_step(self, model: Any, inputs: Mapping[str, Any], *others: Any) -> torch.Tensor:
        """Returns the loss of a minibatch that the pipeline has trained."""
        return torch.tensor(inputs["loss"], device=self.args.device)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # not counted

    def evaluation_loop(self, *positional: Any, **options: Any) -> Any:
        if self.pipeline is None:
            return super().evaluation_loop(*positional, **options)
        with restoring_modes(self.model.modules()):
            output = super().evaluation_loop(*positional, **options)
        if self.pipeline.distributed:  # rank 0 has the outputs; callbacks decide by the metrics on every rank
            output = output._replace(metrics=gather_json(output.metrics, self._group)[0])
        return output

    def prediction_step(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
        if self.pipeline is None:
            return super().prediction_step(model, inputs, *others, **options)
        pipeline = self.pipeline

        def run(**inputs: Any) -> Any:
            return next(iter([*pipeline.predict([inputs]), {"loss": torch.zeros(())}]))  # rank 0 has the output

        results = super().prediction_step(cast(Any, run), inputs, *others, **options)
        return results if pipeline.rank == 0 else (None, None, None)

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
            losses = [done.loss for done in self.pipeline.ready]
            if self.args.should_save:
                shutil.rmtree(folder / _STATE, ignore_errors=True)  # of an earlier run, which the Trainer overwrites
            self.pipeline.save(folder / _STATE, extra={"losses": losses})


class _Stream:
    """The finished minibatches of a pipeline, as a loader: each "batch" is a loss."""

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self.dataset, self._trainer, self._loader, self._epoch = loader.dataset, trainer, loader, 0

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, float]]:
        pipeline, losses = self._trainer.pipeline, self._trainer._late_losses
        assert pipeline is not None
        while losses:  # of minibatches that a checkpoint has in its weights, and the Trainer has yet to count
            yield {"loss": losses.pop(0)}
        if pipeline.position[0] <= self._epoch:
            for done in pipeline.train(_Batches(self._trainer, self._loader, self._epoch)):
                yield {"loss": done.loss}


class _Batches:
    """The batches of an epoch up to the last step, with the number of items by which the Trainer divides a loss."""

    def __init__(self, trainer: Trainer, loader: Any, epoch: int) -> None:
        self._trainer, self._loader, self._epoch = trainer, loader, epoch

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(self._epoch)
        before = self._epoch * len(self._loader) if has_length(self._loader) else 0
        batches, trainer = iter(self._loader), self._trainer
        for _ in range(trainer.state.max_steps - before):
            samples, items = trainer.get_batch_samples(batches, 1, trainer.args.device)
            for batch in samples:
                counted = trainer.model_accepts_loss_kwargs and items is not None
                yield {**batch, "num_items_in_batch": items} if counted else batch


class _Epochs(transformers.TrainerCallback):
    """Counts epochs by steps, so that it is right after a resume too."""

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if has_length(train_dataloader):
            state.epoch = state.global_step / len(train_dataloader)


def _check(kind: type[Trainer], args: transformers.TrainingArguments, others: Mapping[str, Any]) -> None:
    methods = ("compute_loss", "training_step", "create_optimizer", "create_scheduler")
    refused = {
        "fp16": args.fp16,
        "label_smoothing_factor": args.label_smoothing_factor,
        "lr_scheduler_type": args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
        "fsdp": args.fsdp,
        "deepspeed": args.deepspeed,
        "parallelism_config": args.parallelism_config,
        "push_to_hub": args.push_to_hub,
        "auto_find_batch_size": args.auto_find_batch_size,
        "optimizers": any(others.get("optimizers") or ()),
        "compute_loss_func": others.get("compute_loss_func"),
        "model_init": others.get("model_init"),
        **{f"a {name} of your own": getattr(kind, name) is not getattr(Trainer, name) for name in methods},
    }
    if names := [name for name, value in refused.items() if value]:
        raise PipelineError(f"{', '.join(names)}: not possible in a pipeline; leave it out, or use pipedream.Pipeline")

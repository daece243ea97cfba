"""The Trainer of transformers, trained in a pipeline: what its users see is what they see of the plain one."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from torch import Tensor, nn

import pipedream
from pipedream.core.errors import PipelineError

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed; pip install accelerate"),
]


def make_model() -> nn.Module:
    import transformers  # here: it takes seconds, and most runners need it not

    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0, **no_dropout
    )
    return transformers.GPT2LMHeadModel(config)


def make_data(samples: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, 32, (samples, 8), generator=generator)
    labels = rows.clone()
    labels[::3, :3] = -100  # padding, so that microbatches weigh differently
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]))}


@cache
def make_plan(schedule: str, microbatches: int | None) -> pipedream.Plan:
    batch = torch.utils.data.default_collate(make_data(4))
    profile = pipedream.profile(make_model(), batch, runs=1)
    cluster = pipedream.Cluster.flat(2)
    return pipedream.plan(profile, cluster, shape="pipeline", schedule=schedule, microbatches=microbatches)


def make_trainer(kind: str, folder: Path, callbacks: Any = None, rest: Any = None, **changes: Any) -> Any:
    """Returns a Trainer: "plain", that of a "pipeline", or one with an "own loss"."""
    import transformers

    from pipedream import hf

    class OwnLoss(hf.Trainer):
        def compute_loss(self, *positional: Any, **options: Any) -> Any:
            return 2 * super().compute_loss(*positional, **options)

    kinds = {"plain": transformers.Trainer, "pipeline": hf.Trainer, "own loss": OwnLoss}
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    args = transformers.TrainingArguments(**settings | changes)
    rest = rest or {}
    if kind == "pipeline":
        steps = args.gradient_accumulation_steps
        rest = {"plan": make_plan(rest.get("schedule", "1f1b"), steps if steps > 1 else None)} | rest
    return kinds[kind](
        make_model(),
        args,
        train_dataset=make_data(18),
        eval_dataset=make_data(5),
        compute_metrics=accuracy,
        callbacks=callbacks,
        **rest,
    )


def entries(trainer: Any, *keys: str) -> list[list[float]]:
    return [[entry[key] for key in keys] for entry in trainer.state.log_history if all(key in entry for key in keys)]


def check_equal(trainer: Any, plain: Any) -> None:
    """Losses, rates, evaluations and weights are those of the plain Trainer."""
    for keys in (("step", "learning_rate", "loss"), ("step", "eval_loss", "eval_accuracy")):
        expected = entries(plain, *keys)
        np.testing.assert_allclose(entries(trainer, *keys), expected, rtol=1e-4, err_msg=str(keys))
        assert expected
    weights, expected_weights = trainer.model.state_dict(), plain.model.state_dict()
    assert weights.keys() == expected_weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected_weights[name], rtol=1e-3, atol=3e-4)


@pytest.mark.slow
def test_a_trainer_in_a_pipeline_gives_what_the_plain_one_gives(tmp_path: Path) -> None:
    import transformers

    plain, trainer = make_trainer("plain", tmp_path / "plain"), make_trainer("pipeline", tmp_path / "pipeline")
    expected, output = plain.train(), trainer.train()
    assert output.global_step == expected.global_step == 10
    assert output.training_loss == pytest.approx(expected.training_loss, rel=1e-4)
    check_equal(trainer, plain)
    assert not any({"grad_norm", "total_flos"} & entry.keys() for entry in trainer.state.log_history)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)
    prediction, expected_prediction = trainer.predict(make_data(3)), plain.predict(make_data(3))
    np.testing.assert_allclose(prediction.predictions, expected_prediction.predictions, rtol=1e-2, atol=1e-3)
    trainer.save_model(str(tmp_path / "end"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in saved.state_dict().items())
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in (tmp_path / "pipeline").iterdir()} == names


@pytest.mark.slow
def test_a_trainer_resumes_under_a_method_without_a_flush(tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    rest = {"schedule": "pipedream", "options": {"clip": "local"}}
    first = make_trainer("pipeline", tmp_path, rest=rest, **changes)
    first.train()
    second = make_trainer("pipeline", tmp_path, rest=rest, **changes)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    check_equal(second, first)


def test_callbacks_steps_and_low_precision(tmp_path: Path) -> None:
    import transformers

    class StopAtThree(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 3

    changes = {"max_steps": 7, "bf16": True, "save_strategy": "no", "eval_strategy": "no"}
    plain = make_trainer("plain", tmp_path, **changes)
    trainer = make_trainer("pipeline", tmp_path, **changes)
    stopped = make_trainer("pipeline", tmp_path, callbacks=[StopAtThree], **changes)
    plain.train(), trainer.train(), stopped.train()
    np.testing.assert_allclose(entries(trainer, "loss"), entries(plain, "loss"), rtol=5e-3)
    assert len(entries(trainer, "loss")) == 7
    assert entries(stopped, "loss") == entries(trainer, "loss")[:3]


@pytest.mark.slow
def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    changes = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 0.2,
        "save_total_limit": 1,
    }
    plain = make_trainer("plain", tmp_path / "plain", **changes)
    trainer = make_trainer("pipeline", tmp_path / "pipeline", **changes)
    plain.train(), trainer.train()
    assert Path(trainer.state.best_model_checkpoint).name == Path(plain.state.best_model_checkpoint).name
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("pipeline", {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ("pipeline", {"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type"),
        ("own loss", {}, "a compute_loss of your own"),
    ],
)
def test_what_a_pipeline_cannot_follow_is_refused(tmp_path: Path, kind: str, changes: Any, name: str) -> None:
    with pytest.raises(PipelineError, match=f"{name}: not possible in a pipeline"):
        make_trainer(kind, tmp_path, **changes)


def train_as_a_rank(folder: Path) -> list[tuple[Any, Any]]:
    """Trains, and again from a checkpoint; returns the log and the weights of both as this rank has them."""
    rank = str(torch.distributed.get_rank())
    # As torchrun sets them, for accelerate.
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    warnings.simplefilter("ignore")
    first, second = make_trainer("pipeline", folder), make_trainer("pipeline", folder)
    first.train()
    second.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    for trainer in (first, second):
        trainer.evaluate()
    return [(trainer.state.log_history, trainer.model.state_dict()) for trainer in (first, second)]


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_train_as_the_plain_trainer(tmp_path: Path) -> None:
    """Every rank ends with the same weights, figures and evaluations, also after a resume."""
    plain = make_trainer("plain", tmp_path / "plain")
    plain.train()
    for ended in processes.results(train_as_a_rank, 2, tmp_path / "run", timeout_s=240.0):
        for history, weights in ended:
            for key in ("loss", "eval_loss", "eval_accuracy"):
                expected, actual = (
                    [entry[key] for entry in log if key in entry] for log in (plain.state.log_history, history)
                )
                np.testing.assert_allclose(actual[: len(expected)], expected, rtol=1e-4, err_msg=key)
            for key, value in weights.items():
                torch.testing.assert_close(value, plain.model.state_dict()[key], rtol=1e-3, atol=3e-4)

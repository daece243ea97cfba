"""A pipeline with encoded messages trains as one process does in which values are rounded so at the cuts."""

import re

import pytest
import torch
from built import Built
from cases import Case, check, check_processes, run
from marks import thinned
from training import plan_of, train

import pipedream as pd
from pipedream.extensions.choices.messages import encoded

CASES = [
    Case("wide", "1f1b", 3, microbatches=2, messages=("int8", "int8", "bfloat16"), clip_grad_norm=0.1, ema=0.9),
    Case("wide", "gpipe", 4, microbatches=2, messages="bfloat16", optimizer="adamw", recompute=True),
    Case("wide", "zb_h1", 4, microbatches=2, messages="int4"),
    Case("wide", "chimera", 4, microbatches=4, messages=("int8", "bfloat16")),
    Case("wide", "pipedream", 2, replicas=(2, 1), messages=("int4", "int4_stochastic")),
    Case("wide", "pipedream_2bw", 3, microbatches=2, messages=("full", "int8")),
    Case("wide", "pipedream_vertical_sync", 3, messages=("float16", "full")),
    Case("wide", "spectrain", 3, messages="int8"),
    Case("wide", "1f1b", 3, microbatches=2, messages="int8", dtype=torch.float32),
]


@pytest.mark.parametrize("case", thinned(CASES, 4), ids=str)
def test_encoded_messages_round_the_values_at_the_cuts(case: Case) -> None:
    check(case, run(case), 1e-10 if case.dtype == torch.float64 else 1e-4)


COMPARED = [
    Case("wide", "1f1b", 3, microbatches=2, messages="int4", check=True),
    Case("wide", "pipedream", 3, messages="bfloat16", check=True),
    Case("wide", "chimera", 4, microbatches=4, messages="int8", check=True),
]


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_the_first_minibatch_is_compared_with_the_encoded_model(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    run(case)
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        rf"messages={case.messages} changed the loss of the first minibatch from \S+ to \S+, and the norm of its "
        r"gradient from \S+ to \S+",
        line,
    )


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = encoded.encode_message
    coarsely = lambda message, encoding, chosen: encode(message, "int4", chosen)  # noqa: E731
    monkeypatch.setattr(encoded, "encode_message", coarsely)
    with pytest.raises(pd.PipelineError, match="first minibatch"):
        run(Case("wide", "1f1b", 3, microbatches=2, messages="int8", check=True))


@pytest.mark.slow
def test_processes_encode_to_the_same_bits() -> None:
    check_processes(
        4,
        [
            Case("wide", "chimera", 4, microbatches=4, messages="int4", check=True),
            Case("wide", "pipedream", 3, replicas=(2, 1, 1), messages=("int8", "float16")),
            # Its statistics are compared, too, after the model has run three times.
            Case("cnn", "1f1b", 4, microbatches=2, messages="int8", check=True),
        ],
    )


def test_a_cut_without_floating_point_numbers_is_refused() -> None:
    model = torch.nn.Sequential(
        Built(lambda _, ids: ids % 5), torch.nn.Embedding(5, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    )
    plan = plan_of(model, torch.randint(9, (8, 4)), (1,))
    batches = [(torch.randint(9, (8, 4)), torch.randint(2, (8,)))]
    words = r"messages=int8 .*stage 0 sends no .*only int64\[\d, 4\]; choose other cuts"
    with pytest.raises(pd.PipelineError, match=words):
        train(model, plan, batches, schedule="1f1b", messages="int8")


def _train_on_many_samples(schedule: str, scale: float, **options: object) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)]
    model, inputs = torch.nn.Sequential(*layers).double(), torch.randn(512, 8, dtype=torch.float64)
    loss = Built(lambda _, output, targets: scale * torch.nn.functional.mse_loss(output, targets))
    options = {"loss": loss, "targets": lambda batch: batch[1], "schedule": schedule} | options
    options["microbatches"] = 1 if schedule == "pipedream" else 2
    train(model, plan_of(model, inputs, (2,)), [(inputs, inputs[:, :4] / 2)], **options)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_gradients_of_many_samples_are_rounded_as_in_the_comparison(schedule: str, scale: float) -> None:
    _train_on_many_samples(schedule, scale, messages="float16")


@pytest.mark.parametrize("schedule", ["gpipe", "pipedream"])
def test_gradients_too_small_for_float16_are_refused(schedule: str) -> None:
    words = r"float16 rounds most of the gradient of '0.weight' to 0; .*grad_scaler="
    with pytest.raises(pd.PipelineError, match=words):
        _train_on_many_samples(schedule, 1e-5, messages=("bfloat16", "float16"))
    _train_on_many_samples(schedule, 1e-5, messages="bfloat16")
    _train_on_many_samples(schedule, 1e-5, messages="float16", grad_scaler=2.0**12)

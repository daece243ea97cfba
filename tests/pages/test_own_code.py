"""The pages for those who come from a plain loop and from Hugging Face: their code gives what a plain loop gives."""

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import load_script
from marks import long
from torch import Tensor, nn

import pipedream as pd

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6.*:FutureWarning")
needs_hf = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def read_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


def run_blocks(*sources: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "page"}
    for source in sources:
        exec(compile(source, "a page", "exec"), space)
    return space


def printed_numbers(text: str) -> list[float]:
    """Returns the last number of each line, such as '3 0.52'."""
    return [float(line.split()[-1]) for line in text.splitlines() if re.fullmatch(r"\d+ \d+\.\d+", line)]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plain_loop_and_its_pipeline_agree(capsys: pytest.CaptureFixture[str]) -> None:
    setup, before, after = read_blocks("from_a_plain_loop.md")
    results = []
    for source in (before, after):
        weights = run_blocks(setup, source)["weights"]
        results.append((printed_numbers(capsys.readouterr().out), weights))
        saved = torch.load("weights.pt")
        assert all(torch.equal(saved[name], value) for name, value in weights.items())
    (losses, weights), (actual_losses, actual_weights) = results
    assert len(losses) == 3
    assert actual_losses == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(dict(actual_weights), dict(weights), rtol=1e-3, atol=1e-4)


def test_the_lines_of_both_loops_are_counted() -> None:
    _, before, after = read_blocks("from_a_plain_loop.md")
    lines = [sum(map(bool, source.split("\n"))) for source in (before, after)]
    text = (DOCS / "from_a_plain_loop.md").read_text(encoding="utf-8")
    assert re.findall(r"^(?:Before|After), (\d+) lines:$", text, re.M) == [*map(str, lines)]


def train_plainly(space: dict[str, Any], low_precision: bool = False) -> Iterator[float]:
    """Trains the model of a page in a plain loop, for two epochs; yields the losses."""
    model, options = space["model"], space["options"]
    optimizer = options["optimizer"]([value for value in model.parameters() if value.requires_grad])
    scheduler = options["scheduler"](optimizer)
    model.train()
    context: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16) if low_precision else nullcontext()
    for batch in (batch for _ in range(2) for batch in space["loader"]):
        with context:
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options["clip_grad_norm"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield loss.item()


def without_dropout(source: str) -> str:
    """Dropout draws other masks in a plain loop."""
    return source.replace("n_layer=4", "n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0")


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


@needs_hf
@pytest.mark.slow
@pytest.mark.parametrize(("low_precision", "rel"), [(False, 1e-5), long(True, 1e-3)])
def test_a_script_trains_like_a_plain_loop(low_precision: bool, rel: float, capsys: pytest.CaptureFixture[str]) -> None:
    setup, script, generate, _, _, _, less_memory = read_blocks("from_hugging_face.md")
    sources = [without_dropout(setup), less_memory] if low_precision else [without_dropout(setup)]
    reference = run_blocks(*sources)
    losses = list(train_plainly(reference, low_precision))
    space = run_blocks(*sources, script, generate)
    assert printed_numbers(capsys.readouterr().out) == pytest.approx(losses, rel=rel)
    if not low_precision:
        torch.testing.assert_close(trainable(space["trained"]), trainable(reference["model"]), rtol=1e-3, atol=2e-4)


@needs_hf
@pytest.mark.slow
def test_a_recipe_trains_like_a_plain_loop() -> None:
    setup, _, _, recipe, *_ = read_blocks("from_hugging_face.md")
    setup = without_dropout(setup)
    Path("finetune.py").write_text(f"{setup}\n\n{recipe}", encoding="utf-8")
    pd.run(load_script(Path("finetune.py")).recipe, workers=2, schedule="1f1b", microbatches=4, out="run", quiet=True)
    losses = list(train_plainly(run_blocks(setup)))
    assert [loss for _, loss in json.loads(Path("run/losses.json").read_text())] == pytest.approx(losses, rel=1e-5)


@needs_hf
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_a_trainer_trains_like_the_plain_one() -> None:
    setup, _, _, _, trainer, *_ = read_blocks("from_hugging_face.md")
    setup = without_dropout(setup)
    plain = trainer.replace("pipedream.hf", "transformers").replace(', schedule="1f1b", workers=2', "")
    results = [run_blocks(setup, source)["trainer"] for source in (plain, trainer)]
    losses, actual_losses = ([entry["train_loss"] for entry in result.state.log_history] for result in results)
    assert actual_losses == pytest.approx(losses, rel=1e-5)
    weights, actual_weights = (trainable(result.model) for result in results)
    torch.testing.assert_close(actual_weights, weights, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
@needs_hf
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed; pip install peft")
def test_adapters_train_like_in_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    setup, script, _, _, _, lora, _ = read_blocks("from_hugging_face.md")
    setup = without_dropout(setup)
    reference = run_blocks(setup, lora)
    losses = list(train_plainly(reference))
    run_blocks(setup, lora, script)
    assert printed_numbers(capsys.readouterr().out) == pytest.approx(losses, rel=1e-5)
    from peft import PeftModel

    assert not Path("trained/model.safetensors").exists(), "the adapter alone is written"
    adapted = PeftModel.from_pretrained(run_blocks(setup)["model"], "trained", is_trainable=True)
    torch.testing.assert_close(trainable(adapted), trainable(reference["model"]), rtol=1e-3, atol=2e-4)
    adapted.generate(input_ids=torch.ones(1, 4, dtype=torch.long), max_new_tokens=2)

"""The speed-up benchmark runs: curves, time to accuracy, emulated workers. Its tables follow from its rows."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Started
from hypothesis import given, strategies as st
from marks import long, slow

FOLDER = Path(__file__).parents[2] / "benchmarks" / "speedup"
sys.path.append(str(FOLDER))
accuracy = importlib.import_module("accuracy")
sys.path.remove(str(FOLDER))  # other benchmarks have a run.py, too


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("curve", "models", "run", "sizes", "sleeping", "workers")  # other folders have a models.py, too
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["vgg", slow("lstm"), slow("encoder_decoder"), long("gpt")])
def test_a_sleeping_model_is_timed(name: str, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine adds between two waits, a step is as long as profiled, and gradients come on the way."""
    clock = [100.0]
    sleeping, job = load("sleeping"), load("models").MODELS[name]
    monkeypatch.setattr(sleeping.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(sleeping.time, "sleep", lambda left_s: clock.__setitem__(0, clock[0] + left_s + 1e-4))
    seconds = sleeping.load_seconds(name)
    asleep = sleeping.make_sleeping(job, seconds)
    model, (inputs, targets) = asleep.make(), job.batch(2 * job.samples)
    optimizer = asleep.optimizer(model.parameters())
    ends_s: dict[int, float] = {}
    for place, layer in enumerate(model):
        for weight in layer.parameters():
            weight.register_post_accumulate_grad_hook(lambda _, place=place: ends_s.update({place: clock[0]}))
    output = model(inputs)
    assert output.shape == job.make()(inputs).shape
    forward_s = clock[0] - 100.0
    assert forward_s == pytest.approx(2 * sum(seconds.forward_s), abs=2e-4)
    asleep.loss(output, targets).backward()
    backward_s = clock[0] - 100.0 - forward_s
    assert backward_s == pytest.approx(2 * sum(seconds.backward_s), abs=2e-4)
    for place, end_s in ends_s.items():
        assert end_s - 100.0 - forward_s == pytest.approx(2 * sum(seconds.backward_s[place:]), abs=2e-4), place
    optimizer.step()
    assert clock[0] - 100.0 - forward_s - backward_s == pytest.approx(seconds.update_s, abs=2e-4)
    assert all(weight.grad is not None for weight in model.parameters())


def _rows(rho: float, ddp: float, pipedream: float) -> list[dict[str, Any]]:
    common = {"model": "vgg", "rho": rho, "bytes_per_s": 1e8 / rho, "others": 0.0}
    solo = common | {"variant": "solo", "samples_per_s": 50.0, "compute_s": 0.1, "parameter_bytes": 1e7}
    rows = [
        common | {"variant": name, "samples_per_s": rate, "least": rate, "most": rate, "predicted_per_s": 100.0,
                  "bytes_per_sample": rate * 1e3, "message_bytes": 1000,
                  "microbatches_per_update": 2 if name == "torch DDP" else 1}
        for name, rate in {"torch DDP": ddp, "PipeDream, full": pipedream}.items()
    ]  # fmt: skip
    return [solo, *rows]


def test_tables_show_ratios_that_are_never_rounded_up(load: Callable[[str], Any]) -> None:
    curve = load("curve")
    text = curve.tables([*_rows(1.0, 50.0, 99.99), *_rows(4.0, 16.0, 98.0)])
    assert "| PipeDream, full / torch DDP | 1.99 (1.00) | 6.12 (1.00) |" in text
    assert "PipeDream, 2BW and 1F1B: median 0.99, 0.98 to 1.00, 2 of 2 at least 0.90" in text
    assert "the paper's 5.28 of VGG-16: at rho 3.3 (VGG-like)" in text
    rows = _rows(1.0, 50.0, 99.0)
    rows[1] = {key: value for key, value in rows[1].items() if key != "samples_per_s"} | {"why": "no"}
    assert "| torch DDP | 2 microbatches | - |" in curve.tables(rows), "it was refused"


@pytest.mark.network
@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("part", ["curve", "sleeping", "sizes"])
def test_it_runs_in_its_smallest_size(tmp_path: Path, part: str) -> None:
    options = ("--size", "test", "--only", part, "--out", "out")
    ended = Started((str(FOLDER / "run.py"), *options), folder=tmp_path).end(400.0)
    assert ended.status == 0, ended.err
    assert ("| PipeDream, full, int4 | 1 |" if part == "sizes" else "| torch DDP | 2 microbatches |") in ended.out
    rows = json.loads((tmp_path / "out" / "rows.json").read_text())[part]["rows"]
    assert all(row["samples_per_s"] > 0 for row in rows)
    assert (tmp_path / "out" / f"{part}_gpt.svg".removeprefix("curve_")).read_text().startswith("<svg")


def test_sizes_that_are_measured_in_parts(tmp_path: Path, load: Callable[[str], Any]) -> None:
    """What is measured again replaces its row, whatever rho is then; speed-ups are over the worker of the same day."""
    run, sizes, parts = load("run"), load("sizes"), dict[str, Any]()
    for day, (alone, weights) in enumerate([(10.0, 1), (10.0, 30), (5.0, 1)]):
        more = {"model": f"gpt_{weights}m", "weights": weights * 10**6, "bytes_per_s": 3.125e6, "alone_per_s": alone}
        more |= {"passes_s": 0.2, "step_s": 0.01, "work_s": 0.03 * weights}
        run._save(tmp_path / "rows.json", parts, "sizes", str, [row | more for row in _rows(1.0 + day, alone, 50.0)])
    text = sizes.tables(parts["sizes"]["rows"])
    assert "| torch DDP | 5 (1.00) | 10 (1.00) |" in text
    assert "| torch DDP | 2 | 200 | 10 | 900 | 6.4 | 400 |" in text, "4 samples of 10 kB over both directions"
    assert sizes.pictures(parts["sizes"]["rows"])["sizes_gpt.svg"].count("5x PipeDream, full") == 1


def test_a_row_is_compared_with_one_worker_before_and_after_it(load: Callable[[str], Any]) -> None:
    alone = [{"samples_per_s": rate} for rate in (10.0, 20.0, 20.0)]
    compared = load("curve")._compare_alone([{"alone": 1}, {"alone": 2}], alone)
    assert compared == {"alone_per_s": 17.5, "alone_changed": 1.0}


def test_rows_that_average_are_prolonged_by_whole_periods(load: Callable[[str], Any]) -> None:
    assert [load("curve")._prolong(32, step_s, 10.0) for step_s in (1.0, 0.2, 0.15)] == [32, 64, 96]


@given(st.integers(1, 5), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 1e6))
def test_seconds_and_bytes_to_target_are_those_of_the_epochs_before_it(
    epochs: int, first_s: float, each_s: float, once_bytes: float
) -> None:
    """What the start and the end of a run send, in a training of five epochs and in two timed ones, is left out."""
    timed = {"samples_per_s": 1.0, "epochs": 2, "epoch_bytes": 100.0 + once_bytes / 2, "others": 0.0}
    timed |= {"first_epoch_s": first_s, "epoch_s": each_s}
    row = {"epochs_to_target": epochs, "epoch_bytes": 100.0 + once_bytes / 5}
    figures = accuracy._reach(row, timed, 5)
    assert figures["seconds_to_target"] == pytest.approx(first_s + (epochs - 1) * each_s)
    assert figures["bytes_to_target"] == pytest.approx(100 * epochs)
    assert accuracy._reach(row | {"epochs_to_target": None}, timed, 5)["seconds_to_target"] is None
    bench = accuracy._Bench(accuracy.TEXT, accuracy.SIZES["full"], None, Path(), None)
    assert [bench.count_timed_epochs(name) for name in ("2BW", "local SGD, every 32", "DiLoCo, every 30")] == [2, 3, 3]


def test_a_pipeline_that_flushes_is_trained_once_for_all_depths_and_timed_with_one_seed() -> None:
    """Over the slowest link more minibatches are in flight, which is another training for PipeDream alone."""
    bench, trained = accuracy._Bench(accuracy.TEXT, accuracy.SIZES["full"], None, Path(), FOLDER), list[float | None]()
    bench.__dict__["target"] = 2.17

    def train(run: dict[str, Any], plan: Any, link: float | None, epochs: int) -> dict[str, Any]:
        trained.append(link)
        evaluations = [{"loss": 2.0, "seconds": float(epoch)} for epoch in range(epochs)]
        figures = {"metric": "loss", "final": 2.0, "loss": 2.0, "samples_per_s": 1.0, "epoch_bytes": 1.0}
        return figures | {"evaluations": evaluations}

    bench.__dict__["_train"] = train
    for name, count in (("1F1B, full, all in int8", 1), ("PipeDream, full, all in int4", 2)):
        rows: list[dict[str, Any]] = []
        for link, seed in ((None, 0), (1.25e6, 0), (1.25e6, 1)):
            run = {"task": "text", "variant": name, "seed": seed, "rate": 0.002, "bytes_per_s": link}
            rows.append(bench.run(run, rows))
        assert (trained.count(None), trained.count(1.25e6)) == (count + 1, 1), "the second seed is trained, not timed"
        trained.clear()


def test_the_rate_is_that_of_the_tuning_seed_without_a_link() -> None:
    common = {"task": "text", "variant": "1F1B", "final": 1.0, "metric": "loss"}
    losses = {(0, None, 0.001): 2.2, (0, None, 0.002): 2.1, (0, 1e6, 0.001): 1.0, (1, None, 0.004): 1.0}
    rows = [
        common | {"seed": seed, "bytes_per_s": link, "rate": rate, "loss": loss}
        for (seed, link, rate), loss in losses.items()
    ]
    assert accuracy._find_best_rate(rows, "text", "1F1B") == 0.002
    assert accuracy._find_best_rate(rows, "digits", "1F1B") is None

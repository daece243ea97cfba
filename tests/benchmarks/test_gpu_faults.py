"""benchmarks/gpu: each check sees a fault, after the first minibatch, which the library compares by itself."""

import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from commands import load_script
from marks import slow, spread

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.append(str(FOLDER))
loops, speed, results, ranks, nccl = (
    importlib.import_module(name) for name in ("loops", "speed_checks", "result_checks", "rank_checks", "nccl_check")
)
sys.path.remove(str(FOLDER))  # other benchmarks have a run.py, too

CPU = torch.device("cpu")
LEAKED: list[torch.Tensor] = []

Fault = Callable[[Any], Any]
"""From something of the library to what is wrong in its place."""


def _do_nothing(function: Any) -> Any:
    return lambda *args, **keywords: None


def _do_before(action: Callable[[], object]) -> Fault:
    """Returns a fault: the action before each call, until whose end its result lives."""

    def make(function: Any) -> Any:
        def wrong(*args: Any, **keywords: Any) -> Any:
            result_of_action = action()
            result = function(*args, **keywords)
            del result_of_action
            return result

        return wrong

    return make


def _divide_by_too_much(normalise: Any) -> Any:
    return lambda self, sums: normalise(
        self, sums._replace(loss_weight=sums.loss_weight * (1.01 if self.updates else 1.0))
    )


def _lose_weight_gradients(run: Any) -> Any:
    calls = itertools.count()
    first = results.STAGES * results.MICROBATCHES  # calls in a minibatch
    return lambda self: run(self) if next(calls) < first else iter(())


def _write_in_place(choose_storage: Any) -> Any:
    def wrong(self: Any, coming: Any) -> None:
        self._single = True
        choose_storage(self, coming)

    return wrong


def _read_newest(read: Any) -> Any:
    return lambda self, version: read(self, self.newest)


def _read_newest_stored(copy: Any) -> Any:
    return lambda self, version: copy(self, int(self._numbers[0]))


def _compile_each_time(compile_layer: Any, layer: Any, arguments: Any) -> Any:
    def run(*args: Any) -> Any:
        torch._dynamo.reset()  # its cache
        return compile_layer(layer, arguments)(*args)

    return run


def _sleep() -> None:
    time.sleep(2e-3)


def _leak() -> None:
    LEAKED.append(torch.ones(1))


def _call_finite(update: Any) -> Any:
    return lambda self, finite: update(self, True)


def _draw_late(seed: Any) -> Any:
    return lambda self, microbatch, layer: seed(self, microbatch + (microbatch > 3), layer)


def _double_laps(laps_s: Any) -> Any:
    return lambda self: [2.0 * lap_s for lap_s in laps_s(self)]


STAGE, UPDATE, HOST = "runtime.stage", "runtime.update", "extensions.host_weights"
FORWARD, BACKWARD = (f"{STAGE}.stage_module:StageModule.{name}" for name in ("forward", "backward"))
COMPILE = "extensions.compiled.compiler:compile_layer"
FAULTS: tuple[tuple[Any, str, str, Fault], ...] = (
    (speed.facts, "copy_bytes_per_s", "speed_checks:name_device", lambda name: lambda device: "H200"),
    (results.equality, "gpipe_differing_weights", f"{UPDATE}.optimizer:Optimizer.normalise", _divide_by_too_much),
    (results.equality, "dropout_differing_weights", f"{STAGE}.generators:LayerGenerators.seed", _draw_late),
    (results.equality, "zb_h1_distance", "extensions.split_backward.split:Deferred.run", _lose_weight_gradients),
    (results.equality, "pipedream_distance", f"{STAGE}.versions:Versions.choose_storage", _write_in_place),
    (results.equality, "pipedream_2bw_distance", f"{STAGE}.versions:Versions.read", _read_newest),
    (results.equality, "pipemare_distance", "extensions.delays.predictions:WeightPredictions.after_step", _do_nothing),
    (results.equality, "spectrain_distance", "extensions.delays.predictions:WeightPredictions._advance", _do_nothing),
    (results.equality, "roundpipe[delay=1]_distance", f"{HOST}.host_store:SharedWeights.copy", _read_newest_stored),
    (results.recurrent, "lstm_seconds_by_plain", FORWARD, _do_before(_sleep)),
    (results.precision, "bf16_loss_distance", f"{STAGE}.versions:Versions.cast", _do_nothing),
    (results.precision, "fp16_skipped_updates", "extensions.loss_scale.scaler:LossScale.update", _call_finite),
    (results.precision, "lstm_weights_that_did_not_move", f"{UPDATE}.optimizer:Optimizer._step", _do_nothing),
    (results.waits, "1f1b_waits", FORWARD, _do_before(lambda: torch.cuda.synchronize())),
    (speed.host, "1f1b_host_by_plain", FORWARD, _do_before(_sleep)),
    (speed.throughput, "rate_by_plain_at_0.1_ms", FORWARD, _do_before(_sleep)),
    (speed.memory, "1f1b_growth_bytes", "services.results.recorder:SpanRecorder.note", _do_before(_leak)),
    (speed.memory, "peak_by_plan", BACKWARD, _do_before(lambda: torch.ones(1 << 14))),
    (speed.clock, "large_profile_by_whole_model", "profiler.stopwatch:Stopwatch.laps_s", _double_laps),
    (results.checkpoint, "differing_weights", "services.checkpoint.optimizer_state:restore", _do_nothing),
    (results.compiled, "compilations_before_the_first_update", COMPILE, lambda run: lambda layer, arguments: layer),
    (results.compiled, "recompilations", COMPILE, lambda run: partial(_compile_each_time, run)),
)
"""Check, its finding that must fail, what is replaced, mostly in the runtime, and by what."""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler
@pytest.mark.parametrize(
    ("check", "finding", "place", "fault"), spread((slow(*row, id=row[1]) for row in FAULTS), every=8)
)
def test_a_fault_is_found(check: Any, finding: str, place: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    place = place if place.startswith("speed_checks") else f"pipedream.{place}"
    monkeypatch.setattr(place.replace(":", "."), fault(resolve_name(place)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        actual = next(item for item in check(CPU, loops.TINY) if item.name == finding)
    finally:
        torch.set_num_threads(threads)
        LEAKED.clear()
    assert not actual.ok


def test_each_check_has_a_fault() -> None:
    """Those of several ranks are below; NCCL's needs a card."""
    checks = {getattr(check, "__name__", "") for check, *_ in FAULTS} | {"links", "processes", "death", "nccl", "store"}
    assert checks == set(load_script(FOLDER / "run.py").CHECKS)


@pytest.mark.slow
def test_a_store_that_saves_no_memory_of_the_card_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "need_card", lambda device: None)
    monkeypatch.setattr(speed, "_measure_peak", lambda device: 1)
    assert [item.name for item in speed.store(CPU, loops.TINY) if not item.ok] == ["roundpipe_peak_by_plain"]


WRONG_RANK = """
import os, sys, time
if os.environ.get("RANK") == "1":
    from pipedream.runtime.update.optimizer import Optimizer
    normalise = Optimizer.normalise
    Optimizer.normalise = lambda self, sums: normalise(
        self, sums._replace(loss_weight=sums.loss_weight * (1.01 if self.updates else 1.0))
    )
if os.environ.get("RANK") == "0":
    sys.excepthook = lambda *error: time.sleep(120)  # it has failed, and does not end
"""


@pytest.mark.long
@pytest.mark.processes
def test_faults_of_a_rank_fail_their_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_RANK, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(ranks, "CASES", ranks.CASES[:1])
    scale = replace(loops.TINY, many_minibatches=16)
    for check, name in (
        (ranks.processes, "2_processes_differing_weights"),
        (ranks.links, "1f1b_differing_weights"),
        (ranks.death, "killed_seconds_until_all_are_gone"),
    ):
        finding = next(finding for finding in check(CPU, scale) if finding.name == name)
        assert not finding.ok, name

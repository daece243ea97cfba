"""An hour of kills, pauses and cut links: are losses those of undisturbed runs, and is anything left? See README.md.

Network, memory and temporary folder of each run are its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import kills
import recovery
import soak_job

import pipedream as pd
from pipedream import slow_links, testing
from pipedream.slow_links import Network

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import Environment, format_table, make_parser, stop_if

PACED = 100
"""Minibatches of the undisturbed run that take their time, and are timed."""
EVERY = 10  # minibatches between checkpoints
CUTS_S = (3.0, 8.0)
ATTEMPTS = "files of attempts"
"""Alone of what is counted they may grow: the launcher keeps a few for each attempt until it ends."""

_SHARES = {False: 0.55, True: 0.35}
"""Of a segment's time: what an undisturbed run of its minibatches would take, on one host and on two."""
_HANGS_S = 300.0
_ENDS_S = 15.0


@dataclass(frozen=True)
class Segment:
    """What is trained in a part of the hour.

    Attributes:
        hosts: whether each of the two workers is on a host of its own, with a link between them.
    """

    method: str
    shape: tuple[int, ...] = (1, 1)
    microbatches: int = 1
    hosts: bool = False

    @property
    def name(self) -> str:
        return f"{self.method}, {len(self.shape)} stages{' on 2 hosts' if self.hosts else ''}"


SEGMENTS = (
    Segment("1f1b", microbatches=2, hosts=True),
    Segment("pipedream"),
    Segment("pipedream_2bw", (1, 1, 1), microbatches=3),
    Segment("pipedream", hosts=True),
    Segment("chimera", microbatches=2),
    Segment("roundpipe", (1, 1, 1, 1), microbatches=2),
)


@dataclass
class Outcome:
    """What came of a segment.

    Attributes:
        cuts: seconds of each cut link, and whether the run went on without a restart.
        recoveries_s: from each kill of workers to the next new minibatch; launchers_s: of launchers.
        undisturbed_s: of the same minibatches, if nothing happens.
        differ: minibatches whose loss is another one than undisturbed, in any attempt.
        missing, twice: minibatches that are not in losses.json, or more than once.
        before, after: what processes and folders have after the first minute and at the end.
        problem: '' if the run ended as it must.
    """

    name: str
    minibatches: int = 0
    kills: int = 0
    pauses: int = 0
    cuts: list[tuple[float, bool]] = field(default_factory=list)
    restarts: int = 0
    repeated: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    launchers_s: list[float] = field(default_factory=list)
    undisturbed_s: float = 0.0
    disturbed_s: float = 0.0
    differ: int = 0
    missing: int = 0
    twice: int = 0
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def good(self) -> bool:
        grown = [name for name in self.before if name != ATTEMPTS and self.after[name] > self.before[name]]
        survived = all(alive for seconds, alive in self.cuts if seconds == min(CUTS_S))
        return survived and not (self.problem or grown or self.differ or self.missing or self.twice)


class Run(ABC):
    """A run of a segment in a folder, which is started again whenever its launcher was killed."""

    def __init__(self, segment: Segment, folder: Path, minibatches: int, paced: float = float("inf")) -> None:
        self.segment, self.folder, self.finished = segment, folder, folder / "finished"
        for name in ("run", "memory", "temporary"):
            (folder / name).mkdir(parents=True)
        plan = make_plan(segment, folder / "plan.json")
        self.workers = pd.Plan.load(plan).workers
        self._options = ["--plan", str(plan), "--schedule", segment.method, "--microbatches", str(segment.microbatches)]
        self._options += ["--checkpoint-every", str(EVERY), "--minibatches", str(minibatches)]
        self._options += ["--out", str(folder / "run"), "--resume", str(folder / "run")]
        self._variables = {"FINISHED": str(self.finished), "PACED": str(paced), "TMPDIR": str(folder / "temporary")}

    @abstractmethod
    def start(self) -> None:
        """Starts or continues the run."""

    @abstractmethod
    def tend(self) -> bool:
        """Starts again what has to be; returns whether the run has ended in order."""

    @abstractmethod
    def list_workers(self) -> list[int]:
        """Returns the process ids of the workers, by rank."""

    @property
    @abstractmethod
    def launcher(self) -> int | None:
        """Process id of the launcher, if there is one."""

    def popen(self, *more: str, inside: Sequence[str] = (), **variables: str) -> subprocess.Popen[bytes]:
        """Starts `pipedream train` with its own shared memory."""
        mount = (
            "unshare",
            "--mount",
            "sh",
            "-c",
            'mount --bind "$0" /dev/shm && exec "$@"',
            str(self.folder / "memory"),
        )
        train = (sys.executable, "-m", "pipedream", "train", soak_job.__file__, *self._options, *more)
        with (self.folder / "errors").open("ab") as errors:
            return subprocess.Popen(
                (*inside, *mount, *train),
                env=os.environ | {"PYTHONPATH": str(recovery.SOURCE)} | self._variables | variables,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def end(self) -> None:
        """Kills what is left."""
        while pids := kills.list_processes(self.folder):
            _send(pids, signal.SIGKILL)
            time.sleep(0.05)

    def describe_held(self) -> dict[str, int]:
        """Returns what processes and folders have now; raises OSError if a worker has just ended."""
        counts = {}
        if len(self.list_workers()) < self.workers:
            raise ProcessLookupError
        for name, pids in (("launcher", [self.launcher] if self.launcher else []), ("worker", self.list_workers())):
            for what, folder in (("descriptors", "fd"), ("threads", "task")):
                if pids:
                    counts[f"{name}'s {what}"] = max(len(os.listdir(f"/proc/{pid}/{folder}")) for pid in pids)
        if self.launcher:
            counts["processes"] = len(self.list_workers())
        counts["files in run"] = sum(len(files) for _, _, files in os.walk(self.folder / "run"))
        temporary = [Path(folder, file) for folder, _, files in os.walk(self.folder / "temporary") for file in files]
        counts[ATTEMPTS] = sum(file.parent.name.isdigit() for file in temporary)
        counts["files in temporary"] = len(temporary) - counts[ATTEMPTS]
        counts["/dev/shm bytes"] = sum(file.stat().st_size for file in (self.folder / "memory").rglob("*"))
        return counts


class OneHost(Run):
    """A run of `pipedream train --workers`, whose launcher restarts workers."""

    def start(self) -> None:
        self._launcher = self.popen("--workers", str(self.workers), "--max-restarts", "1000000")

    @property
    def launcher(self) -> int | None:
        return self._launcher.pid

    def list_workers(self) -> list[int]:
        return recovery.list_workers(self._launcher, self.workers)

    def tend(self) -> bool:
        status = self._launcher.poll()
        if status in (None, 0):
            return status == 0
        if status != -signal.SIGKILL:
            raise RuntimeError(f"exit status {status}")
        end_s = time.monotonic() + _ENDS_S
        while kills.list_processes(self.folder):
            if time.monotonic() > end_s:
                raise RuntimeError("orphans")
            time.sleep(0.05)
        self.start()
        return False


class TwoHosts(Run):
    """A run of one worker on each of two hosts; as Slurm does, this starts both again if one has ended."""

    def __init__(self, network: Network, *args: Any) -> None:
        super().__init__(*args)
        self._network, self._port, self._ended_s = network, 29500, 0.0

    def start(self) -> None:
        self._port += 1
        self._ended_s = 0.0
        self._workers = [
            self.popen(inside=host.inside(), **self._network.variables(rank, port=self._port), LOCAL_RANK="0")
            for rank, host in enumerate(self._network.hosts)
        ]

    @property
    def launcher(self) -> int | None:
        return None

    def list_workers(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def tend(self) -> bool:
        statuses = [worker.poll() for worker in self._workers]
        if any(statuses):
            self._ended_s = self._ended_s or time.monotonic()
            late = time.monotonic() > self._ended_s + _ENDS_S
            for worker in self._workers:
                if late or _is_stopped(worker.pid):
                    worker.kill()
            if None not in statuses:
                self.start()
        return statuses == [0, 0]

    def cut(self, *, up: bool) -> None:
        """Takes the link between the hosts away, or puts it back."""
        _, (hub, port) = self._network._ports[0, 1]
        hub.batch("ip", [f"link set {port} {'up' if up else 'down'}"])


def make_plan(segment: Segment, file: Path) -> Path:
    """Writes a plan with equally many layers in each stage."""
    fresh = soak_job.recipe()
    batch = next(iter(fresh.train))
    how: dict[str, Any] = {"model": fresh.model, "data": [batch], "loss": fresh.loss, "optimizer": fresh.optimizer}
    return testing.Training(**how, plan=segment.shape, schedule=segment.method).resolved_plan.save(file)


def list_events(segment: Segment, draw: random.Random) -> Iterator[tuple[float, str, float]]:
    """Yields the second, what happens ('kill', 'pair', 'launcher', 'pause', 'cut') and how long, without end.

    On one host a kill every 15 s and a pause every minute; the launcher is killed only in the first minute, so that it
    lives long. On two hosts kills leave time for cuts, which shall show by themselves what they do.
    """
    minute = 0
    while True:
        begin_s = minute * (75.0 if segment.hosts else 60.0)
        pause = "pause", draw.uniform(3.0, 20.0)
        doomed = [draw.choice(["kill", "kill", "pair"]) for _ in range(4)]
        if segment.hosts:
            events = [(10, "cut", CUTS_S[minute % 2]), (30, doomed[0], 0.0), (42, doomed[1], 0.0), (52, *pause)]
        else:
            doomed[1] = doomed[1] if minute else "launcher"
            events = [(15 * number + 15, kind, 0.0) for number, kind in enumerate(doomed)]
            events.insert(3, (52, *pause))
        yield from ((begin_s + at_s, kind, seconds) for at_s, kind, seconds in events)
        minute += 1


class Disturbance:
    """Makes the events of a run when their time has come, and notes them.

    Their time stands still until the run has come back, which takes long on a busy machine.
    """

    def __init__(self, run: Run, draw: random.Random, outcome: Outcome) -> None:
        self._run, self._draw, self._outcome = run, draw, outcome
        self._events = list_events(run.segment, draw)
        self._next, self._newest, self._clock_s = next(self._events), -1.0, (0.0, 0.0)
        self._stopped: list[tuple[float, int]] = []
        self.killed_s: list[tuple[float, list[float]]] = []  # when, and where to note the recovery
        self.cuts_s: list[tuple[float, float]] = []

    def make_events(self, passed_s: float, newest: float) -> None:
        """Makes what is due, if a new minibatch has ended since the last event."""
        for due_s, pid in [stopped for stopped in self._stopped if stopped[0] <= passed_s]:
            _send([pid], signal.SIGCONT)
            self._stopped.remove((due_s, pid))
        (last_s, trained_s), (at_s, kind, seconds) = self._clock_s, self._next
        trained_s += passed_s - last_s if newest > self._newest else 0.0
        self._clock_s = passed_s, trained_s
        if newest > self._newest and trained_s >= at_s:
            self._newest, self._next = newest, next(self._events)
            getattr(self, f"_{kind}", self._kill)(kind, seconds, passed_s)

    def _kill(self, kind: str, seconds: float, passed_s: float) -> None:
        workers = self._run.list_workers()
        count = 2 if kind == "pair" else 1
        doomed = self._draw.sample(workers, min(count, len(workers)))
        if kind == "launcher":
            doomed = [self._run.launcher or workers[0]]
        recoveries_s = self._outcome.launchers_s if kind == "launcher" else self._outcome.recoveries_s
        self.killed_s.append((time.time(), recoveries_s))
        _send(doomed, signal.SIGKILL)
        self._outcome.kills += len(doomed)

    def _pause(self, kind: str, seconds: float, passed_s: float) -> None:
        for pid in self._run.list_workers()[:1] if self._draw.random() < 0.5 else self._run.list_workers()[-1:]:
            _send([pid], signal.SIGSTOP)
            self._stopped.append((passed_s + seconds, pid))
            self._outcome.pauses += 1

    def _cut(self, kind: str, seconds: float, passed_s: float) -> None:
        assert isinstance(self._run, TwoHosts)
        began_s = time.time()
        self._run.cut(up=False)
        time.sleep(seconds)
        self._run.cut(up=True)
        self.cuts_s.append((began_s, seconds))


def try_segment(segment: Segment, seconds: float, seed: int) -> Outcome:
    """Trains undisturbed, then as many minibatches with kills, pauses and cuts; compares."""
    outcome, draw = Outcome(segment.name), random.Random(seed)
    with TemporaryDirectory() as folder, _hosts(segment) as how:
        try:
            undisturbed, outcome.undisturbed_s = _train_undisturbed(how(Path(folder, "calm")), segment, seconds)
            outcome.minibatches = len(undisturbed)
            run = how(Path(folder, "soak"), outcome.minibatches)
            try:
                _disturb(run, draw, outcome)
                _compare(run, undisturbed, outcome)
            except BaseException as error:
                outcome.problem = f"{type(error).__name__}: {error}"
                print((run.folder / "errors").read_text(errors="replace")[-6000:], file=sys.stderr, flush=True)
                raise
            finally:
                run.end()
        except KeyboardInterrupt:
            raise Interrupted(outcome) from None
        except Exception as error:
            outcome.problem = outcome.problem or f"{type(error).__name__}: {error}"
    return outcome


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, and what there is of the segment."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


@contextmanager
def _hosts(segment: Segment) -> Iterator[Any]:
    """Yields what makes runs, with its network."""
    with ExitStack() as stack:
        network = stack.enter_context(slow_links.slow_network((2,), (None,))) if segment.hosts else None

        def make(folder: Path, minibatches: int = 10**9) -> Run:
            args = segment, folder, minibatches, float("inf") if minibatches < 10**9 else PACED
            return TwoHosts(network, *args) if network is not None else OneHost(*args)

        yield make


def _train_undisturbed(run: Run, segment: Segment, seconds: float) -> tuple[dict[int, float], float]:
    """Returns the loss of each minibatch, and the seconds that all of them take.

    Only the first ones take their time; their rate says how many there shall be.
    """
    run.start()
    end_s = time.monotonic() + max(_HANGS_S, seconds)

    def wait_for(minibatches: int) -> list[tuple[float, ...]]:
        while len(rows := _read_lines(run.finished)) < minibatches:
            if run.tend() or time.monotonic() > end_s:
                raise RuntimeError(f"the undisturbed run has not come to minibatch {minibatches}")
            time.sleep(0.2)
        return rows

    try:
        paced, first = wait_for(PACED), PACED // 4
        minibatch_s = (paced[PACED - 1][1] - paced[first][1]) / (PACED - 1 - first)
        minibatches = max(2 * PACED, int(_SHARES[segment.hosts] * seconds / minibatch_s))
        return {
            int(number): loss for number, _, _, loss in wait_for(minibatches)[:minibatches]
        }, minibatches * minibatch_s
    finally:
        run.end()


def _disturb(run: Run, draw: random.Random, outcome: Outcome) -> None:
    """Runs to the end, and looks often at what processes and folders have while nothing happens to them."""
    run.start()
    disturbance, samples = Disturbance(run, draw, outcome), list[tuple[float, dict[str, int]]]()
    process, since_s, began_s, newest, moved_s = 0.0, 0.0, 0.0, -1.0, time.monotonic()
    try:
        while not run.tend():
            now_s, last = time.monotonic(), _read_lines(run.finished, newest_only=True)
            for number, at_s, pid, _ in last:
                began_s = began_s or now_s
                if pid != process:
                    process, since_s = pid, now_s
                if number > newest:
                    newest, moved_s = number, now_s
                if time.time() - at_s < 0.5 and now_s - since_s > 3.0 and number < outcome.minibatches - EVERY:
                    with suppress(OSError):  # a file or process has just gone
                        samples.append((now_s - began_s, run.describe_held()))
                disturbance.make_events(now_s - began_s, newest)
            if now_s - moved_s > _HANGS_S:
                raise RuntimeError(f"hang after minibatch {newest:g}")
            time.sleep(0.2)
    finally:
        if rows := _read_lines(run.finished):
            _note(outcome, disturbance, rows)
    after_s = min(60.0, samples[-1][0] / 3) if samples else 0.0
    settled = [counts for at_s, counts in samples if at_s >= after_s]
    for name in settled[0] if settled else ():
        outcome.before[name] = min(counts[name] for counts in settled[:20])
        outcome.after[name] = min(counts[name] for counts in settled[-20:])


def _note(outcome: Outcome, disturbance: Disturbance, rows: list[tuple[float, ...]]) -> None:
    """Reads from the lines what kills and cuts have cost."""
    outcome.disturbed_s = rows[-1][1] - rows[0][1]
    outcome.restarts = sum(before[2] != after[2] for before, after in pairwise(rows))
    outcome.repeated = len(rows) - len({row[0] for row in rows})
    for killed_s, recoveries_s in disturbance.killed_s:
        process = next((row[2] for row in reversed(rows) if row[1] <= killed_s), 0.0)
        end_s = next((row[1] for row in rows if row[1] > killed_s and row[2] != process), float("inf"))
        newest = max((row[0] for row in rows if row[1] < end_s), default=-1)  # others may have ended one after the kill
        new_s = next((row[1] for row in rows if row[1] >= end_s and row[0] > newest), None)
        recoveries_s += [] if new_s is None else [new_s - killed_s]
    for began_s, seconds in disturbance.cuts_s:
        before = [row[2] for row in rows if row[1] < began_s]
        after = [row[2] for row in rows if row[1] > began_s + seconds]
        if before and after:
            outcome.cuts.append((seconds, before[-1] == after[0]))


def _compare(run: Run, undisturbed: dict[int, float], outcome: Outcome) -> None:
    rows = _read_lines(run.finished)
    losses = [(number, loss) for number, loss in json.loads((run.folder / "run" / "losses.json").read_text())]
    losses = [(number, loss) for number, loss in losses if number in undisturbed]  # others were drained at the end
    numbers = [number for number, _ in losses]
    outcome.missing, outcome.twice = len(undisturbed.keys() - set(numbers)), len(numbers) - len(set(numbers))
    computed = [*losses, *((int(number), loss) for number, _, _, loss in rows if number in undisturbed)]
    outcome.differ = len({number for number, loss in computed if loss != undisturbed[number]})
    if numbers != sorted(numbers):
        outcome.problem = "losses.json is not in order"


def _read_lines(file: Path, *, newest_only: bool = False) -> list[tuple[float, ...]]:
    """Returns (number, time, process of rank 0, loss) of each line, or of the last one."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [tuple(map(float, line.split()[1:])) for line in (lines[-1:] if newest_only else lines)]


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def describe(outcomes: Sequence[Outcome]) -> str:
    """Returns a table of what happened, and one of what processes and folders had."""
    rows = [_describe_row(outcome.name, [outcome]) for outcome in outcomes]
    titles = "training | minibatches | killed | pauses | cuts, survived | restarts | repeated "
    titles += (
        "| to a new minibatch, median, worst | of launchers | goodput | losses that differ, missing, twice | problems"
    )
    table = format_table(titles, "lr", [*rows, _describe_row("all", outcomes)])
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.before)
    counts = [
        (outcome.name, *(f"{outcome.before.get(name, 0):,} to {outcome.after.get(name, 0):,}" for name in names))
        for outcome in outcomes
    ]
    return f"{table}\n\n{format_table(' | '.join(['training', *names]), 'lr', counts)}" if names else table


def _describe_row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    def total(what: str) -> int:
        return sum(getattr(outcome, what) for outcome in outcomes)

    cuts = [cut for outcome in outcomes for cut in outcome.cuts]
    counts = [
        f"{sum(s == each for s, _ in cuts)} of {each:g} s, {sum(a for s, a in cuts if s == each)}" for each in CUTS_S
    ]
    waits = [[s for outcome in outcomes for s in getattr(outcome, name)] for name in ("recoveries_s", "launchers_s")]
    disturbed_s = sum(outcome.disturbed_s for outcome in outcomes)
    undisturbed_s = sum(outcome.undisturbed_s for outcome in outcomes if outcome.disturbed_s)
    return [
        name,
        *(f"{total(what):,}" for what in ("minibatches", "kills", "pauses")),
        "; ".join(counts) if cuts else "",
        *(f"{total(what):,}" for what in ("restarts", "repeated")),
        *(f"{median(wait):.2f} s, {max(wait):.2f} s" if wait else "" for wait in waits),
        f"{undisturbed_s / disturbed_s:.0%}" if disturbed_s else "",
        ", ".join(f"{total(what)}" for what in ("differ", "missing", "twice")),
        "; ".join(outcome.problem for outcome in outcomes if outcome.problem) or "none",
    ]


def soak(segments: Sequence[Segment], minutes: float, segment_s: float, seed: int, file: Path) -> int:
    """Runs segments in turn until the time is over; writes the file after each. Returns the exit status."""
    environment, outcomes, end_s = Environment(), list[Outcome](), time.monotonic() + 60 * minutes
    try:
        while not outcomes or end_s - time.monotonic() > segment_s / 2:
            number = len(outcomes)
            seconds = min(segment_s, max(segment_s / 2, end_s - time.monotonic()))
            outcomes.append(try_segment(segments[number % len(segments)], seconds, seed + number))
            print(f"{time.strftime('%H:%M:%S')} {outcomes[-1]}", flush=True)
            write(file, environment, outcomes)
    except Interrupted as interrupted:
        outcomes.append(interrupted.outcome)
        write(file, environment, outcomes)
    print(tell(file))
    return int(not all(outcome.good for outcome in outcomes))


def write(file: Path, environment: Environment, outcomes: Sequence[Outcome]) -> None:
    rows = {"environment": environment.describe(), "outcomes": [asdict(outcome) for outcome in outcomes]}
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def tell(file: Path) -> str:
    """Returns environment and tables of what is in a file."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    return f"{rows['environment']}\n\n{describe([Outcome(**row) for row in rows['outcomes']])}"


def try_starts(starts: int, busy: int) -> int:
    """Starts and ends one tiny run so many times while other processes are busy; returns the exit status.

    Prints a line for each start, and one for all, also after Ctrl-C.
    """
    environment, results, seconds = Environment(), list[str](), list[float]()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(busy)]
    try:
        for number in range(starts):
            began_s = time.monotonic()
            results.append(_start_once())
            seconds.append(time.monotonic() - began_s)
            print(
                f"start {number}: {seconds[-1]:.1f} s, {'as the first' if results[-1] == results[0] else results[-1]}"
            )
    except KeyboardInterrupt:
        pass
    finally:
        for other in others:
            other.kill()
            other.wait()
    failed, different = sum(not result.startswith("[[") for result in results), len(set(results))
    print(f"{environment.describe(f'{busy} busy processes')}\n\n{len(results)} starts: {failed} failed, ", end="")
    print(
        f"{different} different results; median {median(seconds or [0]):.1f} s, worst {max(seconds, default=0):.1f} s"
    )
    return int(failed > 0 or different != 1)


def _start_once() -> str:
    """Returns the losses, or what went wrong."""
    with TemporaryDirectory() as folder:
        run = OneHost(Segment("1f1b", microbatches=2), Path(folder, "run"), 20)
        run.start()
        try:
            status = run._launcher.wait(_HANGS_S)
            left = [*kills.list_processes(run.folder), *os.listdir(run.folder / "memory")]
            if status or left:
                return (
                    f"exit status {status}, left {left}: {(run.folder / 'errors').read_text(errors='replace')[-4000:]}"
                )
            return (run.folder / "run" / "losses.json").read_text()
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        finally:
            run.end()


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--segment-s", type=float, default=300.0, help="seconds of each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="part of the name of a training; repeatable")
    parser.add_argument("-o", "--output", type=Path, default=Path("soak.json"))
    parser.add_argument("--table", action="store_true", help="print the table of the output file")
    parser.add_argument("--starts", type=int, metavar="N", help="only start and end a tiny run N times")
    parser.add_argument("--busy", type=int, default=8, help="busy processes beside --starts")
    options = parser.parse_args()
    if options.table:
        print(tell(options.output))
        return 0
    stop_if(slow_links.why_not(), "failures")
    if options.starts:
        return try_starts(options.starts, options.busy)
    segments = [segment for segment in SEGMENTS if all(part in segment.name for part in options.only or ())]
    return soak(segments, options.minutes, options.segment_s, options.seed, options.output)


if __name__ == "__main__":
    raise SystemExit(main())

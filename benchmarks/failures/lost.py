"""What a lost worker costs: with a replica, replaced, planned again; random kills; one kill a minute. See README.md.

The recipe is recovery.py's, of which a minibatch takes 20 ms.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from pipedream import slow_links

sys.path.append(str(Path(__file__).parents[1]))
import hosts
import kills
import recovery
from scaffold import Environment, collect_rounds, format_quartiles, format_table, make_parser, stop_if

CASES: dict[str, tuple[tuple[int, ...], int, int, tuple[str, ...]]] = {
    "a stage of 1-1": ((1, 1), 1, 1, ()),
    "a replica of 2-1-1, a checkpoint of each minibatch": ((2, 1, 1), 0, 1, ("--elastic", "--checkpoint-every", "1")),
    "a replica of 2-1-1": ((2, 1, 1), 0, 1, ("--elastic", *recovery.SAVES_OFTEN)),
    "one of 4 data parallel": ((4,), 0, 3, ("--elastic", *recovery.SAVES_OFTEN)),
    "a stage of 1-1-1-1, replaced": ((1, 1, 1, 1), 1, 3, recovery.SAVES_OFTEN),
    "the same, a checkpoint every 20": ((1, 1, 1, 1), 1, 3, ()),
    "a stage of 1-1-1-1, planned again for 3": ((1, 1, 1, 1), 0, 3, ("--straight", "--elastic", *recovery.SAVES_OFTEN)),
}
"""Name -> replicas, restarts, the rank that is killed, options."""


def measure(name: str, source: Path = recovery.SOURCE) -> tuple[float, int]:
    """Returns the seconds from the kill to the next finished minibatch, and the minibatches that are repeated."""
    shape, restarts, victim, more = CASES[name]
    with TemporaryDirectory() as folder:
        # A run that was given a plan has no profile, and has to measure one to plan again.
        plan_options = (
            [] if "--straight" in more else ["--plan", str(recovery.make_plan(shape).save(Path(folder, "plan.json")))]
        )
        return recovery.time_recovery(source, sum(shape), restarts, victim, *plan_options, *more)


def measure_goodput(name: str, minutes: int) -> tuple[float, list[float]]:
    """Trains for some minutes, in the middle of each of which a worker is killed.

    Returns the minibatches a second, and for each kill the seconds until the next minibatch was finished. All save
    equally often.
    """
    shape = (1, 1)
    options = ["--plan", "", "--epochs", "1000000"]
    with TemporaryDirectory() as folder:
        place = Path(folder)
        options[1] = str(recovery.make_plan(shape).save(place / "plan.json"))
        by_torchrun = name == "torchrun"
        launcher = recovery.start(place, recovery.SOURCE, sum(shape), 10**6, *options, by_torchrun=by_torchrun)
        finished, killed_s = place / "finished", list[float]()
        with launcher:
            recovery.wait_until(finished.exists, launcher)
            began_s = time.time()
            for minute in range(minutes):
                time.sleep(max(0.0, began_s + 60 * minute + 30 - time.time()))
                if name != "undisturbed":
                    killed_s.append(time.time())
                    os.kill(recovery.list_workers(launcher, sum(shape))[-1], signal.SIGKILL)
            time.sleep(max(0.0, began_s + 60 * minutes - time.time()))
            rows = recovery.read_finished(finished)
            launcher.send_signal(signal.SIGTERM)
        pauses = [next(row[2] for row in rows if row[0] > number) - at_s for number, at_s in enumerate(killed_s)]
        return max(row[1] for row in rows) / (60 * minutes), pauses


def tell_goodput(minutes: int, runs: int) -> str:
    """Returns a table of runs with a failure in each minute."""
    names = ["undisturbed", "pipedream train", "torchrun"]
    results = collect_rounds(lambda name: measure_goodput(name, minutes), names, runs)
    best = median(rate for rate, _ in results["undisturbed"])
    rows = []
    for name, runs_of_name in results.items():
        rate = median(rate for rate, _ in runs_of_name)
        pauses = [pause for _, pauses in runs_of_name for pause in pauses]
        pause = f"{median(pauses):.2f} s" if pauses else ""
        rows.append((name, len(pauses), f"{rate:.1f}", f"{rate / best:.1%}", pause))
    return format_table("restarted by | failures | minibatches/s | of undisturbed | pause, median", "lrrrr", rows)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--only", action="append", help="part of the name of a case; repeatable")
    parser.add_argument("--sources", type=Path, nargs="+", help="src folders of the versions to compare")
    parser.add_argument("--hosts", action="store_true", help="one of two hosts is lost, in namespaces; as root")
    parser.add_argument("--kills", action="store_true", help="kills at random moments; compare weights and losses")
    parser.add_argument("--seed", type=int, default=0, help="number of the first of the random kills")
    parser.add_argument("--goodput", type=int, metavar="MINUTES", help="with a failure in each minute")
    options = parser.parse_args()
    environment = Environment()
    if options.kills:
        status = kills.run_trials(range(options.seed, options.seed + options.trials))
        print(environment.describe())
        return status
    if options.goodput:
        table = tell_goodput(options.goodput, options.trials)
        print(f"{environment.describe(f'{options.trials} runs of {options.goodput} minutes')}\n\n{table}")
        return 0
    if options.hosts:
        stop_if(slow_links.why_not(), "failures")
    cases, measure_case = (hosts.CASES, hosts.measure) if options.hosts else (CASES, measure)
    names = [name for name in cases if not options.only or any(part in name for part in options.only)]
    runs = {name: partial(measure_case, name) for name in names}
    if options.sources:
        runs = {f"{name}, {src}": partial(measure, name, src) for name, src in product(names, options.sources)}
    table = []
    for name, trials in collect_rounds(lambda name: runs[name](), runs, options.trials).items():
        seconds, repeated = zip(*trials, strict=True)
        quartiles = format_quartiles(seconds, "{:.2f} s".format)
        table.append((name, quartiles, f"{max(seconds):.2f} s", f"{median(repeated):g}"))
    print(f"{environment.describe(f'{options.trials} trials')}\n")
    print(format_table("lost | median (quartiles) | worst | minibatches repeated", "lrrr", table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

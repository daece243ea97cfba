"""Writes docs/gallery.md and docs/img/*.svg from the schedules themselves.

With --check it writes nothing and says what is out of date.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from pipedream.core.artifact import write_text
from pipedream.core.errors import ScheduleError
from pipedream.core.schedule import Schedule
from pipedream.core.timeline import Timeline
from pipedream.lowering import lower
from pipedream.report.gallery import Entry, gallery, prose
from pipedream.report.svg import timeline_svg
from pipedream.schedules import COMPENSATED, SCHEDULES, uniform
from pipedream.simulator import costs, simulate

DOCS = Path(__file__).parents[1] / "docs"
STAGES, MICROBATCHES, LONG = 4, 8, 64

CHOOSE = {
    "naive": "Never for speed: it is the baseline. It is right for a model that does not fit one worker and is run "
    "seldom, and for finding out whether an error comes from the pipeline or from the model.",
    "gpipe": "When a minibatch splits into many microbatches (m at least 4 p) and memory is plentiful, or when an "
    "order is wanted that is easy to follow. The result is that of one process; 1f1b gives it too, in the same time, "
    "with less memory.",
    "1f1b": "The first choice where the result must be that of one process: GPipe's bubble, and a stage holds at most "
    "p microbatches instead of m. Split the minibatch as finely as the workers stay efficient.",
    "interleaved_1f1b": "When the bubble of 1f1b is too long and the minibatch cannot be split further: v stages a "
    "worker make it nearly v times shorter, for v times the messages. On slow links these cost more than the bubble "
    "saves: simulate both.",
    "breadth_first": "Where messages are slow beside the compute of a microbatch, and memory is plentiful: the bubble "
    "of interleaved_1f1b, but a stage's microbatches follow each other, so that a message has the longest time.",
    "chimera": "When a minibatch has few microbatches, about as many as workers, and the weights are small beside the "
    "activations: about half of 1f1b's bubble, for two sets of weights a worker and a sum over two holders at each "
    "update. The number of workers must be even.",
    "zb_h1": "Where 1f1b is right, messages are fast, and a stage's time is in weights: layers whose backward is two "
    "products, one for what arrived and one for the weight. A third of 1f1b's bubble; every stage holds as much as "
    "1f1b's first. It gains nothing where the halves cannot be parted (compiled modules, fused recurrent layers).",
    "zb_h2": "When there is memory for twice as many microbatches. Over one minibatch its bubble is that of zb_h1, but "
    "its workers begin and end one behind the other, and go on with the next minibatch without waiting: in a run of "
    "many the bubble is gone. Not with clipping by the global norm, for which all stages wait at each update.",
    "zbv": "When two stages a worker and the messages that go with them are cheap: no bubble in a run of many "
    "minibatches, with the activations of 1f1b. Needs m >= 2p, and forwards and both halves of backwards about equal.",
    "dualpipev": "Where messages can hide behind the computation of the other direction, as with experts on many "
    "devices: a forward stands beside each backward. Else zbv has less bubble and holds less.",
    "chimera_doubled": "As chimera, with many microbatches, and backwards that take twice as long as forwards, which "
    "they do; holds twice as many microbatches.",
    "roundpipe": "When the stages do not come out even on the workers, or their weights and what belongs to them take "
    "more memory than activations: any number of stages from p on, and a worker computes on one set of weights "
    "beside its own. Its bubble is that of as many slots as there are forwards and backwards together. It does each "
    "forward twice, and a stage's weights travel once a minibatch: links must carry them beside the activations.",
    "pipedream": "When the minibatch cannot be split or the bubble of a flush is too dear: no worker waits in steady "
    "state, at the price of stale gradients and of a set of weights for each minibatch in flight. The plan may "
    "replicate stages.",
    "pipedream_vertical_sync": "When all stages must see one version of the whole model for a minibatch, so that the "
    "update rule is exactly delayed SGD. Costs more staleness and more weight sets than pipedream.",
    "pipedream_2bw": "When the weights are large: no bubble in steady state with two sets of weights at any depth, and "
    "a staleness of one update everywhere. Needs m >= p - 1 microbatches in a minibatch.",
    "nesterov_async": "With SGD and PipeDream's stages of different delay, when only the momentum may be changed: it "
    "looks one update ahead at every stage, and costs no memory. Give the paper's rate times 1 - m. With Adam, plain "
    "`pipedream` and NAdam with a long momentum, which is what the paper ran.",
    "ftpipe_msnag": "With SGD with momentum: each stage looks ahead by its own delay, at no cost in memory.",
    "ftpipe_ga": "When weights move by very different amounts within the delay: the gradients of those that moved far "
    "count less. One more tensor for each weight, the moving average of squared steps.",
    "pipedream_lr": "When a run diverges in its first phase at the rate that is right for one worker: late stages "
    "begin at a share of it. K is about the length of the warm-up or of the first decay.",
    "pb_lwp_sc": "With pipelined_backprop and SGD with momentum: its paper's best. The prediction helps the forward, "
    "the spike the late gradient.",
    "one_step_ef": "With AdamW or Muon on the two weight sets of 2BW: it gives back most of what one update of delay "
    "costs. One more tensor for each weight, the last update.",
    "pipelined_backprop": "To study training with delay at its barest: one set of weights, no flush, and twice "
    "pipedream's staleness. For a small rate, or many small stages whose forward and backward run at once.",
    "pb_lwp": "With pipelined_backprop, where its delay hurts: SGD with momentum, Adam or AdamW. The prediction is as "
    "good as the velocity is steady, so long horizons need long momentum.",
    "pipemare": "To study one set of weights with a correction of the backward, at the concurrent clock of its paper, "
    "which adds rates by stage and a synchronous beginning.",
    "spectrain": "With momentum and few stages, in one set of weights. The second pass is predicted too, towards the "
    "same weights.",
    "spectrain_v2": "As pipedream, whose gradients are true ones, but at predicted weights; one set of weights more.",
    "pipeoptim": "With Adam or AdamW where pipedream's sets of weights do not fit: the forward is predicted, one set "
    "of weights, and a copy of it during a forward.",
    "xpipe": "As pipeoptim, with minibatches that are split: one update a minibatch, one prediction for all of its "
    "microbatches.",
    "paci": "When the weights are large and a little delay does no harm: no bubble, one set of weights, and, with "
    "m >= p - 1 microbatches, a staleness of one update at most.",
    "v_timeprest": "To study the order nF1B: paci's weights and updates, with the backwards of a minibatch together. "
    "It holds more microbatches than paci and is no less late.",
}
PICTURES = {
    "naive": ("Naive model parallelism, m = 1", 1, 4),
    "gpipe": ("GPipe: all forwards, then all backwards, flush; m = 4", 4, 8),
    "1f1b": ("1F1B with a flush, m = 4", 4, 8),
    "interleaved_1f1b": ("Interleaved 1F1B: two stages (s) a worker, m = 4", 4, 8),
    "breadth_first": ("Breadth-first: two stages (s) a worker, m = 4", 4, 8),
    "chimera": ("Chimera: one pipeline down, one up; s is the stage; m = 4", 4, 8),
    "roundpipe": ("RoundPipe: forwards and backwards dispatched in round robin; s is the stage; m = 4", 4, 8),
    "zb_h1": ("ZB-H1: 1F1B with split backwards, flush; m = 4", 4, 4),
    "zb_h2": ("ZB-H2: twice the depth, two minibatches; m = 7", 7, 14),
    "zbv": ("ZB-V: two stages (s) a worker, m = 8", 8, 8),
    "dualpipev": ("DualPipeV: two stages (s) a worker, m = 8", 8, 8),
    "chimera_doubled": ("Chimera with forward doubling; s is the stage; m = 8", 8, 16),
    "pipedream": ("PipeDream: 1F1B, no flush; v is the version of the weights that an op reads", None, 12),
    "pipedream_vertical_sync": (
        "PipeDream with vertical sync: one version (v) for a minibatch at all stages",
        None,
        12,
    ),
    "pipedream_2bw": ("PipeDream-2BW: 1F1B, no flush, two versions (v) of the weights; m = 4", 4, 12),
    "pipelined_backprop": (
        "Pipelined backpropagation: 1F1B at twice the depth; each op reads the newest version (v)",
        None,
        12,
    ),
    "pb_lwp": ("Pipelined backpropagation, forwards at weights predicted from version v", None, 12),
    "pipemare": ("PipeMare: backwards at weights corrected back from version v; m = 4", 4, 12),
    "spectrain": ("SpecTrain: both passes at weights predicted from version v", None, 12),
    "spectrain_v2": ("SpecTrain, second version: predicted from version v, kept for the backward", None, 12),
    "pipeoptim": ("PipeOptim: forwards at weights predicted from version v", None, 12),
    "xpipe": ("XPipe: a minibatch's forwards share one prediction from version v; m = 4", 4, 12),
    "paci": ("PACI: each op reads the newest version (v); m = 4", 4, 12),
    "v_timeprest": ("V-TiMePReSt: m forwards, then m backwards; each op reads the newest version (v); m = 3", 3, 15),
}
"""Title, microbatches of a minibatch and of the run in a method's picture."""


def split(name: str) -> int | None:
    """Returns the microbatches of a minibatch in the gallery; None for methods that do not split it."""
    try:
        return SCHEDULES[name](uniform(name, STAGES), MICROBATCHES).microbatches
    except ScheduleError:
        return None


def simulated(schedule: Schedule, total: int) -> Timeline:
    """Returns the timeline of a schedule whose plan has seconds for a microbatch."""
    return simulate(lower(schedule), costs(schedule.plan), total)


def about(name: str) -> str:
    """Returns what the docstrings of a method say: the function's first sentence, the module's words."""
    factory = SCHEDULES[name]
    sentence = (inspect.getdoc(factory) or "").split("\n\n")[0].removeprefix("Returns ")
    return f"{prose(inspect.getdoc(inspect.getmodule(factory)))}\n\nHere: {sentence}"


def compensated() -> list[tuple[Schedule, str, str]]:
    """Returns the methods that stand on others, with what they are and when to choose them."""
    found = []
    for name, factory in COMPENSATED.items():
        text = (inspect.getdoc(factory) or "").removeprefix("Returns ")
        found.append((factory(uniform(name, STAGES), None), text, CHOOSE[name]))
    return found


def pages() -> dict[Path, str]:
    """Returns all files that this program writes: path -> text."""
    entries, files = [], {}
    for name, factory in SCHEDULES.items():
        plan = uniform(name, STAGES)
        ratio = factory(plan, split(name)).claims.ratio
        plan = plan if ratio is None else uniform(name, STAGES, 1.0, ratio)
        schedule = factory(plan, split(name))
        shown = simulated(schedule, MICROBATCHES)
        run = shown if schedule.flushes else simulated(schedule, LONG)
        title, m, total = PICTURES.get(name, (name, split(name), MICROBATCHES))
        drawn = simulated(factory(plan, m), total)
        files[DOCS / "img" / f"{name}.svg"] = timeline_svg(drawn, title=title, versions=True, width_px=1000)
        entries.append(Entry(schedule, shown, run, f"img/{name}.svg", about(name), CHOOSE.get(name, "")))
    files[DOCS / "gallery.md"] = gallery(entries, compensated())
    return files


def main() -> int:
    """Writes the files, or compares them. Returns the exit status."""
    stale = 0
    for path, text in pages().items():
        if "--check" not in sys.argv:
            write_text(path, text)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: run make docs", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())

"""A recipe whose layers and loader fail on request, with a plan, so that nothing is profiled."""

from pathlib import Path

import torch
from torch import nn
from training import plan_of

SOON_S = 15.0


RECIPE = '''
import atexit
import os
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import pipedream

RANK = os.environ["RANK"]
Path(f"pid{RANK}").write_text(str(os.getpid()))


def slow(moment):
    """Takes long, or fails, at a moment, if asked to."""
    if os.environ.get("FAILS") == f"{moment}{RANK}":
        raise ValueError("the ice is thin")
    if os.environ.get("SLOW") == moment:
        Path(f"{moment}{RANK}").touch()
        time.sleep(20)


slow("import")
atexit.register(slow, "end")


def wait_until_told():
    """Waits until the launcher and the other worker can know that this worker loads data."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "pipedream-heartbeat")
    heartbeat = thread._target.__self__
    enough = heartbeat.exchanges + 2  # the first may have been under way before
    doing = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name("doing.txt")
    while heartbeat.exchanges < enough or "loading data" not in doing.read_text():
        time.sleep(0.02)


def leave(*_):
    """Ends the process without a word."""
    os._exit(3)


class Forward(nn.Module):
    """Fails in its sixth forward."""

    def __init__(self, kind=ValueError, repeats=1):
        super().__init__()
        self.calls, self.kind, self.repeats = 0, kind, repeats

    def forward(self, x):
        self.calls += 1
        if self.calls == 6:
            raise self.kind("the ice is thin" * self.repeats)
        return x * 1


class Stuck(nn.Module):
    """Does not come back from its sixth forward in the first attempt."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 6:
            Path("going").touch()
            time.sleep(1000)
        return x * 1


def batches(count=40, slow=False):
    numbers = torch.Generator().manual_seed(0)
    for number in range(count):
        if slow and number == 20:
            Path("going").touch()
        time.sleep(0.01 if slow else 0)
        yield torch.randn(8, 4, generator=numbers), torch.randint(2, (8,), generator=numbers)


class Loader:
    def __init__(self, **what):
        self.what = what

    def __iter__(self):
        for number, (x, y) in enumerate(batches(**{k: v for k, v in self.what.items() if k in ("count", "slow")})):
            if number == 5 and self.what.get("stuck") and RANK == "0":
                if self.what["stuck"] == "told":
                    wait_until_told()
                Path("going").touch()
                time.sleep(1000)
            if number == 5 and self.what.get("raises"):
                kind = self.what["raises"]
                raise OSError("the disk is gone") if kind is True else kind
            yield x, y


class Samples(torch.utils.data.Dataset):
    """Fails at a sample, in a process of a DataLoader."""

    def __init__(self, error=None):
        self.error = error

    def __len__(self):
        return 320

    def __getitem__(self, i):
        if i == 50 and torch.utils.data.get_worker_info():
            raise self.error() if callable(self.error) else self.error
        return torch.randn(4), i % 2


def make_optimizer(named):
    slow("optimizer")
    return torch.optim.SGD(named, lr=0.1)


def recipe():
    slow("start")
    torch.manual_seed(0)
    return pipedream.Recipe(
        model=nn.Sequential(nn.Linear(4, 8), FIRST(), nn.Tanh(), SECOND(), nn.Linear(8, 2)),
        loss=F.cross_entropy,
        optimizer=make_optimizer,
        train=LOADER,
    )
'''


def written(
    folder: Path, *, first: str = "nn.Identity", second: str = "nn.Identity", loader: str = "", samples: str = ""
) -> list[str]:
    """Writes the recipe and a plan for it; returns the arguments that train it.

    With `samples`, the arguments of `Samples`, two processes load them; otherwise a `Loader` with its arguments.
    """
    train = f"torch.utils.data.DataLoader(Samples({samples}), 8, num_workers=2)" if samples else f"Loader({loader})"
    text = RECIPE.replace("FIRST", first).replace("SECOND", second).replace("LOADER", train)
    (folder / "small.py").write_text(text, encoding="utf-8")
    chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))  # as long as the recipe's
    plan_of(chain, torch.zeros(8, 4), (2,)).save(folder / "plan.json")
    return ["-m", "pipedream", "train", "small.py", "--plan", "plan.json", "--out", "run"]

"""The core works without extensions, and with any one of them alone: no extension needs another."""

import subprocess
import sys
from pathlib import Path

import pytest
from marks import slow, spread

import pipedream

PACKAGE = Path(pipedream.__file__).parent
EXTENSIONS = sorted(path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py"))

PROGRAM = """
import sys
import pipedream.extensions
pipedream.extensions.__path__ = sys.argv[1:]
import pipedream as pd
from pipedream.apps.testing.checks import small_trainings
profile = pd.Profile.of_chain((pd.LayerProfile(1.0, 2.0, 80, 60, 800),) * 4, batch=8)
for name in ("1f1b", "gpipe", "pipedream", "pipedream_2bw", "chimera"):
    assert pd.simulate(pd.plan(profile, pd.Cluster.flat(2), schedule=name)).makespan_s > 0
    next(iter(small_trainings(name))).check(1e-9)
print("trained", *sorted({name.split(".")[2] for name in sys.modules if name.startswith("pipedream.extensions.")}))
"""


@pytest.mark.parametrize("extension", spread((slow(name, id=name or "none") for name in ("", *EXTENSIONS)), every=5))
def test_the_core_trains_with_one_extension_or_none(tmp_path: Path, extension: str) -> None:
    folders = [tmp_path] if extension else []
    for folder in folders:
        (folder / extension).symlink_to(PACKAGE / "extensions" / extension)
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, folders)], capture_output=True, text=True)
    assert done.stdout.startswith("trained"), done.stderr
    assert {*done.stdout.split()[1:]} <= {extension}


MISSING = {
    "pd.plan(profile, pd.Cluster.flat(2), strategy='2bw')": "strategy '2bw' is not known, and no extension here",
    "pd.plan(profile, pd.Cluster.flat(2), mesh='model:2')": "no extension here plans meshes; leave it out",
    "pd.plan(profile, pd.Cluster.flat(2), messages='int8')": "but no extension here offers this choice; leave it out",
    "pd.schedules.load_schedule('mine.csv')": "no extension here reads such files",
    "cli.load('layout')": "the command 'layout' was given, and no extension here",
    "pd.schedules.build('roundpipe', pd.Plan.uniform(2))": "schedule 'roundpipe' is not known",
    "next(iter(small_trainings('spectrain'))).check(0.0)": "predicts weights, for which no extension here has a part",
}


@pytest.mark.slow
def test_a_missing_extension_is_named() -> None:
    program = """
import sys
import pipedream.extensions
pipedream.extensions.__path__ = []
import pipedream as pd
from pipedream.apps import cli
from pipedream.apps.testing.checks import small_trainings
profile = pd.Profile.of_chain((pd.LayerProfile(1.0, 2.0, 80, 60, 800),) * 4, batch=8)
for call in sys.argv[1:]:
    try:
        eval(call)
    except pd.PipelineError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, *MISSING], capture_output=True, text=True)
    for refusal, words in zip(done.stdout.splitlines(), MISSING.values(), strict=True):
        assert words in refusal, done.stderr

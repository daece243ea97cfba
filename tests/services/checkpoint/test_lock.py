"""One run at a time writes into a folder; nothing is left of the lock of a run that was killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import make_pipeline

import pipedream as pd
from pipedream.services.checkpoint.stores.local_folder import FolderLock

HOLD = """
import os, sys, time
from pathlib import Path
from pipedream.services.checkpoint.stores.local_folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
if os.fork() == 0:
    print("held", flush=True)
time.sleep(60)
"""


def test_the_second_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "for it"
    first = FolderLock(folder)
    with pytest.raises(
        pd.PipelineError, match=rf"another run writes into .* \(process {os.getpid()} on .*another folder"
    ):
        FolderLock(folder)
    first.release()
    first.release()
    assert not folder.exists(), "it was empty"
    folder.mkdir()
    FolderLock(folder)  # dropped at once: nobody holds it
    FolderLock(folder).release()
    assert os.listdir(folder) == []


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    """Even if a process that it forked, as a loader's, lives on."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(pd.PipelineError, match=rf"another run .*process {process.pid} on"):
            FolderLock(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        FolderLock(tmp_path).release()
        os.killpg(process.pid, signal.SIGKILL)
    assert os.listdir(tmp_path) == []


def test_a_second_run_is_refused_before_it_writes(refused: Callable[..., str], tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    recipe = Path(__file__).parents[3] / "examples" / "digits.py"
    error = refused("train", recipe, "--workers", "1", "--checkpoint-every", "0", "--out", tmp_path)
    assert "another run writes into the folder" in error
    assert os.listdir(tmp_path) == [".lock"]
    lock.release()


def test_two_pipelines_do_not_save_into_one_folder(tmp_path: Path) -> None:
    with make_pipeline("mlp") as first, make_pipeline("mlp") as other:
        first.save(tmp_path)
        with pytest.raises(pd.PipelineError, match="another run writes into the folder"):
            other.save(tmp_path)
        other.save(tmp_path / "other")
    with make_pipeline("mlp") as later:
        later.load(tmp_path)
        later.save(tmp_path)

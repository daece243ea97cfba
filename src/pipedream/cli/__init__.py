"""The `pipedream` command. It reads flags and prints; everything else is done elsewhere.

Answers are for people; ``--json`` gives one object on standard output and nothing else there. Errors are one
message on standard error: exit status 2 for a wrong call or bad input, 1 for a run that failed, 130 after
Ctrl-C.
"""

from __future__ import annotations

import atexit
import os
import sys

import typer

from pipedream.cli.emulate import emulate
from pipedream.cli.options import SeveralValues
from pipedream.cli.plan import plan
from pipedream.cli.probe import probe
from pipedream.cli.study import list_schedules, show, simulate
from pipedream.cli.work import compare, profile, report, train
from pipedream.core.errors import BAD_CALL, PeerError, PipelineError, WorkerError

__all__ = ["app", "main", "script"]

app = typer.Typer(
    name="pipedream",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pipeline-parallel training of PyTorch models: profile, plan, simulate, run.\n\n"
    "Try: pipedream show 1f1b --stages 4 --microbatches 8",
)
for command in (train, profile, simulate, show, emulate, probe, compare, report):
    app.command()(command)
app.command(cls=SeveralValues)(plan)
app.command("schedules")(list_schedules)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status, and exits with it when called as a script."""
    try:
        status = app(arguments, standalone_mode=False)
        return int(status or 0)
    except typer.Exit as leave:
        return int(leave.exit_code)
    except KeyboardInterrupt:
        return 130
    except PipelineError as error:
        return _failed(error)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own: a wrong call
            error.show()  # type: ignore[attr-defined]
            return BAD_CALL
        raise


def _failed(error: PipelineError) -> int:
    """Says what went wrong, once for all workers, and returns the exit status."""
    status = 1 if isinstance(error, WorkerError) else BAD_CALL
    if isinstance(error, PeerError):
        return status  # the worker that failed says it
    text = f"pipedream: {error}"
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from pipedream.runtime.failure.notes import is_launched_here, write_error

        if write_error(text) and is_launched_here():
            return status  # our own launcher prints it
        if os.environ.get("RANK", "0") != "0" and not isinstance(error, WorkerError):
            return status  # all ranks found the same; rank 0 says it
    print(text, file=sys.stderr, flush=True)
    return status


def script() -> None:
    """Runs the command and exits with its status: the entry point of ``pipedream``."""
    status = main()
    if status == BAD_CALL and "TORCHELASTIC_ERROR_FILE" in os.environ:
        # The process groups that this worker has joined are not ended then, and their threads may abort an interpreter
        # that is taken down: the signal would stand for the status. (Others' failures leave it time to be heard of.)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)

"""The `pipedream` command: reads options and prints; the work is done elsewhere.

``--json`` prints one object on standard output and nothing else there; an error is one message on standard error. Exit
status: 2 for a wrong call or bad input, 1 for a run that failed, 130 after Ctrl-C, 143 after SIGTERM.

A command's module is imported only when it is used.
"""

import errno
import os
import signal
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from pipedream._version import __version__
from pipedream.apps.cli.flags import OptionParser, as_command
from pipedream.apps.cli.retired import refuse_retired
from pipedream.apps.cli.workers import is_worker
from pipedream.core.errors import BAD_CALL, PeerError, PipelineError, PlanError, WorkerError
from pipedream.core.extensions import list_offers
from pipedream.core.user_code import with_advice
from pipedream.runtime.activity import Terminated
from pipedream.services.failure.processes import end_process, stay_with_launcher

__all__ = ["COMMANDS", "app", "load", "main", "script"]

COMMANDS = {
    "train": "Train a recipe: profile, plan, run, report.",
    "profile": "Measure or predict the seconds and bytes of each layer.",
    "layers": "List the layers of a model, and what crosses between them.",
    "plan": "Partition a profiled model into stages, or check a plan.",
    "layout": "Choose how a step's tensors are sharded over ranks.",
    "sweep": "Compare methods over workers and bandwidths.",
    "simulate": "Predict a run: throughput, bubble, memory, staleness.",
    "show": "List the methods, or draw one's schedule and its proof.",
    "compare": "Train a recipe in several ways, one after the other.",
    "emulate": "Run a plan with sleeps instead of computation.",
    "probe": "Measure the cluster that the workers run on.",
    "checkpoint": "Verify a run's checkpoints, or gather their parts.",
}
"""Each command, with the first line of its help."""


class _Commands(TyperGroup):
    """Imports a command when it is used; until then it has only the first line of its help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: TyperCommand(name, help=text) for name, text in COMMANDS.items()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        refuse_retired(args[0])
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load(command.name or ""), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Terminated as leave:  # typer would take it for Ctrl-C
            raise typer.Exit(leave.STATUS) from leave


@cache  # workers, forked later, have it
def load(name: str) -> Any:
    """Imports a command."""
    command_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    offers, home = list_offers(f"command_{name}"), f"pipedream.apps.cli.{name}"
    if not offers and find_spec(home) is None:
        raise PlanError(f"the command {name!r} was given, and no extension here has it; 'pipedream' lists the others")
    module = offers[0] if offers else import_module(home)
    command_app.command(name, cls=OptionParser)(as_command(getattr(module, name)))
    return get_command(command_app)


app = typer.Typer(
    cls=_Commands,
    name="pipedream",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"pipedream {__version__}")
        raise typer.Exit


@app.callback()
def declare_version(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pipeline-parallel training of PyTorch models: profile, plan, simulate, run.

    For example: pipedream show 1f1b --stages 4 --microbatches 8

    'pipedream COMMAND --help' describes a command; 'pipedream --install-completion' lets the shell complete commands
    and options.
    """


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status; None takes the process's arguments."""
    try:
        status = app(arguments, prog_name="pipedream", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except typer.Exit as leave:
        return int(leave.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (PipelineError, MemoryError) as error:
        return _report_error(error)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            error = OSError(f"cannot write to {_name_output()}: {error.strerror}")
        try:
            sys.stdout.flush()
        except OSError:  # a full disk, or the reader of a pipe has gone: what is left cannot be written either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else _report_error(error)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own: a wrong call
            error.show()  # type: ignore[attr-defined]
            return BAD_CALL
        raise


def _name_output() -> str:
    """Returns where standard output goes to."""
    try:
        return os.readlink(f"/proc/self/fd/{sys.stdout.fileno()}")
    except OSError:
        return "standard output"


def _report_error(error: PipelineError | OSError | MemoryError) -> int:
    """Prints an error, once for all workers of a machine."""
    status = error.status if isinstance(error, PipelineError) else 1
    if isinstance(error, PeerError):
        return status  # the worker that failed prints it
    text = with_advice(f"pipedream: {error if str(error) else type(error).__name__}")
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from pipedream.services.failure.processes import is_launched_here, write_error

        if write_error(text) and is_launched_here():
            return status  # our own launcher prints it
        reports = isinstance(error, WorkerError) or getattr(error, "is_first", False)
        if os.environ.get("LOCAL_RANK", "0") != "0" and not reports:
            return status  # the ranks of a machine found the same; another machine may lack a file
    print(text, file=sys.stderr, flush=True)
    return status


def script() -> None:
    """Runs the command and ends the process."""
    if is_worker():
        # Ctrl-C ends it at once, even while it waits for other workers, until its pipeline can drain.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stay_with_launcher()
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is over, and an interpreter that ends prints a traceback
    if "torch" not in sys.modules:
        sys.exit(status)
    end_process(status)

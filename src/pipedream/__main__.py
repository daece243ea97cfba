"""``python -m pipedream``: the command, also under torchrun (``torchrun ... -m pipedream train RECIPE``)."""

import signal


def run_command() -> None:
    """The entry point ``pipedream``."""
    # Ctrl-C while modules are imported needs no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipedream.apps.cli import script

    script()


if __name__ == "__main__":
    run_command()

"""``python -m pipedream``: the command, also under torchrun (``torchrun ... -m pipedream train RECIPE``)."""

from pipedream.cli import script

__all__ = ["script"]

if __name__ == "__main__":
    script()

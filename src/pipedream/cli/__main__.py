"""``python -m pipedream.cli``: how the workers of a local run are started."""

from pipedream.cli import script

__all__ = ["script"]

if __name__ == "__main__":
    script()

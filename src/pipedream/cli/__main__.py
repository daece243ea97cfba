"""The same as ``python -m pipedream``."""

from pipedream.cli import script

__all__ = ["script"]

if __name__ == "__main__":
    script()

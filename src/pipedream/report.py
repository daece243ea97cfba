"""Text for the terminal, SVG pictures, trace files and the page of a run, under a short name."""

from pipedream.apps.report import *  # noqa: F403

"""The tests that the library's own methods pass, for yours, under a short name: docs/testing.md."""

from pipedream.apps.testing import *  # noqa: F403

"""The tests that the library's own methods pass, for yours: docs/testing.md."""

from pipedream.apps.testing.checks import check_compensation, check_encoding, check_schedule, check_sums, tiny
from pipedream.apps.testing.passes import Passes
from pipedream.apps.testing.results import Trained, assert_equal, assert_near
from pipedream.apps.testing.rules import CompensationRule, MethodRules, Reads, Reducer
from pipedream.apps.testing.serial import Loop
from pipedream.apps.testing.training import Training, mean_loss

__all__ = [
    "CompensationRule",
    "Loop",
    "MethodRules",
    "Passes",
    "Reads",
    "Reducer",
    "Trained",
    "Training",
    "assert_equal",
    "assert_near",
    "check_compensation",
    "check_encoding",
    "check_schedule",
    "check_sums",
    "mean_loss",
    "tiny",
]

"""The tests that the library's own methods pass, for yours: docs/testing.md."""

from pipedream.testing.checks import check_compensation, check_encoding, check_schedule, check_sums
from pipedream.testing.models import tiny
from pipedream.testing.passes import Passes
from pipedream.testing.reducers import Reducer
from pipedream.testing.results import Trained, assert_equal, assert_near
from pipedream.testing.rules import CompensationRule, MethodRules, Reads
from pipedream.testing.serial import Loop
from pipedream.testing.training import Training, mean_loss

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

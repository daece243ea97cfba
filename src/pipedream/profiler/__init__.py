"""Measures the seconds and bytes of each layer of a model, or predicts them, as a Profile."""

from pipedream.profiler.device import (
    choose_device_type as choose_device_type,
    device_of as device_of,
    dtype_of as dtype_of,
    measure_device as measure_device,
    release_cache as release_cache,
)
from pipedream.profiler.estimate import estimate as estimate
from pipedream.profiler.measure import measure as measure
from pipedream.profiler.stopwatch import Stopwatch as Stopwatch
from pipedream.profiler.update import all_parameters as all_parameters

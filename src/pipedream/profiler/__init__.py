"""Measures the seconds and bytes of each layer of a model, as a Profile."""

from pipedream.profiler.device import (
    choose_device_type as choose_device_type,
    count_threads as count_threads,
    dtype_of as dtype_of,
    release_cache as release_cache,
)
from pipedream.profiler.measure import measure as measure
from pipedream.profiler.stopwatch import Stopwatch as Stopwatch
from pipedream.profiler.update import all_parameters as all_parameters

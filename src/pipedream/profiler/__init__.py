"""Measures the seconds and bytes of each layer of a model, or predicts them, as a Profile."""

from pipedream.profiler.device import choose_device_type as choose_device_type
from pipedream.profiler.device import device_of as device_of
from pipedream.profiler.device import dtype_of as dtype_of
from pipedream.profiler.device import measure_device as measure_device
from pipedream.profiler.device import release_cache as release_cache
from pipedream.profiler.estimate import estimate as estimate
from pipedream.profiler.measure import measure as measure
from pipedream.profiler.ranks import OneRank as OneRank
from pipedream.profiler.ranks import one_rank as one_rank
from pipedream.profiler.stopwatch import Stopwatch as Stopwatch
from pipedream.profiler.update import all_parameters as all_parameters

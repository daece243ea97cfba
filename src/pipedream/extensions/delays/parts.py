"""What this extension adds to a stage."""

from pipedream.extensions.delays.predictions import WeightPredictions
from pipedream.extensions.delays.saved_tensors import SavedTensorHooks

PARTS = (SavedTensorHooks, WeightPredictions)

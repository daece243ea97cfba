"""What this extension adds to a stage."""

from pipedream.extensions.deltas.sample_deltas import SampleDeltas

PARTS = (SampleDeltas,)

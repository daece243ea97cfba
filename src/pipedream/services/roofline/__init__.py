"""Predicts what layers take on a device, by the roofline model, and measures what this model needs of a device."""

from pipedream.services.roofline.device import device_of as device_of, measure_device as measure_device
from pipedream.services.roofline.estimate import estimate as estimate

"""Mixture-of-experts layers, under their short name."""

from pipedream.extensions.meshes.experts import *  # noqa: F403

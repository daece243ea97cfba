"""Weights in the memory of the machine, of which passes on any rank take copies (RoundPipe)."""

import pipedream.schedules  # noqa: F401  # first: the registry must not find a method here that is only half imported

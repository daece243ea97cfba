"""PipeDream-2BW's planner (Narayanan et al., ICML 2021), with its own cost model."""

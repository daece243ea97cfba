"""The order of workers, and the runs of workers that a stage may take."""

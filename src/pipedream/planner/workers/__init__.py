"""The order of the workers, and the runs of workers that a stage may take."""

"""What accompanies training: each has one door, and the pipeline or a workflow wires it."""

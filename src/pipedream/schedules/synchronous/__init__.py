"""Published methods that flush the pipeline before each update."""

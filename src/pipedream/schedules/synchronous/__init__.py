"""Published methods that flush the pipeline before each update. One file each."""

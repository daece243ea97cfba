"""Starting worker processes, watching them, and reporting why one failed."""

"""Tables of seconds and bytes that the searches read."""

"""Programs around the library: nothing of the library imports them."""

"""One model with several methods, over worker counts and bandwidths."""

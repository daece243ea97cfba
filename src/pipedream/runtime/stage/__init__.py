"""One stage on one worker: layers, versions of its weights, forwards and backwards."""

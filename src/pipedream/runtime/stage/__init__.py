"""One stage on one worker: its layers, the versions of its weights, its forwards and backwards."""

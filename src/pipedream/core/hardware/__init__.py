"""The hardware for training: devices, workers and the network between them."""

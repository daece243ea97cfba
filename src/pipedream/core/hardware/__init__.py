"""What it is trained on: devices, workers and the network between them."""

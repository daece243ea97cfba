"""A factor on the loss that keeps small low-precision gradients from vanishing."""

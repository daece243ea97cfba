"""What all packages that compute say of tensors and optimizers of torch."""

"""The comparison of the first minibatch with the model itself."""

"""One model trained in one placement, from the first minibatch to the last."""

"""What a loss is a mean over, found on a sample."""

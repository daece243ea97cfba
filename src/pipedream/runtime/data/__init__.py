"""From the user's loader to the microbatches of the first stage."""

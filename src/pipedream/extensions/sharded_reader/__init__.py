"""Each replica of the input stage loads only its own minibatches of a map-style DataLoader."""

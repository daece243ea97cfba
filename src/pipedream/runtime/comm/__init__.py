"""Messages between ranks, and the process groups they use."""

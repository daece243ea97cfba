"""Messages between ranks of one machine through memory that they share."""

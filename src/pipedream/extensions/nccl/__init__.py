"""Messages between ranks that have a GPU each, by NCCL."""

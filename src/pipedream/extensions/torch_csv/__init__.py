"""Schedules in the notation of torch.distributed.pipelining."""

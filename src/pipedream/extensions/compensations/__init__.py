"""Compensations of delay, one file or folder for each kind; `pipedream.core.schedule.delay_compensation` finds them."""

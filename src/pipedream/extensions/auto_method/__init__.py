"""The schedule 'auto': the fastest method in simulation; `pipedream.workflows.plan` finds it."""

"""The verbs that need no worker processes: plan, simulate, check, sweep."""

"""Further choices of plans, one file each (`core.plan.choice`)."""

"""Ways in which replicas agree, one file or folder for each; `pipedream.core.plan.sum_method` finds them."""

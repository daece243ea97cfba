"""How a model is partitioned among workers, and what that costs in seconds and bytes."""

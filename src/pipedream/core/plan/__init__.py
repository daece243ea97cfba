"""How a model is divided among workers, and what that costs in seconds and bytes."""

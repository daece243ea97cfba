"""The version of the distribution torch-pipedream; pyproject.toml reads it from here."""

__version__ = "0.1.0"

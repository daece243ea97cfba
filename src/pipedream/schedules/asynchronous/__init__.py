"""Published methods without a flush."""

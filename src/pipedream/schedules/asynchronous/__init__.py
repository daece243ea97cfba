"""Published methods without a flush. One file each."""

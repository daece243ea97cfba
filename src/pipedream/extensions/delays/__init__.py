"""What methods without a flush do about delays: predicted weights, and backwards that read newer weights."""

"""What happens in an update: gradients are summed over replicas, corrected and applied."""

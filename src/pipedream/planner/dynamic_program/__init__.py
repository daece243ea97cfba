"""The dynamic program over stages and replicas."""

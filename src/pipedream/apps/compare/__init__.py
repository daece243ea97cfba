"""Trains a recipe with several methods, and beside what torch offers."""

"""Formats of weights: what a format's numbers and scales are, under the names that other projects have for it."""

"""Searching: which configs to measure next, until the fastest is found."""

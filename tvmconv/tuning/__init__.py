"""Tuning: the search for a workload's fastest config, its measurements and their logs."""

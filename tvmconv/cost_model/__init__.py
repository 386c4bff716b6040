"""What was learnt from measured logs: a model of how fast configs are, and configs that are fast on many workloads."""

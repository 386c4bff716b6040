"""Experiments: schedules and libraries side by side, on the same inputs."""

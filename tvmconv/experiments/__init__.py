"""Experiments, which compare schedules and libraries on the same inputs."""

"""Why one schedule beats another: what can be read off a kernel without running it."""

"""The schedule library: one file a schedule, by operator."""

"""Building, verification and timing of configs in separate processes, which may crash."""

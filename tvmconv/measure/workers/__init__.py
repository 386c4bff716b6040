"""Worker processes: start, supervision and reuse."""

"""Tuning logs: records, files of records, indexes, and the choice of the best record."""

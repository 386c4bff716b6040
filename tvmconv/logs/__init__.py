"""Logs: everything that reads or writes one."""

"""Synchronization of emulated threads: barriers, mbarriers, groups of asynchronous operations, and fibers."""

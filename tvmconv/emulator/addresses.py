"""Layout of the shared-memory addresses of emulated code."""

from __future__ import annotations

SHARED_BASE_ADDRESS = 1024  # first address of shared memory, so that address 0 is invalid
CLUSTER_WINDOW_BYTES = 1 << 24  # size of each block's window in the shared addresses of a cluster
CHUNK_BYTES = 16  # granularity of the accesses of the async proxy

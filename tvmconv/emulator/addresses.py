"""The addresses of shared memory, as emulated code and who watches it have them."""

from __future__ import annotations

SHARED_BASE_ADDRESS = 1024  # where shared memory begins, so that the address 0 is nowhere
CLUSTER_WINDOW_BYTES = 1 << 24  # bytes of the shared addresses of each block of a cluster, as seen from all of them
CHUNK_BYTES = 16  # bytes: what the async proxy reads and writes is a multiple of it

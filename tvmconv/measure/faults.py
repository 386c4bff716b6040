"""Environment faults: failures that are not caused by the measured config.

A full disk, a missing compiler or a lost device makes every kernel fail, including correct ones. The messages of some
failures name such a fault. In other cases a control kernel decides (`tvmconv.measure.pipeline`).
"""

from __future__ import annotations

import errno
import os
import signal

from tvmconv.measure.results import ErrorKind

DOUBTFUL_KINDS = frozenset({ErrorKind.COMPILE_HOST, ErrorKind.COMPILE_DEVICE, ErrorKind.RUNTIME})

# No config can cause these errors. ENOMEM is excluded, because a config may allocate too much memory.
_ERRNOS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.EIO),
    errno.ENODEV,
)

# CUDA's driver API, cuda.h, enum CUresult: the device or its driver is gone, or its memory is damaged.
_LOST_DEVICE = (
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_SYSTEM_NOT_READY",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "CUDA_ERROR_STUB_LIBRARY",
    "CUDA_ERROR_NOT_INITIALIZED",
    "CUDA_ERROR_OPERATING_SYSTEM",
)

_FAULT_SIGNATURES = (*(os.strerror(number) for number in _ERRNOS), *_LOST_DEVICE)

# These signals come from the out-of-memory killer, a resource limit or a user, not from the process itself.
_SENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGXFSZ, signal.SIGXCPU)


def is_environment_fault(message: str) -> bool:
    """Return whether a message names a fault of the host or the device that no config can cause."""
    return any(signature in message for signature in _FAULT_SIGNATURES)


def is_retryable(message: str) -> bool:
    """Return whether the config may succeed after the fault, or the signal from outside, that the message names."""
    return is_environment_fault(message) or any(f"killed by {number.name}" in message for number in _SENT_SIGNALS)


def is_doubtful(error: ErrorKind, message: str) -> bool:
    """Return whether the environment, rather than the config, may have caused a failure."""
    return error in DOUBTFUL_KINDS or (error is ErrorKind.INSTANTIATION and is_environment_fault(message))

"""Faults of the environment: failures that say nothing about the config at which they were seen.

A full disk, a missing compiler or a lost device makes every program fail, and one that is known to be right as well.
The texts of some failures name such a fault; of the others a control decides (`tvmconv.measure.pipeline`).
"""

from __future__ import annotations

import errno
import os
import signal

from tvmconv.measure.results import ErrorKind

DOUBTFUL_RUN_KINDS = frozenset({ErrorKind.RUNTIME, ErrorKind.COMPILE_DEVICE})
DOUBTFUL_BUILD_KINDS = frozenset({ErrorKind.COMPILE_HOST})

# No config can bring about one of these errors. ENOMEM is not among them: a config may allocate too much.
_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
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

# A program does not send itself these signals: the kernel short of memory, a resource limit or a user does.
_SENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGXFSZ, signal.SIGXCPU)


def is_environment_fault(message: str) -> bool:
    """Return whether a failure's message names a fault of the host or of the device: no config brings that about."""
    return any(signature in message for signature in _FAULT_SIGNATURES)


def is_external_signal(message: str) -> bool:
    """Return whether a process ended by a signal that another process or the kernel sent it."""
    return any(f"killed by {number.name}" in message for number in _SENT_SIGNALS)


def is_retryable(message: str) -> bool:
    """Return whether the same config may well succeed once the fault that the message names has passed."""
    return is_environment_fault(message) or is_external_signal(message)


def is_doubtful_run(error: ErrorKind) -> bool:
    """Return whether a failure on a device may be the environment's rather than the program's."""
    return error in DOUBTFUL_RUN_KINDS


def is_doubtful_build(error: ErrorKind, message: str) -> bool:
    """Return whether a failure of a build may be the environment's rather than the config's."""
    return error in DOUBTFUL_BUILD_KINDS or (error is ErrorKind.INSTANTIATION and is_environment_fault(message))


def is_doubtful(error: ErrorKind, message: str) -> bool:
    """Return whether a recorded failure may be the environment's; see the two functions above."""
    return is_doubtful_run(error) or is_doubtful_build(error, message)

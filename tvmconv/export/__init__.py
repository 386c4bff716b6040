"""Kernels as files: what another program needs to call one, without tvmconv."""

from tvmconv.export.folder import Exported, export

__all__ = ["Exported", "export"]

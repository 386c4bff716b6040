"""Kernels as files: what another program needs to call one, without tvmconv."""

from tvmconv.export.export_folder import ExportResult, export

__all__ = ["ExportResult", "export"]

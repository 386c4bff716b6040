"""Export of kernels to files with which other programs can call them without tvmconv."""

from tvmconv.export.export_folder import ExportResult, export

__all__ = ["ExportResult", "export"]

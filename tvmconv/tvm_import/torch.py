"""Stub that TVM finds instead of PyTorch during `tvmconv.tvm_import.import_tvm`."""

raise ImportError("TVM is imported without PyTorch")

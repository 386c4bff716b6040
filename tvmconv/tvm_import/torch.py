"""What TVM finds in place of PyTorch while `tvmconv.tvm_import.import_tvm` imports it."""

raise ImportError("TVM is imported without PyTorch")

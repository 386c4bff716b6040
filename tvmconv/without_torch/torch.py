"""What TVM finds in place of PyTorch while `tvmconv.without_torch.import_tvm` imports it."""

raise ImportError("TVM is imported without PyTorch")

"""Models as suites: the convolutions of an ONNX file or a PyTorch module, with the operations after them."""

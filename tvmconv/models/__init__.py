"""Models as suites: the convolutions of an ONNX file, or of a PyTorch module, with what follows them as epilogues."""

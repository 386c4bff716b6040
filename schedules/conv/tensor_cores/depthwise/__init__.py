"""Depthwise gradients on tensor cores: a band matrix for each channel."""

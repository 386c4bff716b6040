"""Semantics of GPU instructions in the emulator, with one module per kind of instruction."""

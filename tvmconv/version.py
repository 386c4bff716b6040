"""The version of this package, where every room can read it."""

VERSION = "0.1.0"

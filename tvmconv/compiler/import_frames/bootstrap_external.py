"""Stands for the frames of `importlib._bootstrap_external`; see the package."""


def set_file() -> None:
    """Let this module have the name of the file of these frames."""
    global __file__
    __file__ = "<frozen importlib._bootstrap_external>"

"""Modules that stand for the frames of the import system when `inspect` looks for the module of a frame.

`inspect.stack` looks for the module of each frame by the name of its file. Frames of the import system have the names
`<frozen importlib._bootstrap>` and `<frozen importlib._bootstrap_external>`, which no module has, so that `inspect`
looks through all imported modules twice for each of them. With TVM and PyTorch these are 2,000 modules, and a dozen
frames for each function that an import of TVM parses. The two modules of this package have these names, once they are
told to. `inspect` then ends its search at once, and `inspect.stack` returns what it would return otherwise, because
neither name is a file whose source can be read.
"""

from tvmconv.compiler.import_frames import bootstrap, bootstrap_external


def stand_for_frames() -> None:
    """Let the two modules have the names of the import system's files, in this process."""
    bootstrap.set_file()
    bootstrap_external.set_file()

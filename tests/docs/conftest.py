import subprocess
import sys

import pytest
from doc_blocks import SERVED


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The socket of a server of Python processes in which TVM is loaded."""
    path = str(tmp_path_factory.mktemp("python") / "server")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([sys.executable, SERVED, "serve", path], **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        yield path


@pytest.fixture
def python(server):
    """The words that run one of these processes, for the arguments that follow."""
    return [sys.executable, "-S", SERVED, "call", server]

"""Python runs this in each process that tests start: what it compiles by PoCL is compiled as in this one."""

import importlib.util
import os

_path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "lean_opencl.py")
_spec = importlib.util.spec_from_file_location("lean_opencl", _path)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.install_once_imported()

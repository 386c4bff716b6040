"""A module whose import imports TVM's tensor intrinsics fast, for processes that import modules by name."""

from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics

import_tensor_intrinsics()

"""Small models as Relax modules, beside PyTorch's results; modules that need PyTorch are imported where it is there."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]  # PyTorch is missing

"""The measured logs that come with the package."""

from __future__ import annotations

from pathlib import Path

_FOLDERS = Path(__file__).parents[1] / "shipped", Path(__file__).parents[2] / "tuning_logs"  # installed; a checkout


def packaged_logs() -> list[Path]:
    """The best records of networks, in alphabetical order; none where the package came without them."""
    return _find_files("*.jsonl")


def packaged_samples() -> list[Path]:
    """Logs to learn from, good configs and bad ones, compressed by gzip; none where the package came without them."""
    return _find_files("*.jsonl.gz")


def _find_files(pattern: str) -> list[Path]:
    return next((sorted(folder.rglob(pattern)) for folder in _FOLDERS if folder.is_dir()), [])

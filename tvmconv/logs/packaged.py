"""The logs that come with the package."""

from __future__ import annotations

from pathlib import Path

_FOLDERS = Path(__file__).parents[1] / "shipped", Path(__file__).parents[2] / "tuning_logs"  # installed; a checkout


def packaged_logs() -> list[Path]:
    """Return the logs with the best records of networks, in alphabetical order; none if the package lacks them."""
    return _find_files("*.jsonl")


def packaged_samples() -> list[Path]:
    """Return the compressed logs of fast and slow configs for training; none if the package lacks them."""
    return _find_files("*.jsonl.[gx]z")


def _find_files(pattern: str) -> list[Path]:
    return next((sorted(folder.rglob(pattern)) for folder in _FOLDERS if folder.is_dir()), [])

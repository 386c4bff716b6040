"""The measured logs that come with the package."""

from __future__ import annotations

from pathlib import Path

_PLACES = Path(__file__).parents[1] / "shipped", Path(__file__).parents[2] / "tuning_logs"  # installed; a checkout


def shipped_logs() -> list[Path]:
    """The best records of networks, in alphabetical order; none where the package came without them."""
    return _found("*.jsonl")


def shipped_samples() -> list[Path]:
    """Logs to learn from, good configs and bad ones, compressed by gzip; none where the package came without them."""
    return _found("*.jsonl.gz")


def _found(pattern: str) -> list[Path]:
    return next((sorted(place.rglob(pattern)) for place in _PLACES if place.is_dir()), [])

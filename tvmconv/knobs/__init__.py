"""Knobs: the choices inside a schedule, the space that they span, and the factors that loops are cut into."""

from tvmconv.knobs.knobs import (
    JSON_VALUE,
    Choice,
    Columns,
    Condition,
    Config,
    Knob,
    Knobs,
    Split,
    Value,
    format_value,
    nearest_factors,
    parse_value,
)
from tvmconv.knobs.tile import Tile

__all__ = [
    "JSON_VALUE",
    "Choice",
    "Columns",
    "Condition",
    "Config",
    "Knob",
    "Knobs",
    "Split",
    "Tile",
    "Value",
    "format_value",
    "nearest_factors",
    "parse_value",
]

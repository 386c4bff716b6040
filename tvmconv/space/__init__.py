"""Knobs: the choices inside a schedule, the space that they span, and the factors that loops are cut into."""

from tvmconv.space.knobs import (
    JSON_VALUE_TYPES,
    ChoiceKnob,
    Columns,
    Config,
    Constraint,
    Knob,
    Knobs,
    SplitKnob,
    Value,
    find_nearest_factors,
    format_value,
    parse_value,
)
from tvmconv.space.tile import Tile

__all__ = [
    "JSON_VALUE_TYPES",
    "ChoiceKnob",
    "Columns",
    "Config",
    "Constraint",
    "Knob",
    "Knobs",
    "SplitKnob",
    "Tile",
    "Value",
    "find_nearest_factors",
    "format_value",
    "parse_value",
]

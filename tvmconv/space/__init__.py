"""Knobs of a schedule, the search space that they span, and the factors into which loops are split."""

from tvmconv.space.knobs import (
    JSON_VALUE_TYPES,
    ChoiceKnob,
    Columns,
    Config,
    Constraint,
    Knob,
    Knobs,
    SplitKnob,
    Tile,
    Value,
    find_nearest_factors,
    format_value,
    parse_value,
    suggest_knob,
    suggest_name,
)

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
    "suggest_knob",
    "suggest_name",
]

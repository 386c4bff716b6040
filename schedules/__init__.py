"""Built-in schedules: one file per schedule, one folder per operator."""

from .knob_descriptions import describe_knob as describe_knob

"""Schedules whose own code raises; their exceptions are in the line below each function's `def`."""

from tvmconv.builtin.conv.default import default


def bad(s, w, k):
    raise ValueError("my own mistake")


def working(s, w, k):
    """Compute as `default` does, whatever the knobs."""
    k.choice("number", tuple(range(8)), 0)
    default(s, w, k)


def raising_usage(w, columns):
    raise KeyError("tile")


def raising_predicate(w):
    return w.nothing


def second_fails(s, w, k):
    assert k.choice("number", (0, 1), 0) == 0
    default(s, w, k)


def line_of(function):
    """Where a function raises, as messages have it."""
    return f"raising.py:{function.__code__.co_firstlineno + 1}"

"""Former names of persisted data, and the functions that translate them where old files and options are read.

Everything inside of the package sees the current names, and only these are written. Values, keys and flags that are not
in a table here have had one name only.
"""

from __future__ import annotations

import functools
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from tvmconv.errors import KnobError

Value = Any  # of a knob, as `tvmconv.space` has it; this module is below all that import it
Config = dict[str, Value]

# Knobs that schedules got after their cost model was trained. Configs without them generate the kernels that were
# measured: by the knob's default, or by the value that it states for configs that lack it.
ADDED_KNOBS: dict[str, frozenset[str]] = {
    "hopper": frozenset(
        {
            *("kernel_schedule", "raster_order", "decomposition", "input_loader", "producer_warpgroups"),
            *("output_eviction", "output_stages", "filters", "output_boxes"),
        }
    ),
    "mma_sync": frozenset({"input_loader"}),
}

# Knobs by schedule: {old: new}. The same old word stands for different things in different schedules.
KNOBS: dict[str, dict[str, str]] = {
    "hopper": {
        "sharers_m": "cluster_m",
        "sharers_n": "cluster_n",
        "rows": "wgmma_m_tiles",
        "row_bytes": "block_k_bytes",
        "taps": "taps_per_copy",
    },
    "winograd_hopper": {
        "tile_m": "output_tile",
        "sharers_m": "cluster_m",
        "sharers_n": "cluster_n",
        "rows": "wgmma_m_tiles",
        "row_bytes": "block_k_bytes",
    },
    "mma_sync": {"meet": "split_k_reduction", "residual": "residual_add"},
    "tensor_core": {"fragments": "fragment_prefetch"},
    "stem": {"rows": "block_p", "blocks": "max_ctas", "hold": "weights_in_registers"},
    "direct": {"slices": "sliced_k", "fetch": "copy_order"},
    "implicit_gemm": {"slices": "sliced_k", "fetch": "copy_order"},
    "winograd": {"tile_m": "output_tile", "slices": "sliced_k", "fetch": "copy_order"},
    "winograd_fused": {
        "tile_m": "output_tile",
        "places": "points_per_thread",
        "exchanged": "channels_per_exchange",
        "taps": "block_k",
    },
    "depthwise": {"stage": "operand_scope"},
    "depthwise_nhwc": {"weight": "weight_scope", "unrolled": "unroll_scope"},
    "grouped_nhwc": {"weight": "weight_scope", "unrolled": "unroll_scope", "depth": "block_k"},
    "register": {"once": "load_rows_once", "vectors": "vectors_per_thread", "rows": "rows_per_thread"},
}

_COPY_ORDERS: dict[str, Value] = {"interleaved": "coalesced", "blocked": "contiguous", "vectors": "vectorized"}

# Values of knobs by schedule and current name of the knob: {old: new}. All old values are words.
KNOB_VALUES: dict[str, dict[str, dict[str, Value]]] = {
    "mma_sync": {
        "split_k_reduction": {"scratch": "workspace"},
        "residual_add": {"begin": "accumulator_init", "end": "epilogue"},
    },
    "tensor_core": {"fragment_prefetch": {"now": 0, "ahead": 1}},
    "direct": {"copy_order": _COPY_ORDERS},
    "implicit_gemm": {"copy_order": _COPY_ORDERS},
    "winograd": {"copy_order": _COPY_ORDERS},
}

# Features of cost models that are quantities of `ResourceUsage`, of all schedules: {old: new}.
USAGE_FEATURES = {
    "rounds": "cluster_waves",
    "held": "live_registers",
    "waste": "padding_ratio",
    "issued": "issued_instructions",
    "staged_words": "staged_elements",
    "halo": "halo_read_ratio",
    "overlap": "input_read_ratio",
    "in_flight": "in_flight_bytes",
}
# Keys of JSON objects: {old: new}.
RECORD_KEYS = {"deviation": "relative_error"}  # of a line of a tuning log
EXECUTABLE_KEYS = {"steps": "kernels", "scratch": "workspace", "prepared": "num_prepack_kernels"}  # of a header
KERNEL_KEYS = {"overlaps": "uses_pdl"}  # of a kernel in the header of an executable
TENSOR_MAP_KEYS = {"steps": "element_strides", "lower": "lower_corner", "upper": "upper_corner"}
ARCHIVE_KEYS = {"told": "metadata"}  # of an entry of a file of kernels
TORCH_ARCHIVE_KEYS = {"place": "torch_device"}  # of the header of a saved model, version 1

TUNERS = {"xgb": "gp"}  # names of tuners: {old: new}

# Knobs whose former name is also that of a quantity of `ResourceUsage`; a feature of that name is the quantity.
_KNOBS_NAMED_AS_USAGE = {("stem", "blocks")}

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger("tvmconv")
_reported_messages: set[str] = set()  # messages of this process


def rename_knob(schedule: str, name: str) -> str:
    """Return the current name of a knob, which may be given by its former one."""
    return KNOBS.get(schedule, {}).get(name, name)


def rename_value(schedule: str, knob: str, value: Value) -> Value:
    """Return the current spelling of a value of the knob that is now called `knob`."""
    if not isinstance(value, str):
        return value
    return KNOB_VALUES.get(schedule, {}).get(knob, {}).get(value, value)


def rename_config(schedule: str, config: Mapping[str, Value]) -> Config:
    """Return a config with the current names of its knobs and values, in the same order."""
    if schedule not in KNOBS:
        return dict(config)
    renamed: Config = {}
    current_names, current_values = KNOBS[schedule], KNOB_VALUES.get(schedule, {})
    for name, value in config.items():  # of thousands of records
        new_name = current_names.get(name, name)
        if new_name in renamed or (new_name != name and new_name in config):
            raise KnobError(f"schedule {schedule}: the config has knob {new_name} twice, once by a former name")
        is_renamed = isinstance(value, str) and new_name in current_values
        renamed[new_name] = current_values[new_name].get(value, value) if is_renamed else value
    return renamed


def rename_requested_config(schedule: str, config: Mapping[str, Value]) -> Config:
    """Return `rename_config` of a config that a user wrote, and log one line if it has a former name."""
    renamed = rename_config(schedule, config)
    changes = [
        f"{old_name}={old_value} is now {new_name}={new_value}"
        for (old_name, old_value), (new_name, new_value) in zip(config.items(), renamed.items(), strict=True)
        if (old_name, type(old_value)) != (new_name, type(new_value)) or old_value != new_value
    ]
    message = f"schedule {schedule}: {', '.join(changes)}; the former names are deprecated"
    if changes and message not in _reported_messages:
        _reported_messages.add(message)
        _logger.warning("%s", message)
    return renamed


def rename_feature(schedule: str, name: str) -> str:
    """Return the current name of a feature of a schedule's cost model: `w.SIZE`, KNOB, KNOB=WORD, KNOB.FACTOR or a
    quantity of `ResourceUsage`.
    """
    if name.startswith("w."):
        return name
    base, separator, rest = split_feature(name)
    if base in USAGE_FEATURES:
        return USAGE_FEATURES[base]
    if (schedule, base) in _KNOBS_NAMED_AS_USAGE:
        return name
    knob = rename_knob(schedule, base)
    return f"{knob}{separator}{rename_value(schedule, knob, rest) if separator == '=' else rest}"


def split_feature(name: str) -> tuple[str, str, str]:
    """Return the knob or quantity of a feature's name, the separator, and the option or factor behind it."""
    index = next((index for index, character in enumerate(name) if character in "=."), len(name))
    return name[:index], name[index : index + 1], name[index + 1 :]


def accept_former_keywords(**new_by_old: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of functions whose keywords `new_by_old` are accepted by their former names as well. A former
    name gives a `DeprecationWarning`; a keyword under both names gives a TypeError.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in new_by_old.keys() & kwargs.keys():
                new = new_by_old[old]
                if new in kwargs:
                    raise TypeError(f"{function.__name__}() got {new}= and {old}=, its former name")
                warnings.warn(f"{function.__name__}({old}=) is now {new}=", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def rename_tuner(name: str) -> str:
    """Return the current name of a tuner, which may be given by its former one."""
    return TUNERS.get(name, name)


def former_attribute(name: str) -> Any:
    """Return a property that reads the attribute `name` by a former name, with a `DeprecationWarning`."""

    def read(self: Any) -> Any:
        warnings.warn(f"the attribute is now {type(self).__name__}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(self, name)

    return property(read, doc=f"Former name of `{name}`.")


def rename_options(options: Mapping[str, T], new_by_old: Mapping[str, str]) -> dict[str, T]:
    """Return options with their current names; a former name gives a `DeprecationWarning`."""
    for old, new in new_by_old.items():
        if old in options:
            warnings.warn(f"option {old!r} is now {new!r}", DeprecationWarning, stacklevel=3)
    return rename_keys(options, new_by_old)


def former_knob(schedule: str | None, name: str) -> str:
    """Return the first name that a knob had: recorded spaces keep its order, so that seeded searches stay the same."""
    former_names = {new: old for old, new in KNOBS.get(schedule or "", {}).items()}
    return former_names.get(name, name)


def former_value(schedule: str | None, knob: str, value: Value) -> Value:
    """Return the first spelling of a value, see `former_knob`; `knob` is the current name."""
    former_values = {new: old for old, new in KNOB_VALUES.get(schedule or "", {}).get(knob, {}).items()}
    return former_values.get(value, value)


@functools.cache
def _text_renames(schedule: str) -> tuple[tuple[bytes, bytes], ...]:
    """Return pairs of old and new bytes for the text of configs: names first, then values of the renamed knobs."""
    knobs = ((f'["{old}", "', f'["{new}", "') for old, new in KNOBS.get(schedule, {}).items())
    values = (
        (f'["{knob}", "ot", {json.dumps(old)}]', f'["{knob}", "ot", {json.dumps(new)}]')
        for knob, new_by_old in KNOB_VALUES.get(schedule, {}).items()
        for old, new in new_by_old.items()
    )
    return tuple((old.encode(), new.encode()) for old, new in (*knobs, *values))


def rename_config_text(schedule: str, text: bytes) -> bytes:
    """Return the text of a config as tuning logs spell it, with the current names of its knobs and values."""
    for old, new in _text_renames(schedule):
        text = text.replace(old, new)
    return text


def rename_keys(data: Mapping[str, Any], new_by_old: Mapping[str, str]) -> dict[str, Any]:
    """Return a JSON object with the current names of its keys."""
    for old, new in new_by_old.items():
        if old in data and new in data:
            raise ValueError(f"the key {new!r} is there twice, once by its former name {old!r}")
    return {new_by_old.get(name, name): value for name, value in data.items()}

"""The sums of a strip, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR

from ..planes import Planes
from .strip import Strip
from .writing import Place, copy, guarded, local, loop, own_channel


class Outputs:
    """The sums of a strip, and their way to the output, through the epilogue.

    Args:
        w: the workload.
        arrays: the function's arguments.
        strip: the strips.
        at: where the thread is.

    Attributes:
        sums: (rows, columns, channels).
    """

    def __init__(self, w: Conv, arrays: Mapping[str, Any], strip: Strip, at: Place) -> None:
        self._w, self._arrays, self._strip, self._at = w, arrays, strip, at
        self._sizes = Planes.of(w)
        rows, columns, vector = strip.rows.local, strip.columns.local, strip.vector
        self.sums = local("sums", (rows, columns, vector), ACCUMULATOR)
        self._results = local("results", (columns, vector), w.storage)
        taken = {step.name: step.takes for step in epilogue.steps(w.epilogue) if step.takes}
        shapes = {"channel": (vector,), "output": (columns, vector)}
        self._own = {name: local(name, shapes[takes], str(arrays[name].dtype)) for name, takes in taken.items()}
        self._of_channels = [name for name, takes in taken.items() if takes == "channel"]

    def start(self) -> None:
        """Set the sums to zero, and read of the epilogue's arguments what all pixels share."""
        rows, columns, vector = self.sums.shape
        with loop("i", rows) as i, loop("j", columns) as j, loop("channel", vector) as channel:
            T.buffer_store(self.sums, tirx.const(0, ACCUMULATOR), [i, j, channel])
        for name in self._of_channels:
            self._read(name, lambda lane: (lane,), lambda lane: own_channel(self._strip, self._at) + lane)

    def add(self, i: Any, j: Any, channel: Any, x: Any, k: Any) -> None:
        """Add a product to a sum; the operands are widened first."""
        product = x.astype(ACCUMULATOR) * k.astype(ACCUMULATOR)
        T.buffer_store(self.sums, self.sums[i, j, channel] + product, [i, j, channel])

    def store(self, i: int) -> None:
        """Store the strip's row `i`."""
        strip, at = self._strip, self._at
        row, channel = at.row + i, own_channel(strip, at)
        _, rows, columns = self._sizes.out
        tests = [row < rows] * (not strip.rows.divides)
        tests += [at.vector < strip.channels.extent] * (not strip.channels.divides)

        def inside(j: Any) -> list[Any]:
            return tests + [at.column + j < columns] * (not strip.columns.divides)

        for name in self._own:
            if name not in self._of_channels:
                with loop("j", strip.columns.local) as j:
                    self._read_pixel(name, inside(j), j, self._place(row, j, channel))
        with loop("j", strip.columns.local) as j:
            with loop("channel", strip.vector) as lane:
                value = epilogue.compute(
                    self._w.epilogue, self.sums[i, j, lane], lambda name: self._element(name, j, lane)
                )
                T.buffer_store(self._results, value.astype(self._w.storage), [j, lane])

            def write() -> None:
                copy(
                    strip.vector,
                    self._arrays["Y"],
                    lambda lane: self._place(row, j, channel + lane),
                    lambda lane: self._results[j, lane],
                )

            guarded(inside(j), write)

    def _place(self, row: Any, j: Any, channel: Any) -> tuple[Any, ...]:
        """Where in the output column `j` of the strip lies."""
        return self._sizes.place(self._at.image, (self._at.plane, row, self._at.column + j), channel)

    def _element(self, name: str, j: Any, lane: Any) -> Any:
        own = self._own[name]
        return (own[lane] if name in self._of_channels else own[j, lane]).astype(ACCUMULATOR)

    def _read_pixel(self, name: str, tests: list[Any], j: Any, place: tuple[Any, ...]) -> None:
        *pixel, channel = place
        guarded(tests, lambda: self._read(name, lambda lane: (j, lane), lambda lane: (*pixel, channel + lane)))

    def _read(self, name: str, to: Callable[[Any], Sequence[Any]], of: Callable[[Any], Any]) -> None:
        """Read a vector of an epilogue's argument."""
        copy(self._strip.vector, self._own[name], to, lambda lane: self._arrays[name][of(lane)])

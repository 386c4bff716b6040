"""Programs in a file, each with what is known of it: JSON and machine code, nothing that could run by being read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tvmconv import jsonfile
from tvmconv.compiler.program import Program
from tvmconv.errors import Error
from tvmconv.files import check_archive, open_regular
from tvmconv.measuring.wire import decode_program, encode_program

MAX_BYTES = 1 << 32  # of all programs of a file
TOLD, HEADER = "told", "program"


def save(file: Path, programs: Iterable[tuple[dict[str, Any], Program]]) -> None:
    """Write programs, each with what JSON has to say of it."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, (told, program) in enumerate(programs):
            header, code = encode_program(program, None)
            archive.writestr(f"{number}.json", json.dumps({TOLD: told, HEADER: header}, ensure_ascii=False))
            archive.writestr(f"{number}.bin", code)


def load(file: Path) -> Iterator[tuple[dict[str, Any], Program]]:
    """What `save` wrote, in that order.

    Raises:
        Error: the file cannot be read, or holds something else.
    """
    try:
        with open_regular(file) as opened, zipfile.ZipFile(opened) as archive:
            check_archive(archive, MAX_BYTES)
            for number in range(sum(name.endswith(".json") for name in archive.namelist())):
                read = jsonfile.parse(archive.read(f"{number}.json"))
                program, _ = decode_program(read[HEADER].decode(str), archive.read(f"{number}.bin"))
                yield {name: each.value for name, each in read[TOLD].members().items()}, program
    except Exception as error:  # for a file that is damaged, archives and decompression raise a dozen kinds
        raise Error(f"cannot read {file}: {error}") from error

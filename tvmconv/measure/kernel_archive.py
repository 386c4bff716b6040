"""Archives of executables with metadata, as JSON and machine code without pickled objects."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tvmconv import compat, jsonfile
from tvmconv.compiler.executable import Executable
from tvmconv.errors import Error
from tvmconv.files import check_archive, open_regular
from tvmconv.measure.serialization import decode_executable, encode_executable

MAX_ARCHIVE_BYTES = 1 << 32  # limit for the unpacked archive
METADATA_KEY, EXECUTABLE_KEY = "metadata", "program"


def save_kernels(file: Path, kernels: Iterable[tuple[dict[str, Any], Executable]]) -> None:
    """Write executables with their metadata, a JSON-serializable dict, to a file."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for index, (metadata, executable) in enumerate(kernels):
            header, code = encode_executable(executable, None)
            entry = json.dumps({METADATA_KEY: metadata, EXECUTABLE_KEY: header}, ensure_ascii=False)
            archive.writestr(f"{index}.json", entry)
            archive.writestr(f"{index}.bin", code)


def load_kernels(file: Path) -> Iterator[tuple[dict[str, Any], Executable]]:
    """Yield metadata and executables of a file that `save_kernels` wrote, in order."""
    try:
        with open_regular(file) as stream, zipfile.ZipFile(stream) as archive:
            check_archive(archive, MAX_ARCHIVE_BYTES)
            for index in range(sum(name.endswith(".json") for name in archive.namelist())):
                entry = jsonfile.parse_json(archive.read(f"{index}.json")).rename_members(compat.ARCHIVE_KEYS)
                executable, _ = decode_executable(entry[EXECUTABLE_KEY].decode(str), archive.read(f"{index}.bin"))
                metadata = {name: value.value for name, value in entry[METADATA_KEY].members().items()}
                yield _rename_knobs(metadata), executable
    except Exception as error:  # zipfile and zlib raise many exception types for damaged files
        raise Error(f"cannot read {file}: {error}") from error


def _rename_knobs(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata with the current names of the knobs of its config, if it has one."""
    schedule, config = metadata.get("schedule"), metadata.get("config")
    if not isinstance(schedule, str) or not isinstance(config, dict):
        return metadata
    return {**metadata, "config": compat.rename_config(schedule, config)}

"""Records of JSONL and Parquet, one at a time, each with the place to name when it is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import DataError, nearest

_BATCH_ROWS = 256
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Record:
    """One line of JSONL or one row of Parquet; ``where`` names it, ``bytes_read`` is of its file up to its end."""

    where: str
    values: Mapping[str, Any]
    bytes_read: int

    def text(self, field: str) -> str:
        """The string in ``field``. Raises DataError where there is none, or it cannot be written as UTF-8."""
        return string(self.values, field, self.where)


def string(values: Mapping[str, Any], key: str, where: str) -> str:
    """``values[key]``, which must be a string that UTF-8 can hold. Raises DataError that begins with ``where``."""
    if key not in values:
        has = ", ".join(values) or "none"
        raise DataError(f"{where}: no field '{key}'{nearest(key, values)}; there is {has}")
    text = values[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{key}' is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: field '{key}' has half of a surrogate pair, which is no text") from None
    return text


def jsonl(path: Path) -> Iterator[Record]:
    """The objects of a JSONL file, blank lines left out. Raises DataError, naming the line, for what is no object."""
    read = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            read += len(line)
            if not line.isspace():
                where = f"{path}, line {number}"
                yield Record(where, _object(line, where), read)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig").rstrip())
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at character {error.pos + 1}"
        raise DataError(f"{where}: not JSON ({problem}); each line must be one object") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be read ({error}); each line must be one JSON object in UTF-8") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: {type(record).__name__} instead of an object")
    return record


def parquet_columns(path: Path) -> dict[str, str]:
    """The columns of a Parquet file: name → type. Reads the footer alone. Raises DataError when it is not Parquet."""
    with _open_parquet(path) as file:
        return {field.name: str(field.type) for field in file.schema_arrow}


def parquet(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """The rows of a Parquet file, ``columns`` only, a few hundred in memory at a time.

    ``bytes_read`` is estimated from the rows done. Raises DataError when the file is damaged.
    """
    import pyarrow

    size, row = path.stat().st_size, 0
    with _open_parquet(path) as file:
        rows = file.metadata.num_rows
        try:
            for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns), use_threads=False):
                for values in batch.to_pylist():
                    row += 1
                    yield Record(f"{path}, row {row}", values, size * row // rows)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: damaged behind row {row} ({error}); get the file again") from None


def _open_parquet(path: Path) -> Any:
    # Imported where it is used: it takes as long to load as the rest of this package.
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from None

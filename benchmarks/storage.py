"""Turn records in files: one JSON object a line, written as turns end; Parquet on request."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from benchmarks.records import TurnRecord


class RecordWriter:
    """Appends records to a file of JSON lines, as a context manager. Replaces what was there.

    A line is on its way to the disk when its record has been given, so a run that dies leaves
    what it saw.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        self._file = self._path.open("wb", buffering=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, record: TurnRecord) -> None:
        """Append one record."""
        self._file.write(self._encoder.encode(record) + b"\n")


def read_records(path: Path) -> list[TurnRecord]:
    """The records of a file that `RecordWriter` wrote.

    Raises:
        ValueError: a line is no record; the message names file and line.
    """
    decoder = msgspec.json.Decoder(TurnRecord)
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as problem:
            raise ValueError(f"{path}, line {number}: no turn record: {problem}") from None
    return records


def write_parquet(records: Sequence[TurnRecord], path: Path) -> None:
    """Write all records as one Parquet file, with a column for each field."""
    # pyarrow takes a while to import, and is rarely asked for.
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([asdict(record) for record in records])
    pyarrow.parquet.write_table(table, path)

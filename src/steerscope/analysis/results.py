"""Results of an analysis: computed once, plotted many times.

A result is a kind (`susceptibility`), facts about how it was made, and tables. In a folder it is `{kind}.json`, which
names the tables, and `{kind}.{table}.parquet`; results of several kinds may share a folder.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from steerscope.files import atomic_path, reading
from steerscope.specs.errors import BadFile
from steerscope.vectors.vector import Json

FORMAT = "steerscope-analysis-1"


@dataclass(frozen=True, eq=False)
class AnalysisResult:
    """The tables of an analysis, and facts about how they were made."""

    kind: str
    about: Mapping[str, Json]
    tables: Mapping[str, pa.Table]

    def save(self, folder: str | Path) -> list[Path]:
        """Write all files. The JSON comes last, so that a result whose JSON is there has its tables."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = [save_table(table, folder / f"{self.kind}.{name}.parquet") for name, table in self.tables.items()]
        text = json.dumps({"format": FORMAT, "kind": self.kind, "tables": list(self.tables), "about": dict(self.about)})
        last = folder / f"{self.kind}.json"
        with atomic_path(last) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
        return [*written, last]


def load_results(folder: str | Path) -> dict[str, AnalysisResult]:
    """Return every result in a folder, by kind."""
    folder = Path(folder)
    found = {}
    for file in sorted(folder.glob("[!.]*.json")):  # hidden files are still being written
        with reading(file, "result of an analysis"):
            data = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                continue
            tables = {name: pq.read_table(folder / f"{data['kind']}.{name}.parquet") for name in data["tables"]}
            found[data["kind"]] = AnalysisResult(data["kind"], data["about"], tables)
    if not found:
        raise BadFile(f"{folder} holds no results of an analysis; make some with steerscope analyze … --out {folder}")
    return found


def save_table(table: pa.Table, path: Path) -> Path:
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary)
    return path


def long_table(axes: Sequence[Mapping[str, Any]], values: Mapping[str, np.ndarray]) -> pa.Table:
    """Return a row for each combination of the axes.

    An axis is columns of labels that go together; values are arrays over the axes."""
    sizes = [len(next(iter(axis.values()))) for axis in axes]
    places = np.indices(sizes).reshape(len(sizes), -1)
    found = {}
    for axis, place in zip(axes, places, strict=True):
        found |= {name: pa.array(labels).take(place) for name, labels in axis.items()}
    return pa.table(found | {name: grid.ravel() for name, grid in values.items()})


def column(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy(zero_copy_only=False)


def where(table: pa.Table, name: str, value: object) -> pa.Table:
    """Return the rows with this value in the column `name`."""
    return table.filter(pa.array(column(table, name) == value))


def pivot(table: pa.Table, rows: str, columns: str, value: str) -> tuple[list, list, np.ndarray]:
    """Return the names of rows and columns in the order they come, and the grid; NaN where a pair is missing."""
    down, across = (table[name].combine_chunks().dictionary_encode(null_encoding="encode") for name in (rows, columns))
    values = column(table, value)
    grid = np.full((len(down.dictionary), len(across.dictionary)), np.nan, dtype=values.dtype)
    grid[down.indices.to_numpy(), across.indices.to_numpy()] = values
    return down.dictionary.to_pylist(), across.dictionary.to_pylist(), grid

"""Results of an analysis: computed once, plotted many times.

A result is a kind (`susceptibility`), facts about how it was made, and tables. In a folder it is `{kind}.json`, which
names the tables, and `{kind}.{table}.parquet`; results of several kinds may share a folder.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from steerscope.files import atomic_path, reading
from steerscope.specs.errors import BadFile
from steerscope.vectors.vector import Json

FORMAT = "steerscope-analysis-1"


@dataclass(frozen=True, eq=False)
class Result:
    """What an analysis found: tables, and what is to be known about them."""

    kind: str
    about: Mapping[str, Json]
    tables: Mapping[str, pa.Table]

    def save(self, folder: str | Path) -> list[Path]:
        """The JSON comes last, so that a result whose JSON is there has its tables."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, table in self.tables.items():
            written.append(folder / f"{self.kind}.{name}.parquet")
            with atomic_path(written[-1]) as temporary:
                pq.write_table(table, temporary)
        written.append(folder / f"{self.kind}.json")
        text = json.dumps({"format": FORMAT, "kind": self.kind, "tables": list(self.tables), "about": dict(self.about)})
        with atomic_path(written[-1]) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
        return written


def load_results(folder: str | Path) -> dict[str, Result]:
    """Every result in a folder, by kind."""
    folder, found = Path(folder), {}
    for file in sorted(folder.glob("[!.]*.json")):  # not what is being written
        with reading(file, "result of an analysis"):
            data = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                continue
            tables = {name: pq.read_table(folder / f"{data['kind']}.{name}.parquet") for name in data["tables"]}
            found[data["kind"]] = Result(data["kind"], data["about"], tables)
    if not found:
        raise BadFile(f"{folder} holds no results of an analysis; make some with steerscope analyze … --out {folder}")
    return found

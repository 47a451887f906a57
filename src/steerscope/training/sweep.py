"""Many runs: every learning rate at every layer on every set, in `<root>/<model>/<set>/<run>/`.

The model is loaded once per device, and runs on the same texts share what they can. A run that is finished is not run
again, one that was interrupted goes on, and one that fails is told and stops nobody. With several devices each takes
every n-th run.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerscope.engines.sync import SyncEngine
from steerscope.extraction.runs import write_json
from steerscope.files import atomic_path, reading
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.training.course import Course
from steerscope.training.curves import sweep_plot
from steerscope.training.texts import TrainingSet
from steerscope.training.vectors import Line, Result, TrainSettings, course_for, shared_settings, train_on


@dataclass(frozen=True, slots=True)
class SweepRun:
    data: TrainingSet
    settings: TrainSettings
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.data.name}/{self.folder.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    run: SweepRun
    result: Result | None
    error: str | None = None


Open = Callable[[str | None], SyncEngine]  # an engine on a device
Told = Callable[[SweepRun, Line, int], None]


def plan(
    root: str | Path,
    model: str,
    sets: Sequence[TrainingSet],
    settings: Sequence[TrainSettings],
) -> list[SweepRun]:
    """All sets with all settings; runs that would share a folder are refused."""
    runs = [
        SweepRun(data, one, Path(root) / Path(model).name / data.name / _name(one)) for data in sets for one in settings
    ]
    folders = [run.folder for run in runs]
    twice = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if twice:
        problems = [Problem(folder, "is asked for twice", "name sets, layers and rates once") for folder in twice]
        raise InvalidRequest(problems)
    return runs


def _name(settings: TrainSettings) -> str:
    layers = settings.layers
    span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)) else ""
    return f"L{span or '.'.join(map(str, layers))}-lr{settings.learning_rate:g}-seed{settings.seed}"


def sweep(
    runs: Sequence[SweepRun],
    open_engine: Open,
    devices: Sequence[str | None] = (None,),
    *,
    prompts: tuple[str, ...] | None = None,
    told: Told | None = None,
) -> list[Outcome]:
    """All runs, and `sweep.json` and `sweep.svg` beside their sets."""
    parts = [runs[i :: len(devices)] for i in range(len(devices))]
    with ThreadPoolExecutor(len(devices)) as threads:
        done = threads.map(
            lambda pair: list(_on(pair[0], pair[1], open_engine, prompts, told)), zip(devices, parts, strict=True)
        )
        found = {id(outcome.run): outcome for part in done for outcome in part}
    outcomes = [found[id(run)] for run in runs]
    for folder in dict.fromkeys(run.folder.parent.parent for run in runs):
        _report(folder, [one for one in outcomes if one.run.folder.parent.parent == folder])
    return outcomes


def _on(
    device: str | None,
    runs: Sequence[SweepRun],
    open_engine: Open,
    prompts: tuple[str, ...] | None,
    told: Told | None,
) -> Iterator[Outcome]:
    """The runs of one device, in order; the engine is opened for the first that needs it."""
    course: Course | None = None
    known: dict[str, Any] = {}
    with ExitStack() as stack:
        engine: SyncEngine | None = None
        for run in runs:
            try:
                engine = engine or stack.enter_context(open_engine(device))
                if course is None or course.data is not run.data or known != shared_settings(run.settings):
                    course = course_for(engine, run.data, run.settings, prompts)
                    known = shared_settings(run.settings)

                def tell(line: Line, most: int, run: SweepRun = run) -> None:
                    if told:
                        told(run, line, most)

                yield Outcome(run, train_on(course, run.folder, run.settings, tell).result)
            except Exception as error:  # whatever it was, it was this run's: the others go on
                own = isinstance(error, SteerscopeError)
                yield Outcome(run, None, str(error) if own else f"{type(error).__name__}: {error}")


def _report(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """With what earlier sweeps of this folder told of other runs."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {str(row["run"]): row for row in _told_before(folder / "sweep.json")}
    for one in outcomes:
        settings = one.run.settings
        row = {"run": one.run.name, "learning_rate": settings.learning_rate, "layers": list(settings.layers)}
        rows[one.run.name] = row | ({"error": one.error} if one.result is None else one.result.model_dump(mode="json"))
    write_json(folder / "sweep.json", {"runs": list(rows.values())})
    with atomic_path(folder / "sweep.svg") as path:
        path.write_text(_plot(list(rows.values())), encoding="utf-8")


def _told_before(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with reading(path, "account of a sweep"):
        return json.loads(path.read_text(encoding="utf-8"))["runs"]


def _plot(rows: Sequence[dict[str, Any]]) -> str:
    curves: dict[str, list[tuple[float, float]]] = {}
    levels: dict[str, float] = {}
    single = len({row["run"].partition("/")[0] for row in rows}) == 1
    for row in rows:
        name, _, run = row["run"].partition("/")
        of = "" if single else f"{name} "
        if "error" not in row:
            curves.setdefault(of + run.split("-lr")[0], []).append((row["learning_rate"], row["steered"]))
            levels[f"{of}unsteered"] = row["unsteered"]
            if row["prompted"] is not None:
                levels[f"{of}prompted"] = row["prompted"]
    return sweep_plot(curves, levels)

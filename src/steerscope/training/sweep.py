"""Many training runs: every learning rate at every layer on every set, in `<root>/<model>/<set>/<run>/`.

The model is loaded once per device, and runs on the same texts share a course. Finished runs are skipped, interrupted
ones resume, and a run that fails does not stop the others. With several devices each takes every n-th run.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from steerscope.engines.sync import SyncEngine
from steerscope.extraction.runs import read_json, write_json
from steerscope.files import write_text
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.training.course import Course
from steerscope.training.curves import sweep_plot
from steerscope.training.settings import TrainResult, TrainSettings
from steerscope.training.texts import TrainingSet
from steerscope.training.vectors import Line, train_on


@dataclass(frozen=True, slots=True)
class SweepRun:
    data: TrainingSet
    settings: TrainSettings
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.data.name}/{self.folder.name}"


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    run: SweepRun
    result: TrainResult | None
    error: str | None = None


Open = Callable[[str | None], SyncEngine]  # an engine on a device
Told = Callable[[SweepRun, Line, int], None]


def plan(
    root: str | Path, model: str, sets: Sequence[TrainingSet], settings: Sequence[TrainSettings]
) -> list[SweepRun]:
    """Combine all sets with all settings; runs that would share a folder are refused."""
    folder = Path(root) / Path(model).name
    runs = [SweepRun(data, one, folder / data.name / _name(one)) for data in sets for one in settings]
    folders = [run.folder for run in runs]
    if twice := sorted({str(one) for one in folders if folders.count(one) > 1}):
        raise InvalidRequest(Problem(one, "is asked for twice", "name sets, layers and rates once") for one in twice)
    return runs


def _name(settings: TrainSettings) -> str:
    layers = settings.layers
    span = ".".join(map(str, layers))
    if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)):
        span = f"{layers[0]}-{layers[-1]}"
    return f"L{span}-lr{settings.learning_rate:g}-seed{settings.seed}"


def sweep(
    runs: Sequence[SweepRun],
    open_engine: Open,
    devices: Sequence[str | None] = (None,),
    *,
    prompts: tuple[str, ...] | None = None,
    told: Told | None = None,
) -> list[SweepOutcome]:
    """Do all runs, and write `sweep.json` and `sweep.svg` beside their sets."""
    parts = [runs[i :: len(devices)] for i in range(len(devices))]
    with ThreadPoolExecutor(len(devices)) as threads:
        done = threads.map(lambda device, part: list(_on(device, part, open_engine, prompts, told)), devices, parts)
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
) -> Iterator[SweepOutcome]:
    """Do the runs of one device in order; the engine is opened for the first one that needs it."""
    engine: SyncEngine | None = None
    course: Course | None = None
    with ExitStack() as stack:
        for run in runs:
            try:
                engine = engine or stack.enter_context(open_engine(device))
                if course is None or course.data is not run.data or course.settings.shared != run.settings.shared:
                    course = Course(engine, run.data, run.settings, prompts)

                tell = partial(told, run) if told else None
                yield SweepOutcome(run, train_on(course, run.folder, run.settings, tell).result)
            except Exception as error:  # the other runs go on
                kind = "" if isinstance(error, SteerscopeError) else f"{type(error).__name__}: "
                yield SweepOutcome(run, None, f"{kind}{error}")


def _report(folder: Path, outcomes: Sequence[SweepOutcome]) -> None:
    """Write the outcomes, with those of earlier sweeps of this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.json"
    before = read_json(path, "account of a sweep")["runs"] if path.is_file() else []
    rows: dict[str, dict[str, Any]] = {str(row["run"]): row for row in before}
    for one in outcomes:
        settings = one.run.settings
        row = {"run": one.run.name, "learning_rate": settings.learning_rate, "layers": list(settings.layers)}
        rows[one.run.name] = row | ({"error": one.error} if one.result is None else one.result.model_dump(mode="json"))
    write_json(path, {"runs": list(rows.values())})
    curves: dict[str, list[tuple[float, float]]] = {}
    levels: dict[str, float] = {}
    single = len({name.partition("/")[0] for name in rows}) == 1
    for row in rows.values():
        name, _, run = row["run"].partition("/")
        prefix = "" if single else f"{name} "
        if "error" not in row:
            curves.setdefault(prefix + run.split("-lr")[0], []).append((row["learning_rate"], row["steered"]))
            levels[f"{prefix}unsteered"] = row["unsteered"]
            if row["prompted"] is not None:
                levels[f"{prefix}prompted"] = row["prompted"]
    write_text(folder / "sweep.svg", sweep_plot(curves, levels))

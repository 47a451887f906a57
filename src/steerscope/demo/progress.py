"""A progress bar on stderr whose steps have names; captured rows are counted while the model works."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class _RowColumn(ProgressColumn):
    def __init__(self) -> None:
        super().__init__()
        self.count: Callable[[], float] = lambda: 0

    def render(self, task: Task) -> Text:
        del task
        return Text(f"{int(self.count()):>5} rows", style="dim")


class Steps:
    """`steps("sweeping the scale")` finishes the step before and starts this one."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._rows = _RowColumn()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", style="dim"),
            self._rows,
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
        )
        self._task = self._progress.add_task("starting", total=total)
        self._started = False

    def __call__(self, text: str) -> None:
        self._progress.update(self._task, description=f"{text:<42}", advance=1 if self._started else 0)
        self._started = True
        if not self._progress.console.is_terminal:  # a log file shows each step as a line instead of a bar
            self.say(text)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._progress.console.print(text, markup=False)

    def count_rows(self, count: Callable[[], float]) -> None:
        self._rows.count = count

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._progress.update(self._task, advance=1)
        self._progress.stop()

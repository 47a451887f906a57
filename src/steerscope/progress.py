"""Progress bars on stderr, for commands and the demo."""

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBars:
    """One bar for each task, drawn from the first update on."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, task: str, done: int, total: int, words: str | None = None, *, log: bool = False) -> None:
        """Show how far a task is; `words` replace its name, and with `log` they are printed where no bar can move."""
        bars = self._started()
        if task not in self._tasks:
            self._tasks[task] = bars.add_task(task, total=total)
        bars.update(self._tasks[task], completed=done, description=words or task)
        if log and not bars.console.is_terminal:
            self.say(words or task)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._started().console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _started(self) -> "Progress":
        if self._bars is None:
            self._bars = _new_bars()
            self._bars.start()
        return self._bars


def _new_bars() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))

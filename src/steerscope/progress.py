"""Progress bars on stderr, for commands and the demo."""

from typing import Self


class ProgressBars:
    """One bar for each task, drawn from the first update on."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, task: str, done: int, total: int, words: str | None = None, *, log: bool = False) -> None:
        """Show how far a task is; `words` replace its name, and with `log` they are printed where no bar can move."""
        self._bars.start()
        if task not in self._tasks:
            self._tasks[task] = self._bars.add_task(task, total=total)
        self._bars.update(self._tasks[task], completed=done, description=words or task)
        if log and not self._bars.console.is_terminal:
            self.say(words or task)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.start()
        self._bars.console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

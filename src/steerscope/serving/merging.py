"""Several prompts in one request: their events in one stream, and their problems in one error."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence

from steerscope.engines.results import EndEvent, Event
from steerscope.specs.errors import Problem


def of_prompt(problems: Iterable[Problem], i: int, count: int) -> list[Problem]:
    """A problem of one of several prompts says of which; one of what they share is the same for all."""
    if count == 1:
        return list(problems)
    return [Problem(f"prompt[{i}]", p.what, p.remedy) if p.field == "prompt" else p for p in problems]


def of_prompts(problems: Iterable[Problem], count: int) -> list[Problem]:
    """The same for problems of a list, whose fields an engine names `prompts[0].prompt`."""
    found: list[Problem] = []
    for problem in problems:
        number, _, rest = problem.field.removeprefix("prompts[").partition("].")
        listed = problem.field.startswith("prompts[") and number.isdecimal()
        own = Problem(rest, problem.what, problem.remedy) if listed else problem
        found += of_prompt([own], int(number) if listed else 0, count)
    return list(dict.fromkeys(found))


async def merged(streams: Sequence[AsyncGenerator[list[Event]]]) -> AsyncGenerator[tuple[int, list[Event]]]:
    """Batches of several streams in the order they come; the first error ends all."""
    found: asyncio.Queue[tuple[int, list[Event] | Exception]] = asyncio.Queue()

    async def pump(i: int, stream: AsyncGenerator[list[Event]]) -> None:
        try:
            async for batch in stream:
                found.put_nowait((i, batch))
        except Exception as error:
            found.put_nowait((i, error))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            i, batch = await found.get()
            if isinstance(batch, Exception):
                raise batch
            left -= isinstance(batch[-1], EndEvent)
            yield i, batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

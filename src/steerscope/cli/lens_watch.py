"""`steerscope lens watch` and `lens report`: readings of a generated text, in the terminal or as a page."""

import json
import re
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o
from steerscope.cli.fields import Given, with_fields

if TYPE_CHECKING:
    from steerscope.engines.results import Event, Generation
    from steerscope.engines.sync import SyncEngine

_RULE = re.compile(r"\s*(.+?)\s*([<>])\s*([\d.]+)(?:\s+for\s+(\d+))?\s*")
_COLOURS = ("#2468a8", "#c2560c", "#2f7d5b", "#7c4d9e", "#a02c4f", "#8a6d00", "#0f7f86", "#5b5fc7")

Prompt = Annotated[str, Argument(help="The text to continue, or with --chat a user's message.")]
PackFolder = Annotated[Path, Option(help="Folder of a lens pack.")]
TopK = Annotated[int, Option(help="Number of concepts kept for each token.")]
StopWhen = Annotated[
    list[str] | None, Option(help="End when 'CONCEPT>0.8', or 'CONCEPT>0.8 for 3' tokens; repeatable.")
]
FlagWhen = Annotated[list[str] | None, Option(help="Report when 'CONCEPT>0.8'; same forms, repeatable.")]
SamplingOptions = Annotated[Given[ss.Sampling], o.sampling_fields("max_tokens temperature seed", max_tokens=64)]


@with_fields
def watch(
    prompt: Prompt,
    pack: PackFolder,
    sampling: SamplingOptions,
    engine: o.LocalEngine,
    model: o.ModelName = "smollm2-135m",
    top_k: TopK = 3,
    stop_when: StopWhen = None,
    flag_when: FlagWhen = None,
    chat: o.AsChat = False,
    any_model: o.AnyModel = False,
    as_json: o.AsJson = False,
) -> None:
    """Generate, and print every token in the colour of its strongest concept.

    Example: steerscope lens watch "The storm broke over" --pack demo-report/lenses --stop-when "fear>0.8 for 3"
    """
    wanted, asked = o.together(lambda: _watch(top_k, stop_when, flag_when), sampling.parse)
    with o.open_engine(model, engine) as loaded:
        loaded.register_pack("pack", pack, any_model=any_model)
        events = _events(loaded, prompt, chat, asked, wanted)
        generation = o.consume(loaded, events) if as_json else _live(loaded, events)
        texts = _texts(loaded, generation)
    if as_json:
        typer.echo(json.dumps(_plain(generation, texts), ensure_ascii=False))
        return
    _summary(generation)
    o.note(o.speed(generation) + (f" ({generation.rule})" if generation.rule else ""))


@with_fields
def report(
    prompt: Prompt,
    pack: PackFolder,
    sampling: SamplingOptions,
    engine: o.LocalEngine,
    out: Annotated[Path, Option(help="The page to write.")] = Path("lens-report.html"),
    model: o.ModelName = "smollm2-135m",
    top_k: TopK = 10,
    stop_when: StopWhen = None,
    flag_when: FlagWhen = None,
    chat: o.AsChat = False,
    any_model: o.AnyModel = False,
) -> None:
    """Generate, and write a page: concepts over tokens, the tree of concepts, the lenses' calibration."""
    wanted, asked, _ = o.together(
        lambda: _watch(top_k, stop_when, flag_when), sampling.parse, lambda: o.check_target(out)
    )
    from steerscope.files import atomic_path
    from steerscope.lenses.report import html_report

    with o.open_engine(model, engine) as loaded:
        loaded.register_pack("pack", pack, any_model=any_model)
        generation = o.consume(loaded, _events(loaded, prompt, chat, asked, wanted))
        texts = _texts(loaded, generation)
    page = html_report(
        generation.readings,  # type: ignore[arg-type]
        texts,
        generation.firings,
        prompt_length=len(generation.prompt_token_ids),
        model=model,
    )
    with atomic_path(out) as temporary:
        temporary.write_text(page, encoding="utf-8")
    typer.echo(str(out))


# --- requests


def _watch(top_k: int, stop_when: list[str] | None, flag_when: list[str] | None) -> "ss.Watch":
    rules = [_condition(text).then(ss.stop(text)) for text in stop_when or ()]
    rules += [_condition(text).then(ss.flag(text)) for text in flag_when or ()]
    return ss.Watch(pack="pack", top_k=top_k, rules=rules)


def _condition(text: str) -> Any:
    match = _RULE.fullmatch(text)
    if match is None:
        raise o.mistake(repr(text), "is not a condition", "write 'concept>0.8', 'concept<0.2' or 'concept>0.8 for 3'")
    concept, sign, bound, rows = match.groups()
    try:
        limit = {"above" if sign == ">" else "below": float(bound)}
    except ValueError:
        raise o.mistake(repr(text), f"{bound!r} is not a number", "write 'concept>0.8'") from None
    return ss.when(concept, for_tokens=int(rows or 1), **limit)


def _events(engine: "SyncEngine", prompt: str, chat: bool, sampling: "ss.Sampling", asked: "ss.Watch") -> Any:
    o.check_text(prompt)
    if chat:
        messages = [{"role": "user", "content": prompt}]
        return engine.stream_chat(messages, sampling, watch=asked, request_id=o.REQUEST)
    return engine.stream(prompt, sampling, watch=asked, request_id=o.REQUEST)


def _texts(engine: "SyncEngine", generation: "Generation") -> list[str]:
    """Return the text of each token of the prompt and the answer."""
    decode = engine.aio.tokenizer.decode
    return [str(decode([i])) for i in (*generation.prompt_token_ids, *generation.token_ids)]


# --- output


def _live(engine: "SyncEngine", events: Any) -> "Generation":
    """Print tokens as they come and return the generation."""
    shown = _LiveText(engine)
    generation = o.consume(engine, events, shown.add)
    shown.end()
    return generation


class _LiveText:
    """Prints tokens one step late, since a token's reading comes with the next token; firings follow their token."""

    def __init__(self, engine: "SyncEngine") -> None:
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._decode = engine.aio.tokenizer.decode
        self._waiting: str | None = None
        self._fired: list[ss.Firing] = []

    def add(self, event: "Event") -> None:
        if isinstance(event, ss.RuleEvent):
            self._fired.append(event.firing)
        if not isinstance(event, ss.TokenEvent):
            return
        if self._waiting is None:
            for reading in event.readings:
                self._print(str(self._decode([reading.token_id])), f"dim {_style(reading)}")
                self._flags([firing for firing in self._fired if firing.position == reading.position])
        else:
            self._print(self._waiting, _style(event.reading) if event.reading else "")
            self._flags(self._fired)
        self._waiting, self._fired = event.text, []

    def end(self) -> None:
        self._print((self._waiting or "") + "\n", "")

    def _flags(self, firings: "list[ss.Firing]") -> None:
        for firing in firings:
            self._print(f"[{firing.rule}: {firing.score:.2f}]", "reverse")

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, end="", style=style, markup=False)


def _style(reading: "ss.Reading") -> str:
    """Return the colour of the strongest concept, bold above a probability of 0.9."""
    if not reading.concepts:
        return ""
    best = reading.concepts[0]
    return f"{colour(best.id)}{' bold' if best.probability > 0.9 else ''}"


def colour(concept: str) -> str:
    """Return the colour of a concept, the same in every run."""
    return _COLOURS[zlib.crc32(concept.encode()) % len(_COLOURS)]


def _summary(generation: "Generation") -> None:
    """Print how many tokens each concept leads, and its highest probability."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    led: dict[str, list[Any]] = {}
    for reading in generation.readings:
        for concept in reading.concepts[:1]:
            led.setdefault(concept.id, []).append(concept)
    table = Table("concept", "leads on", "highest")
    for concept, found in sorted(led.items(), key=lambda pair: -len(pair[1]))[:12]:
        name = Text(" › ".join(found[0].path), style=colour(concept))
        table.add_row(name, f"{len(found)} tokens", f"{max(c.probability for c in found):.2f}")
    Console(stderr=True).print(table)


def _plain(generation: "Generation", texts: list[str]) -> dict[str, object]:
    rows = [
        {**asdict(reading), "token": texts[reading.position], "concepts": [c._asdict() for c in reading.concepts]}
        for reading in generation.readings
    ]
    choice = generation.choices[0]
    keys = ("text", "token_ids", "finish_reason", "rule", "seed")
    whole: dict[str, object] = {key: getattr(choice, key) for key in keys}
    firings = [asdict(firing) for firing in generation.firings]
    return {**whole, "prompt_token_ids": generation.prompt_token_ids, "readings": rows, "firings": firings}

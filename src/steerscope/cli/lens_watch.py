"""`steerscope lens watch` and `lens report`: read a model's rows while it writes, in the terminal or as a page."""

import json
import re
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import steerscope as ss
from steerscope.cli import options as o

if TYPE_CHECKING:
    from steerscope.engines.results import Event, Generation
    from steerscope.engines.sync import SyncEngine

_RULE = re.compile(r"\s*(.+?)\s*([<>])\s*([\d.]+)(?:\s+for\s+(\d+))?\s*")
_COLOURS = ("#2468a8", "#c2560c", "#2f7d5b", "#7c4d9e", "#a02c4f", "#8a6d00", "#0f7f86", "#5b5fc7")

Prompt = Annotated[str, typer.Argument(help="The text to continue, or with --chat a user's message.")]
PackFolder = Annotated[Path, typer.Option(help="The folder of a lens pack.")]
Best = Annotated[int, typer.Option(help="How many concepts of each token are kept.")]
StopWhen = Annotated[list[str] | None, typer.Option(help="End when 'CONCEPT>0.8', or 'CONCEPT>0.8 for 3' tokens.")]
FlagWhen = Annotated[list[str] | None, typer.Option(help="Say so when 'CONCEPT>0.8'; the same forms.")]
AsChat = Annotated[bool, typer.Option("--chat", help="Send PROMPT as a user's message through the chat template.")]
AnyModel = Annotated[bool, typer.Option("--any-model", help="The pack was trained on another name of this model.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `steerscope lens`."""
    app.command()(watch)
    app.command()(report)


def watch(
    prompt: Prompt,
    pack: PackFolder,
    model: o.ModelName = "smollm2-135m",
    top_k: Best = 3,
    stop_when: StopWhen = None,
    flag_when: FlagWhen = None,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = None,
    chat: AsChat = False,
    any_model: AnyModel = False,
    as_json: o.AsJson = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
) -> None:
    """Generate with every token in the colour of the concept that its row shows most.

    Example: steerscope lens watch "The storm broke over" --pack demo-report/lenses --stop-when "fear>0.8 for 3"
    """
    given = dict(locals())
    asked, sampling = o.together(lambda: _watch(top_k, stop_when, flag_when), lambda: o.sampling(given | {"top_k": 0}))
    with o.open_engine(model, device, dtype) as engine:
        engine.register_pack("pack", pack, any_model=any_model)
        events = _events(engine, prompt, chat, sampling, asked)
        generation = o.show(engine, events, live=False) if as_json else _live(engine, events)
        texts = _texts(engine, generation)
    if as_json:
        typer.echo(json.dumps(_plain(generation, texts), ensure_ascii=False))
        return
    _summary(generation)
    o.note(o.speed(generation) + (f" ({generation.rule})" if generation.rule else ""))


def report(
    prompt: Prompt,
    pack: PackFolder,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("lens-report.html"),
    model: o.ModelName = "smollm2-135m",
    top_k: Best = 10,
    stop_when: StopWhen = None,
    flag_when: FlagWhen = None,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = None,
    chat: AsChat = False,
    any_model: AnyModel = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
) -> None:
    """Generate, and write a page: concepts over tokens, the tree of concepts, the lenses' calibration."""
    given = dict(locals())
    asked, sampling, _ = o.together(
        lambda: _watch(top_k, stop_when, flag_when),
        lambda: o.sampling(given | {"top_k": 0}),
        lambda: _check_out(out),
    )
    from steerscope.files import atomic_path
    from steerscope.lenses.report import html_report

    with o.open_engine(model, device, dtype) as engine:
        engine.register_pack("pack", pack, any_model=any_model)
        generation = o.show(engine, _events(engine, prompt, chat, sampling, asked), live=False)
        texts = _texts(engine, generation)
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


# --- asking


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


def _check_out(out: Path) -> None:
    if out.is_dir() or not out.parent.is_dir():
        raise o.mistake(f"--out {out}", "is a folder, or in none", "name a file in a folder that exists")


def _texts(engine: "SyncEngine", generation: "Generation") -> list[str]:
    """The text of every token, prompt and generated, each alone."""
    decode = engine.aio.tokenizer.decode
    return [str(decode([i])) for i in (*generation.prompt_token_ids, *generation.token_ids)]


# --- showing


def _live(engine: "SyncEngine", events: Any) -> "Generation":
    """Prints as it comes; Ctrl-C ends the text in good order."""
    shown = _Shown(engine)

    def told() -> Any:
        try:
            for event in events:
                shown.tell(event)
                yield event
        finally:
            events.close()

    generation = o.show(engine, told(), live=False)
    shown.end()
    return generation


class _Shown:
    """A token's own reading comes with the token after it, so each is shown one step late; firings behind the token
    whose row they are about."""

    def __init__(self, engine: "SyncEngine") -> None:
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._decode = engine.aio.tokenizer.decode
        self._waiting: str | None = None
        self._fired: list[ss.Firing] = []

    def tell(self, event: "Event") -> None:
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
    """The colour of the best concept; bold where it is sure."""
    if not reading.concepts:
        return ""
    best = reading.concepts[0]
    return f"{colour(best.id)}{' bold' if best.probability > 0.9 else ''}"


def colour(concept: str) -> str:
    """Always the same one for a concept."""
    return _COLOURS[zlib.crc32(concept.encode()) % len(_COLOURS)]


def _summary(generation: "Generation") -> None:
    """Which concepts led, and where they were highest."""
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

"""`steerscope lens`: train lenses for concepts, show packs, and watch a model with a pack."""

import json
import re
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o
from steerscope.progress import ProgressBars
from steerscope.specs.base import Spec

if TYPE_CHECKING:
    from steerscope.engines.results import Event, Generation
    from steerscope.engines.sync import SyncEngine
    from steerscope.lenses import Pack

app = o.command_group(no_args_is_help=True, help="Train lenses for concepts, show packs, and watch a model with one.")
_RULE = re.compile(r"\s*(.+?)\s*([<>])\s*([\d.]+)(?:\s+for\s+(\d+))?\s*")
_COLOURS = ("#2468a8", "#c2560c", "#2f7d5b", "#7c4d9e", "#a02c4f", "#8a6d00", "#0f7f86", "#5b5fc7")


class WatchOptions(Spec):
    """How a text is generated and read with a pack."""

    pack: Path = Field(description="Folder of a lens pack.")
    top_k: int = Field(default=3, description="Number of concepts kept for each token.")
    stop_when: tuple[str, ...] = Field(
        default=(), description="End when 'CONCEPT>0.8', or 'CONCEPT>0.8 for 3' tokens; repeatable."
    )
    flag_when: tuple[str, ...] = Field(default=(), description="Report when 'CONCEPT>0.8'; same forms, repeatable.")
    chat: bool = Field(default=False, description="Send PROMPT as a user's message through the chat template.")
    any_model: bool = Field(default=False, description="Accept a pack that was made for another model's name.")

    def watch(self) -> "ss.Watch":
        rules = [_condition(text).then(ss.stop(text)) for text in self.stop_when]
        rules += [_condition(text).then(ss.flag(text)) for text in self.flag_when]
        return ss.Watch(pack="pack", top_k=self.top_k, rules=rules)


Prompt = Annotated[str, Argument(help="The text to continue, or with --chat a user's message.")]
SamplingOptions = Annotated[o.Given[ss.Sampling], o.sampling_fields("max_tokens temperature seed", max_tokens=64)]


@app.command()
@o.with_fields
def fit(
    engine: o.BatchEngine,
    out: Annotated[Path, Option(help="Folder of the pack; rows are kept beside it in OUT.work.")],
    layers: Annotated[
        str,
        Option("--layers", "--layer", help="12, or candidates (8-16 or 8,12,16): the validation texts choose."),
    ],
    model: o.ModelName = "smollm2-135m",
    concepts: Annotated[Path | None, Option(help="Concepts with texts (.jsonl); default: those shipped.")] = None,
    seed: Annotated[int, Option(help="The same seed and rows give the same lenses.")] = 0,
    linear: Annotated[bool, Option("--linear", help="Linear probes instead of two hidden layers.")] = False,
    epochs: Annotated[int | None, Option(help="Maximum number of epochs; the best one is kept.")] = None,
    generate: Annotated[int, Option(help="Texts per concept that the model writes for training.")] = 0,
    fold: Annotated[int, Option(help="Which forms of text are held out, 0–3.")] = 0,
    shuffled_control: Annotated[
        bool, Option("--shuffled-control", help="Fit once more with shuffled labels: expect AUROC near 0.5.")
    ] = False,
    work: Annotated[Path | None, Option(help="Folder of the rows; default: OUT.work.")] = None,
) -> None:
    """Train a lens for every concept and write a pack; an interrupted fit continues.

    Example: steerscope lens fit --layers 16 --out pack
    """
    from steerscope.training.concepts import load_concepts
    from steerscope.training.lenses import LensSettings, fit_pack

    given = {"seed": seed, "generate": generate, "fold": fold, "control": shuffled_control}
    given |= {"name": out.name, "device": engine.values.get("device")}
    asked = {**({"widths": ()} if linear else {}), **({"epochs": epochs} if epochs is not None else {})}
    known, settings = o.together(
        lambda: load_concepts(concepts),
        lambda: LensSettings.parse({**given, "layers": _layers(layers), "fit": asked}),
    )
    with o.open_engine(model, engine) as loaded, ProgressBars() as bars:
        done = fit_pack(loaded, known, out, settings, work=work, progress=bars)
    o.facts("", _facts(done.pack))
    typer.echo(f"{out}: {done.pack}")


@app.command()
def show(
    pack: Annotated[Path, Argument(help="Folder of a pack.")],
    level: Annotated[int | None, Option(help="Deepest level of the tree; default: all.")] = None,
) -> None:
    """Show the concepts of a pack as a tree, with their measures on held-out texts."""
    from rich.console import Console

    from steerscope.lenses import Pack

    found = Pack.load(pack)
    o.facts(str(pack), _facts(found))
    Console(width=None if typer.get_text_stream("stdout").isatty() else 200).print(_tree(found, level))


@app.command()
@o.with_fields
def watch(
    prompt: Prompt,
    options: Annotated[o.Given[WatchOptions], o.Fields(WatchOptions)],
    sampling: SamplingOptions,
    engine: o.LocalEngine,
    model: o.ModelName = "smollm2-135m",
    as_json: o.AsJson = False,
) -> None:
    """Generate, and print every token in the colour of its strongest concept.

    Example: steerscope lens watch "The storm broke over" --pack demo-report/lenses --stop-when "fear>0.8 for 3"
    """
    asked = options.parse()
    wanted, settings = o.together(asked.watch, sampling.parse)
    with o.open_engine(model, engine) as loaded:
        events = _events(loaded, prompt, asked, settings, wanted)
        generation = o.consume(loaded, events) if as_json else _live(loaded, events)
        texts = _texts(loaded, generation)
    if as_json:
        typer.echo(json.dumps(_plain(generation, texts), ensure_ascii=False))
        return
    _summary(generation)
    o.note(o.speed(generation) + (f" ({generation.rule})" if generation.rule else ""))


@app.command()
@o.with_fields
def report(
    prompt: Prompt,
    options: Annotated[o.Given[WatchOptions], o.Fields(WatchOptions, top_k=10)],
    sampling: SamplingOptions,
    engine: o.LocalEngine,
    out: Annotated[Path, Option(help="The page to write.")] = Path("lens-report.html"),
    model: o.ModelName = "smollm2-135m",
) -> None:
    """Generate, and write a page: concepts over tokens, the tree of concepts, rules that fired."""
    asked = options.parse()
    wanted, settings, _ = o.together(asked.watch, sampling.parse, lambda: o.check_target(out))
    from steerscope.files import write_text
    from steerscope.lenses.report import html_report

    with o.open_engine(model, engine) as loaded:
        generation = o.consume(loaded, _events(loaded, prompt, asked, settings, wanted))
        texts = _texts(loaded, generation)
    page = html_report(
        generation.readings,  # type: ignore[arg-type]
        texts,
        generation.firings,
        prompt_length=len(generation.prompt_token_ids),
        model=model,
    )
    write_text(out, page)
    typer.echo(str(out))


def _layers(text: str) -> list[int]:
    from steerscope.specs.steering import checked_layers

    layers = checked_layers(text, "--layers")
    if layers == "all":
        raise o.mistake("--layers", "all is too many to keep rows of", "name some: 8-16, or 8,12,16")
    return list(layers)


def _facts(pack: "Pack") -> dict[str, object]:
    info = pack.info
    notes = pack.info.training
    widths = ", ".join(map(str, info.architecture.widths)) or "none (linear)"
    facts: dict[str, object] = {
        "model": info.model,
        "layer": f"{info.layer} {info.site}",
        "lenses": len(pack),
        "hidden layers": widths,
    }
    named = {
        "median_auroc": "held-out AUROC per token, median",
        "median_text_auroc": "held-out AUROC per text, median",
        "control_median_auroc": "… with shuffled labels, per token",
        "control_median_text_auroc": "… with shuffled labels, per text",
    }
    found = {title: f"{value:.3f}" for key, title in named.items() if isinstance(value := notes.get(key), float)}
    return facts | found


def _tree(pack: "Pack", deepest: int | None) -> object:
    from rich.markup import escape
    from rich.tree import Tree

    shown = {"auroc": "AUROC", "text_auroc": "per text", "f1": "F1"}
    root = Tree(escape(pack.info.name))
    places = {}
    for i, concept in enumerate(pack.concepts):
        if deepest is not None and concept.level > deepest:
            continue
        measured = ", ".join(
            f"{title} {concept.metrics[key]:.3f}" for key, title in shown.items() if key in concept.metrics
        )
        trail = pack.hierarchy.parents[i]
        label = escape(concept.name) + (f" [dim]{measured}[/dim]" if measured else "")
        places[i] = (places[trail[0]] if trail else root).add(label)
    return root


# --- watch and report


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


def _events(engine: "SyncEngine", prompt: str, asked: WatchOptions, sampling: "ss.Sampling", wanted: "ss.Watch") -> Any:
    engine.register_pack("pack", asked.pack, any_model=asked.any_model)
    o.check_text(prompt)
    if asked.chat:
        messages = [{"role": "user", "content": prompt}]
        return engine.stream_chat(messages, sampling, watch=wanted, request_id=o.REQUEST)
    return engine.stream(prompt, sampling, watch=wanted, request_id=o.REQUEST)


def _texts(engine: "SyncEngine", generation: "Generation") -> list[str]:
    """Return the text of each token of the prompt and the answer."""
    decode = engine.aio.tokenizer.decode
    return [str(decode([i])) for i in (*generation.prompt_token_ids, *generation.token_ids)]


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
        self._waiting = event.text
        self._fired = []

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

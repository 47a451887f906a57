"""`steerscope generate`: one prompt, optionally steered and captured."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o

if TYPE_CHECKING:
    from steerscope.engines.results import Choice

app = o.command_group()
_SAMPLING = o.sampling_fields(
    "max_tokens temperature top_p top_k min_p repetition_penalty repetition_window seed stop ignore_eos n",
    max_tokens=64,
)


@app.command()
@o.with_fields
def generate(
    model: o.Model,
    prompt: Annotated[str, Argument(help="The text to continue, or with --chat a user's message.")],
    sampling: Annotated[o.Given[ss.Sampling], _SAMPLING],
    engine: o.Engine,
    chat: o.AsChat = False,
    system: o.System = None,
    steer: o.Steer = None,
    capture: Annotated[str | None, Option(help="Layers to capture: 12, 10-14, 4,8 or all.")] = None,
    sites: Annotated[str | None, Option(help="Sites to capture, with commas; default: resid_post.")] = None,
    tokens: Annotated[str | None, Option(help="Tokens to capture, e.g. generated; default: all.")] = None,
    reduce: Annotated[Literal["mean", "last"] | None, Option(help="Keep one row instead of all.")] = None,
    out: Annotated[Path | None, Option(help="File for captured rows (.safetensors).")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Continue a text, or answer a message; --steer changes activations, --capture saves them.

    Example: steerscope generate smollm2-135m "How was your week?" --chat --steer happy.safetensors@19:1.7
    """
    from steerscope.vectors.text import joined, parse

    asked, wanted, messages, *steers = o.together(
        sampling.parse,
        lambda: _capture(capture, sites, tokens, reduce, out),
        lambda: _messages(prompt, chat, system),
        *(partial(parse, text) for text in steer or ()),
    )
    with o.open_engine(model, engine) as loaded:
        specs = {"sampling": asked, "steer": joined(steers), "capture": wanted, "request_id": o.REQUEST}
        events = loaded.stream_chat(messages, **specs) if chat else loaded.stream(prompt, **specs)
        read = o.print_text if asked.n == 1 and not as_json else o.consume
        generation = read(loaded, events)
        if any(choice.finish_reason == "cancelled" for choice in generation.choices):
            raise KeyboardInterrupt
        choices = [_plain(choice, _save(choice, out, asked.n)) for choice in generation.choices]
    if as_json:
        whole = {**choices[0], "prompt_token_ids": generation.prompt_token_ids}
        typer.echo(json.dumps({**whole, "choices": choices} if asked.n > 1 else whole, ensure_ascii=False))
        return
    for choice in generation.choices if asked.n > 1 else ():
        o.note(f"--- choice {choice.index}, seed {choice.seed}")
        typer.echo(choice.text)
    o.note(o.speed(generation))
    for choice, plain in zip(generation.choices, choices, strict=True):
        if choice.capture is not None:
            rows = choice.capture.fetch()
            o.note(f"{plain['capture']}: {len(rows)} × {list(next(iter(rows.tensors.values())).shape)}")


def _messages(prompt: str, chat: bool, system: str | None) -> list[dict[str, str]]:
    o.check_text(prompt, system or "")
    if system is None:
        return [{"role": "user", "content": prompt}]
    if not chat:
        raise o.mistake("--system", "belongs to a chat", "add --chat")
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def _capture(
    layers: str | None, sites: str | None, tokens: str | None, reduce: str | None, out: Path | None
) -> "ss.Capture | None":
    asked = {"layers": layers, "sites": sites and sites.split(","), "tokens": tokens, "reduce": reduce}
    asked = {key: value for key, value in asked.items() if value is not None}
    if layers is None:
        flags = " ".join(f"--{key}" for key in [*asked, *(["out"] if out else [])])
        if flags:
            raise o.mistake(flags, "captures nothing", "add --capture LAYERS")
        return None
    if out is None:
        raise o.mistake("--capture", "has nowhere to put its rows", "add --out rows.safetensors")
    o.check_target(out)
    return ss.Capture.parse(asked)


def _save(choice: "Choice", out: Path | None, n: int) -> str | None:
    """Save captured rows to `out`, or with several choices to rows.0.safetensors and so on."""
    if choice.capture is None or out is None:
        return None
    return str(choice.capture.save(out if n == 1 else out.with_suffix(f".{choice.index}{out.suffix}")))


def _plain(choice: "Choice", file: str | None) -> dict[str, object]:
    keys = ("text", "token_ids", "finish_reason", "stop_string", "seed")
    return {**{key: getattr(choice, key) for key in keys}, "timings": asdict(choice.timings), "capture": file}

"""`steerscope generate`: one prompt, steered and captured as asked."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import steerscope as ss
from steerscope.cli import options as o

if TYPE_CHECKING:
    from steerscope.engines.results import Choice


def generate(
    model: o.Model,
    prompt: Annotated[str, typer.Argument(help="The text to continue, or with --chat a user's message.")],
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.Penalty = 1.0,
    repetition_window: o.Window = None,
    seed: o.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given 4 times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-text token.")] = False,
    n: Annotated[int, typer.Option(help="How many answers.")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send PROMPT as a user's message through the chat template.")
    ] = False,
    system: o.System = None,
    steer: o.Steer = None,
    capture: Annotated[str | None, typer.Option(help="Layers to capture: 12, 10-14, 4,8 or all.")] = None,
    sites: Annotated[str | None, typer.Option(help="Sites to capture, with commas; default resid_post.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to capture, e.g. generated; default all.")] = None,
    reduce: Annotated[Literal["mean", "last"] | None, typer.Option(help="Keep one row instead of all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where captured rows go (.safetensors).")] = None,
    as_json: o.AsJson = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    engine_name: o.EngineName = "hf",
) -> None:
    """Continue a text, or answer a message; --steer changes what the model computes, --capture writes it down.

    Example: steerscope generate smollm2-135m "How was your week?" --chat --steer happy.safetensors@19:1.7
    """
    given = dict(locals())
    from steerscope.cli.steer_args import joined, parse

    sampling, wanted, messages, *steers = o.together(
        lambda: o.sampling(given),
        lambda: _capture(capture, sites, tokens, reduce, out),
        lambda: _messages(prompt, chat, system),
        *(partial(parse, text) for text in steer or ()),
    )
    with o.open_engine(model, device, dtype, engine_name) as engine:
        specs = {"sampling": sampling, "steer": joined(steers), "capture": wanted, "request_id": o.REQUEST}
        events = engine.stream_chat(messages, **specs) if chat else engine.stream(prompt, **specs)
        generation = o.show(engine, events, live=n == 1 and not as_json)
        if any(choice.finish_reason == "cancelled" for choice in generation.choices):
            raise KeyboardInterrupt
        choices = [_plain(choice, _save(choice, out, n)) for choice in generation.choices]
    if as_json:
        whole = {**choices[0], "prompt_token_ids": generation.prompt_token_ids}
        typer.echo(json.dumps({**whole, "choices": choices} if n > 1 else whole, ensure_ascii=False))
        return
    for choice in generation.choices if n > 1 else ():
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
    if out.is_dir() or not out.parent.is_dir():
        raise o.mistake(f"--out {out}", "is a folder, or in none", "name a file in a folder that exists")
    return ss.Capture.parse(asked)


def _save(choice: "Choice", out: Path | None, n: int) -> str | None:
    """rows.safetensors, or rows.0.safetensors and so on when there are several choices."""
    if choice.capture is None or out is None:
        return None
    return str(choice.capture.save(out if n == 1 else out.with_suffix(f".{choice.index}{out.suffix}")))


def _plain(choice: "Choice", file: str | None) -> dict[str, object]:
    keys = ("text", "token_ids", "finish_reason", "stop_string", "seed")
    return {**{key: getattr(choice, key) for key in keys}, "timings": asdict(choice.timings), "capture": file}

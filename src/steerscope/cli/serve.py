"""`steerscope serve`: the OpenAI-compatible server and its page."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steerscope.cli import options as o

if TYPE_CHECKING:
    from steerscope.engines.api import Engine

KEY_VARIABLE = "STEERSCOPE_API_KEY"


def serve(
    model: o.Model = "smollm2-135m",
    engine_name: o.EngineName = "hf",
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine a key is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEY_VARIABLE, help="What clients must send as a bearer token.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    vectors: Annotated[Path | None, typer.Option(help="Folder of vector files, each known by its name.")] = None,
    pack: Annotated[
        list[Path] | None, typer.Option("--pack", "--lens", help="Folder of a lens pack; may be given again.")
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Take packs that were made for another model's name.")
    ] = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    max_batch: o.MaxBatch = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of prompts between steps of running streams; hf only, default: 512."),
    ] = None,
    max_running: Annotated[int, typer.Option(help="Choices that the engine is given at once.")] = 1024,
    max_waiting: Annotated[int, typer.Option(help="Requests that wait for that; more are refused.")] = 1024,
    captures_bytes: Annotated[int, typer.Option(help="Bytes of captured rows that may wait to be fetched.")] = 1 << 30,
    capture_ttl: Annotated[float, typer.Option(help="Seconds after which unfetched rows are dropped.")] = 600.0,
    max_body_bytes: Annotated[int, typer.Option(help="Longest body of a request.")] = 8 << 20,
    max_upload_bytes: Annotated[int, typer.Option(help="Longest vector file.")] = 256 << 20,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Web origin that may call; may be given again.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds that running requests get when the server stops.")] = 30.0,
    log_format: Annotated[Literal["json", "pretty"], typer.Option(help="How lines of the log look.")] = "pretty",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Which lines the log has.")
    ] = "info",
    vllm: Annotated[str | None, typer.Option(help='vLLM\'s own arguments, e.g. {"tensor_parallel_size": 2}.')] = None,
    taps: Annotated[str | None, typer.Option(help='What vLLM is tapped for, e.g. {"layers": "8-12"}.')] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API with steering, captures and readings, and a page at /.

    Example: steerscope serve smollm2-135m --vectors vectors/ --pack demo-report/lenses
    """
    try:
        from steerscope.serving.app import create_app
        from steerscope.serving.logs import set_up
        from steerscope.serving.run import serve_app
        from steerscope.serving.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise o.mistake("serve", f"{error.name} is not installed", "pip install 'steerscope[serve]'") from None
    settings, given, tapped = o.together(
        lambda: ServerSettings.parse(
            {
                "host": host,
                "port": port,
                "api_key": api_key,
                "model_name": name,
                "vectors": None if vectors is None else str(vectors),
                "lenses": [str(folder) for folder in pack or ()],
                "any_model": any_model,
                "captures_bytes": captures_bytes,
                "capture_ttl_s": capture_ttl,
                "max_body_bytes": max_body_bytes,
                "max_upload_bytes": max_upload_bytes,
                "max_running": max_running,
                "max_waiting": max_waiting,
                "cors_origins": cors_origin or (),
                "drain_s": drain,
                "log_format": log_format,
            }
        ),
        lambda: _object("--vllm", vllm),
        lambda: _object("--taps", taps),
    )
    os.environ.pop(KEY_VARIABLE, None)  # not for the engine's processes
    set_up(log_format, log_level)

    def start() -> "Engine":
        from steerscope.engines.load import LoadOptions, load_engine

        tell = app.state.serving.tell

        asked: LoadOptions = {"engine": engine_name, "device": device, "dtype": dtype, "capture_budget": captures_bytes}
        asked["progress"] = tell
        if max_batch is not None:
            asked["max_batch"] = max_batch
        if prefill_chunk is not None:
            asked["prefill_chunk"] = prefill_chunk
        if engine_name == "vllm":
            asked |= {"vllm": given, "taps": tapped}
        return load_engine(model, **asked)

    app = create_app(start, settings)
    serve_app(app)


def _object(option: str, text: str | None) -> dict[str, object]:
    from steerscope.specs.errors import not_json

    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise o.mistake(option, not_json(error), 'write {"name": value}') from None
    if not isinstance(found, dict):
        raise o.mistake(option, "is not a JSON object", 'write {"name": value}')
    return found

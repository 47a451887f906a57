"""`steerscope serve`: the OpenAI-compatible server and its page."""

import json
import os
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from steerscope.cli import options as o
from steerscope.serving.settings import ServerSettings

if TYPE_CHECKING:
    from steerscope.engines.api import Engine

KEY_VARIABLE = "STEERSCOPE_API_KEY"
app = o.command_group()
_SETTINGS = (
    "host port model_name vectors lenses any_model captures_bytes capture_ttl_s max_body_bytes max_upload_bytes "
    "max_running max_waiting cors_origins drain_s log_format"
)
_NAMES = {
    "model_name": ("--name",),
    "lenses": ("--pack", "--lens"),
    "capture_ttl_s": ("--capture-ttl",),
    "cors_origins": ("--cors-origin",),
    "drain_s": ("--drain",),
}


@app.command()
@o.with_fields
def serve(
    settings: Annotated[
        o.Given[ServerSettings], o.Fields(ServerSettings, _SETTINGS, names=_NAMES, captures_bytes=1 << 30)
    ],
    engine: o.ServerEngine,
    model: o.Model = "smollm2-135m",
    api_key: Annotated[
        str | None, Option(envvar=KEY_VARIABLE, help=ServerSettings.model_fields["api_key"].description)
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Option(help="Lowest level of the log.")
    ] = "info",
    vllm: Annotated[str | None, Option(help='vLLM\'s arguments, e.g. {"tensor_parallel_size": 2}.')] = None,
    taps: Annotated[str | None, Option(help='What vLLM taps, e.g. {"layers": "8-12"}.')] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API with steering, captures and readings, and a page at /.

    Example: steerscope serve smollm2-135m --vectors vectors/ --pack demo-report/lenses
    """
    try:
        from steerscope.serving.app import create_app
        from steerscope.serving.logs import set_up
        from steerscope.serving.run import serve_app
    except ModuleNotFoundError as error:
        raise o.mistake("serve", f"{error.name} is not installed", "pip install 'steerscope[serve]'") from None
    server, asked, given, tapped = o.together(
        lambda: settings.parse(api_key=api_key),
        engine.parse,
        lambda: _object("--vllm", vllm),
        lambda: _object("--taps", taps),
    )
    os.environ.pop(KEY_VARIABLE, None)  # hidden from the engine's processes
    set_up(server.log_format, log_level)

    def start() -> "Engine":
        from steerscope.engines.load import load_engine

        options = o.load_options(asked, served.state.serving.tell)
        options["capture_budget"] = server.captures_bytes
        if asked.engine == "vllm":
            options |= {"vllm": given, "taps": tapped}
        return load_engine(model, **options)

    served = create_app(start, server)
    serve_app(served)


def _object(option: str, text: str | None) -> dict[str, object]:
    from steerscope.specs.errors import not_json

    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise o.mistake(option, not_json(error), 'write {"name": value}') from None
    if not isinstance(found, dict):
        raise o.mistake(option, "is not a JSON object", 'write {"name": value}')
    return found

"""`steerscope chat`: a conversation in the terminal or from a pipe, steered as it goes."""

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o
from steerscope.cli.fields import Given, with_fields
from steerscope.cli.partners import EnginePartner, Partner, ServerPartner

if TYPE_CHECKING:
    from steerscope.vectors.steering_text import SteerArg

app = o.command_group()
_SAMPLING = o.sampling_fields(
    "max_tokens temperature top_p top_k min_p repetition_penalty repetition_window seed", max_tokens=256
)
_HELP = """\
/steer FILE[@LAYERS] SCALE   add a vector, or change one by its file or name; 0 removes it
/unsteer                     remove all vectors
/capture LAYERS              capture the next answers; without layers: stop
/save FILE                   write the rows of the last answer, or of the next if there are none
/system TEXT                 set the system message; without text: remove it
/clear                       forget the conversation
/quit                        exit (or Ctrl-D); Ctrl-C stops an answer"""


@app.command()
@with_fields
def chat(
    sampling: Annotated[Given[ss.Sampling], _SAMPLING],
    engine: o.Engine,
    model: Annotated[str | None, Argument(help="smollm2-135m, a model directory, or a hub id.")] = None,
    server: Annotated[str | None, Option(help="Address of a `steerscope serve` to use instead.")] = None,
    system: o.System = None,
    steer: o.Steer = None,
) -> None:
    """Talk to a model in the terminal; /help lists the commands inside the chat."""
    from steerscope.vectors.steering_text import parse

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(ss.Client(server, model=model)) if server is not None else None
        known = [one["id"] for one in client.vectors()] if client else []
        asked, _, *steers = o.together(
            sampling.parse,
            lambda: _check(server, model, engine),
            *(partial(parse, text, known) for text in steer or ()),
        )
        if client is not None:
            partner: Partner = ServerPartner(client, asked, known)
        else:
            loaded = stack.enter_context(o.open_engine(model or "", engine))
            if not getattr(loaded.aio.tokenizer, "chat_template", None):
                raise o.mistake(model or "", "has no chat template", "use steerscope generate")
            partner = EnginePartner(loaded, asked)
        session = _Session(partner, system)
        session.set_steers(steers)
        session.run()


def _check(server: str | None, model: str | None, engine: Given[o.EngineOptions]) -> None:
    if server is None and model is None:
        raise o.mistake("MODEL", "is missing", "name a model, or a server with --server URL")
    local = {name: value for name, value in engine.values.items() if (name, value) != ("engine", "hf")}
    if server is not None and local:
        flags = " ".join(f"--{name}" for name in local)
        raise o.mistake(flags, "cannot be combined with --server", "leave it out")


class _Session:
    """The conversation, steering and capture that the next answer depends on."""

    def __init__(self, partner: Partner, system: str | None) -> None:
        self.partner, self.system = partner, system
        self.history: list[dict[str, str]] = []
        self.steers: list[SteerArg] = []
        self.rows: ss.Rows | None = None  # of the last answer
        self.save_to: str | None = None  # file for the rows of the next one

    def run(self) -> None:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (gives input() a history)
            o.note("/help lists the commands")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
                if line == "/quit":
                    return
                if line:
                    self.command(line) if line.startswith("/") else self.answer(line)
            except EOFError:
                return
            except Exception as error:
                lines = o.mistakes_of(error)
                if not lines:
                    raise
                o.note("\n".join(f"error: {line}" for line in lines))

    def command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        match name, text.strip():
            case "/steer", text if text:
                self.steer(text)
            case "/unsteer", "":
                self.set_steers([])
            case "/capture", layers:
                self.capture(layers)
            case "/save", file if file:
                self.save(file)
            case "/system", text:
                self.system = text or None
            case "/clear", "":
                self.history = []
            case _:
                o.note(_HELP if name == "/help" else f"cannot read {line!r}; the commands are\n{_HELP}")

    def answer(self, text: str) -> None:
        start = [{"role": "system", "content": self.system}] if self.system is not None else []
        asked = [*self.history, {"role": "user", "content": text}]
        o.check_text(*(message["content"] for message in start + asked))
        said = self.partner.answer(start + asked)
        self.history = [*asked, {"role": "assistant", "content": said.text}]
        o.note(said.note)
        self.rows = said.rows
        if self.rows is not None:
            tensors = self.rows.tensors.items()
            cells = ((str(k), site, str(len(t)), f"{t.float().mean(0).norm():.4g}") for (k, site), t in tensors)
            o.table(("layer", "site", "rows", "norm of mean"), cells, err=True)
            if self.save_to:
                self.save(self.save_to)

    def steer(self, text: str) -> None:
        from steerscope.vectors.steering_text import parse

        *words, strength = text.rsplit(maxsplit=1)
        file = words[0] if words else strength
        name, at, layers = file.rpartition("@") if "@" in file else (file, "", None)
        known = next((arg for arg in self.steers if name in (arg.path, arg.name)), None)
        if known:
            layers = layers if at else known.layers
            file = f"{known.path}@{layers}" if layers else known.path
        new = parse(f"{file}:{strength}" if words else file, self.partner.vectors)
        off = all(isinstance(op, ss.Add) and op.scale == 0 for op in new.steering.ops)
        self.set_steers([arg for arg in self.steers if arg.path != new.path] + ([] if off else [new]))

    def set_steers(self, steers: "list[SteerArg]") -> None:
        from steerscope.vectors.steering_text import joined

        self.partner.steer(joined(steers))
        self.steers = steers

    def capture(self, layers: str) -> None:
        self.partner.capture(ss.Capture.parse({"layers": layers}) if layers else None)

    def save(self, file: str) -> None:
        self.save_to = file if self.rows is None else None
        if self.rows is not None:
            o.note(f"saved to {self.rows.save(file)}")

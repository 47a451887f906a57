"""`steerscope chat`: a conversation in the terminal or from a pipe, steered as it goes."""

import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

import steerscope as ss
from steerscope.cli import options as o

if TYPE_CHECKING:
    from steerscope.client import Client
    from steerscope.engines.sync import SyncEngine
    from steerscope.vectors.text import SteerArg

Messages = list[dict[str, str]]
app = o.command_group()
_SAMPLING = o.sampling_fields(
    "max_tokens temperature top_p top_k min_p repetition_penalty repetition_window seed", max_tokens=256
)
_TRIAL: Messages = [{"role": "user", "content": "."}]
_HELP = """\
/steer FILE[@LAYERS] SCALE   add a vector, or change one by its file or name; 0 removes it
/unsteer                     remove all vectors
/capture LAYERS              capture the next answers; without layers: stop
/save FILE                   write the rows of the last answer, or of the next if there are none
/system TEXT                 set the system message; without text: remove it
/clear                       forget the conversation
/quit                        exit (or Ctrl-D); Ctrl-C stops an answer"""


@app.command()
@o.with_fields
def chat(
    sampling: Annotated[o.Given[ss.Sampling], _SAMPLING],
    engine: o.Engine,
    model: Annotated[str | None, Argument(help="smollm2-135m, a model directory, or a hub id.")] = None,
    server: Annotated[str | None, Option(help="Address of a `steerscope serve` to use instead.")] = None,
    system: o.System = None,
    steer: o.Steer = None,
) -> None:
    """Talk to a model in the terminal; /help lists the commands inside the chat."""
    from steerscope.vectors.text import parse

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(ss.Client(server, model=model)) if server is not None else None
        known = [one["id"] for one in client.vectors()] if client else []
        asked, _, *steers = o.together(
            sampling.parse,
            lambda: _check(server, model, engine),
            *(partial(parse, text, known) for text in steer or ()),
        )
        if client is not None:
            session = _Session(client, partial(_answer_of_server, client), asked, system, known)
        else:
            loaded = stack.enter_context(o.open_engine(model or "", engine))
            if not getattr(loaded.aio.tokenizer, "chat_template", None):
                raise o.mistake(model or "", "has no chat template", "use steerscope generate")
            session = _Session(loaded, partial(_answer_here, loaded), asked, system, known)
        session.set_steers(steers)
        session.run()


def _check(server: str | None, model: str | None, engine: o.Given[o.EngineOptions]) -> None:
    if server is None and model is None:
        raise o.mistake("MODEL", "is missing", "name a model, or a server with --server URL")
    local = {name: value for name, value in engine.values.items() if (name, value) != ("engine", "hf")}
    if server is not None and local:
        flags = " ".join(f"--{name}" for name in local)
        raise o.mistake(flags, "cannot be combined with --server", "leave it out")


class _Shown(NamedTuple):
    """An answer that has been shown."""

    text: str
    note: str
    rows: "ss.Rows | None"


def _answer_here(engine: "SyncEngine", messages: Messages, sampling: "ss.Sampling", **asked: Any) -> _Shown:
    events = engine.stream_chat(messages, sampling, **asked, request_id=o.REQUEST)
    done = o.print_text(engine, events)
    return _Shown(done.text, o.speed(done), done.rows if done.capture else None)


def _answer_of_server(client: "Client", messages: Messages, sampling: "ss.Sampling", **asked: Any) -> _Shown:
    from steerscope.client import Answer

    began = time.perf_counter()
    text = ""
    n_tokens = 0
    answer: Answer | None = None
    # After Ctrl-C the text so far is the answer; closing the stream ends the request.
    with (
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(client.stream_chat(messages, sampling, **asked)) as pieces,
    ):
        for piece in pieces:
            if isinstance(piece, Answer):
                answer = piece
                break
            typer.echo(piece.text, nl=False)
            text += piece.text
            n_tokens += len(piece.tokens)
    typer.echo()
    note = o.speed_of(n_tokens, time.perf_counter() - began, answer.finish_reason if answer else "cancelled")
    if answer is None or answer.capture is None:
        return _Shown(text, note, None)
    rows = client.rows(answer.capture)
    client.forget(answer.capture)
    return _Shown(text, note, rows)


class _Session:
    """The conversation, steering and capture that the next answer depends on."""

    def __init__(
        self,
        partner: "SyncEngine | Client",
        answer: Callable[..., _Shown],
        sampling: "ss.Sampling",
        system: str | None,
        vectors: list[str],
    ) -> None:
        self.partner = partner
        self.show_answer = answer
        self.sampling = sampling
        self.system = system
        self.vectors = vectors
        self.history: Messages = []
        self.steers: list[SteerArg] = []
        self.asked: dict[str, Any] = {"steer": ss.Steering(), "capture": None}
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
        said = self.show_answer(start + asked, self.sampling, **self.asked)
        self.history = [*asked, {"role": "assistant", "content": said.text}]
        o.note(said.note)
        self.rows = said.rows
        if self.rows is not None:
            tensors = self.rows.tensors.items()
            cells = ((str(k), site, str(len(t)), f"{t.float().mean(0).norm():.4g}") for (k, site), t in tensors)
            o.table(("layer", "site", "rows", "norm of mean"), cells, err=True)
            if self.save_to:
                self.save(self.save_to)

    def try_out(self, **asked: Any) -> None:
        """Send a request of one token, which refuses steering and captures that do not fit the model."""
        rows: Any = self.partner.chat(_TRIAL, ss.Sampling(max_tokens=1), **asked).capture
        if rows is not None:
            self.partner.forget(rows) if isinstance(self.partner, ss.Client) else rows.close()

    def steer(self, text: str) -> None:
        from steerscope.vectors.text import parse

        *words, strength = text.rsplit(maxsplit=1)
        file = words[0] if words else strength
        name, at, layers = file.rpartition("@") if "@" in file else (file, "", None)
        known = next((arg for arg in self.steers if name in (arg.path, arg.name)), None)
        if known:
            layers = layers if at else known.layers
            file = f"{known.path}@{layers}" if layers else known.path
        new = parse(f"{file}:{strength}" if words else file, self.vectors)
        off = all(isinstance(op, ss.Add) and op.scale == 0 for op in new.steering.ops)
        self.set_steers([arg for arg in self.steers if arg.path != new.path] + ([] if off else [new]))

    def set_steers(self, steers: "list[SteerArg]") -> None:
        from steerscope.vectors.text import joined

        steering = joined(steers)
        if steering.ops:
            self.try_out(steer=steering)
        self.asked["steer"] = steering
        self.steers = steers

    def capture(self, layers: str) -> None:
        wanted = ss.Capture.parse({"layers": layers}) if layers else None
        if wanted is not None:
            self.try_out(capture=wanted)
        self.asked["capture"] = wanted

    def save(self, file: str) -> None:
        self.save_to = file if self.rows is None else None
        if self.rows is not None:
            o.note(f"saved to {self.rows.save(file)}")

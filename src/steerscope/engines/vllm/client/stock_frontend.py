"""vLLM's own front ends — `LLM`, `AsyncLLM`, the OpenAI server — for requests that carry a steerscope entry.

Four methods of vLLM are wrapped in the process that takes requests. What a request asks in
`extra_args["steerscope"]` (a dict, or JSON text as `vllm_xargs` brings it) is judged when its prompt is processed, so
that a wrong one is an error of the caller; it is sent to the workers when it is queued; and when a text ends, its rows
hang on vLLM's own output. The engine class of this package takes the same road with its own bookkeeping.
"""

import copy
import functools
import json
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from steerscope.capture.budget import ByteBudget, Reservation
from steerscope.capture.handle import CaptureHandle
from steerscope.capture.reserved import ReservedFile
from steerscope.capture.rows import Rows
from steerscope.capture.transport import MET, Regions
from steerscope.core.slot_table import Key
from steerscope.engines.plan import Plan, Planner, Prompt
from steerscope.engines.sequence import captured
from steerscope.engines.vllm.client.capacity import Allocation, Capacity, new_arena
from steerscope.engines.vllm.guards import facts_of, layer_count
from steerscope.engines.vllm.settings import NAME, VLLMSettings, asked_for
from steerscope.engines.vllm.wire import OVERFLOW
from steerscope.engines.vllm.wrap import wrap
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.errors import CapacityExceeded, InvalidRequest, NameInUse, Problem, RequestFailed
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Steering, VectorData

log = logging.getLogger("steerscope")
_ARRIVE_S = 60.0
FRONTS: "weakref.WeakSet[Front]" = weakref.WeakSet()
_TTL_S = 600.0


class RequestEntry(Spec):
    """The entry of one request."""

    steer: Steering = Steering()
    capture: Capture | None = None
    watch: Any = None  # known by its name, so that it can be refused by it
    save_as: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")  # under settings.captures


@dataclass
class Saves:
    """What the requests of one HTTP call save, for its answer."""

    files: list[ReservedFile] = field(default_factory=list)
    refused: NameInUse | None = None


SAVES: ContextVar[Saves | None] = ContextVar("saves", default=None)


class Front:
    def __init__(self, config: Any, settings: VLLMSettings) -> None:
        self.settings = settings
        self.facts = facts_of(config, settings)
        self.vectors = named(settings.vectors)
        self.budget = ByteBudget(settings.capture_budget, 0.0)
        self.arena = new_arena(settings.capture_budget)
        self._named = True  # its file has a name until every stage has mapped it
        stage = stages_of(config, settings)
        self.capacity = Capacity(self.facts, config.model_config.dtype, settings, stage, Regions(self.arena))
        self.saver = ThreadPoolExecutor(1, "steerscope-save")
        FRONTS.add(self)

    def __del__(self) -> None:
        if hasattr(self, "arena"):  # else there was no memory for it
            self.arena.unlink()

    def ticket(self, request: Any, given: object) -> "Ticket":
        """A request that vLLM has accepted, judged. Raises InvalidRequest."""
        text = isinstance(given, str | bytes)  # as it comes over HTTP
        asked = RequestEntry.from_json(given) if text else RequestEntry.parse(given)  # type: ignore[arg-type]
        ids = request.prompt_token_ids
        params = request.sampling_params
        if ids is None or getattr(request, "resumable", False):
            what = "its tokens are not all known now"
            raise InvalidRequest([Problem("prompt", what, "send one complete prompt of text or tokens")])
        planner = Planner(self.facts, self.vectors)
        planner.problems += _problems(asked, text, self.settings.captures)
        most = self.facts.context - len(ids) if self.facts.context else params.max_tokens
        sampling = Sampling(max_tokens=max(1, min(params.max_tokens, most)))
        with ExitStack() as undo:
            files: list[ReservedFile] = []
            taken: InvalidRequest | None = None
            try:
                files = self._reserve(asked, params.n, undo)
            except InvalidRequest as error:
                taken = error
                planner.problems += error.problems
            try:
                plan = planner.plan(request.request_id, Prompt(list(ids)), sampling, asked.steer, asked.capture)
            except InvalidRequest as error:
                raise taken if taken and error.problems == taken.problems else error from None
            ticket = Ticket(plan, self._texts(plan, files, params.n))
            undo.pop_all()
            return ticket

    def _reserve(self, asked: RequestEntry, n: int, undo: ExitStack) -> list[ReservedFile]:
        """Reserve the files of a request's texts."""
        files: list[ReservedFile] = []
        for i in range(n if asked.save_as and asked.capture and self.settings.captures else 0):
            name = asked.save_as if n == 1 else f"{asked.save_as}-{i}"
            files.append(ReservedFile(Path(str(self.settings.captures)) / f"{name}.safetensors"))
            undo.callback(files[-1].release)
        return files

    def _texts(self, plan: Plan, files: list[ReservedFile], n: int) -> "list[Text]":
        texts: list[Text] = []
        try:
            for i in range(n if plan.columns or plan.capture else 0):
                texts.append(Text(self, plan, files[i] if files else None))
        except CapacityExceeded as error:
            texts.clear()
            raise InvalidRequest([Problem("", str(error), "send it again when others have ended")]) from None
        return texts

    def unlink_when_mapped(self, allocation: Allocation) -> None:
        """Remove the file's name once every stage has mapped it: no process that dies then leaves it behind."""
        region = allocation.region
        if self._named and region is not None and all(region.counters[MET + stage] for stage in region.stages):
            self.arena.unlink()
            self._named = False


def _problems(asked: RequestEntry, text: bool, captures: str | None) -> list[Problem]:
    """Return what stands against a request, which came as `text`, where rows are saved in the folder `captures`."""
    found: list[Problem] = []
    if asked.watch is not None:
        what = "vLLM's own front ends have no way to tell what lenses read"
        found.append(Problem("watch", what, "use steerscope's engine"))
    if asked.capture and asked.capture.reduce:
        what = "vLLM's own front ends do not tell the workers where a text really ended"
        found.append(Problem("capture.reduce", what, "reduce the rows yourself, or use steerscope's engine"))
    if asked.save_as and not captures:
        found.append(Problem("save_as", "the server has no folder for captures", "start it with the setting captures"))
    elif asked.save_as and asked.capture is None:
        found.append(Problem("save_as", "there is nothing to save", "add capture"))
    elif text and asked.capture and not asked.save_as:
        found.append(Problem("save_as", "over HTTP the rows of a capture need a name", "add save_as"))
    return found


@dataclass
class Ticket:
    """One request, between its acceptance and its queueing, and its texts."""

    plan: Plan
    texts: "list[Text]"


class Text:
    """One text of a request, until its end. Its slots and memory come back when it is garbage-collected."""

    def __init__(self, front: Front, plan: Plan, file: ReservedFile | None) -> None:
        self.front = front
        self.plan = plan
        self.file = file
        self.held: Reservation | None = None
        self.allocation = Allocation(self.front.capacity, self.plan)
        if size := self.allocation.shared.n_bytes:
            self.held = self.front.budget.take(size)
            if self.held is None:
                raise CapacityExceeded(f"captures hold the whole budget of {self.front.budget.total >> 20} MiB")
        self.allocation.take()

    def entry(self, name: str) -> dict[str, Any]:
        return self.allocation.entry(name, arena=(str(self.front.arena.path), self.front.arena.size))

    def end(self, token_ids: list[int]) -> CaptureHandle | None:
        """vLLM has finished it."""
        self.front.unlink_when_mapped(self.allocation)
        self.allocation.release()
        if self.plan.capture is None or self.held is None:
            return None
        history = [*self.plan.prompt.token_ids, *token_ids]
        count = self.plan.capture.positions.count(len(history) - 1)
        held = self.held
        self.held = None
        load = functools.partial(self._load, history, held)
        handle = CaptureHandle(self.plan.request_id, count, load, self.front.budget, held, _TTL_S)
        if self.file is not None:
            self.file.write_in(self.front.saver, handle)
            self.file = None  # the name is free when it is written
        return handle

    def drop_file(self) -> None:
        """Free the name of a text that did not end as it should."""
        if self.file is not None:
            self.file.release()
            self.file = None

    def _load(self, history: list[int], held: Reservation) -> Rows:
        """Wait for the last rows, which come with the engine's next step, or its last."""
        assert self.plan.capture is not None
        count = self.plan.capture.positions.count(len(history) - 1)
        deadline = time.monotonic() + _ARRIVE_S
        while self.allocation.arrived() < count and self.allocation.failure is None and time.monotonic() < deadline:
            drain_here(str(self.front.arena.path))
            if self.allocation.left() and self.allocation.arrived() < count:
                break
            time.sleep(0.001)
        if (why := self.allocation.failure) is not None:
            raise RequestFailed(f"{self.plan.request_id} failed: {why}")
        columns, _, size = self.allocation.hand_over(len(history) - 1)
        held.shrink(size)
        return captured(self.plan, len(history) - 1, columns, history, self.front.facts.name)

    def __del__(self) -> None:
        self.drop_file()
        if self.held is not None:
            self.held.release()
        if hasattr(self, "allocation"):
            self.allocation.withdraw()


def named(folder: str | None) -> Mapping[str, VectorData]:
    if folder is None:
        return {}
    from steerscope.vectors.files import VectorFolder  # with all readers of files

    return VectorFolder(folder)


def drain_here(arena: str) -> None:
    """Let workers in this process deliver their last rows: no step runs when the last text has ended."""
    from steerscope.engines.vllm.worker.worker import LOCAL_WORKERS

    for taps in list(LOCAL_WORKERS):
        taps.settle_idle(arena)


def stages_of(config: Any, settings: VLLMSettings) -> dict[Key, int]:
    """The pipeline stage of each tap, as vLLM divides the layers."""
    from vllm.distributed.utils import get_pp_indices

    size = config.parallel_config.pipeline_parallel_size
    count = layer_count(config)
    parts = [range(*get_pp_indices(count, rank, size)) for rank in range(size)]
    return {key: next(s for s, part in enumerate(parts) if key[0] in part) for key in settings.keys(count)}


# --- vLLM's methods

_lock = threading.Lock()


def front_of(processor: Any) -> Front | None:
    """The front of vLLM's input processor, made with its first request that asks; None where the engine has no taps."""
    with _lock:
        if not hasattr(processor, "steerscope"):
            settings = asked_for(processor.vllm_config)
            processor.steerscope = None if settings is None else Front(processor.vllm_config, settings)
        return processor.steerscope


def entry_of(request: Any) -> Any:
    return None if request.sampling_params is None else (request.sampling_params.extra_args or {}).get(NAME)


def process_inputs(inner: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    request = inner(self, *args, **kwargs)
    params = request.sampling_params
    given = entry_of(request)
    if given is None:
        return request
    front = front_of(self)
    if front is None:
        what = "this engine was started without taps"
        raise refusal([Problem(NAME, what, "start it with STEERSCOPE=1 or additional_config")])
    saves = SAVES.get() or Saves()
    try:
        ticket = front.ticket(request, given)
    except InvalidRequest as error:
        kind = NameInUse if isinstance(error, NameInUse) else InvalidRequest
        refused = refusal([problem.under(NAME) for problem in error.problems], kind)
        if isinstance(refused, NameInUse):
            saves.refused = refused
        raise refused from None
    saves.files += [text.file for text in ticket.texts if text.file is not None]
    params.extra_args = {**params.extra_args, NAME: ticket}
    shared = front.capacity.shared(ticket.plan)
    own = front.capacity.salts.of(shared)
    if own is not None:
        request.cache_salt = own if request.cache_salt is None else json.dumps([request.cache_salt, own])
    if not shared.reads_cached:
        params.skip_reading_prefix_cache = True
    return request


def refusal(problems: list[Problem], kind: type[InvalidRequest] = InvalidRequest) -> InvalidRequest:
    """An error that vLLM takes for the caller's: newer versions have a class for these, to older ones any ValueError
    is one."""
    from vllm import exceptions

    known = getattr(exceptions, "VLLMClientError", None)
    return kind(problems) if known is None else type("Refusal", (kind, known), {})(problems)


def add_request(inner: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    params = request.sampling_params
    ticket = entry_of(request)
    if not isinstance(ticket, Ticket):
        return inner(self, request, *args, **kwargs)
    text = ticket.texts.pop(0) if ticket.texts else None
    request.sampling_params = copy.copy(params)  # the texts of one request share it
    extra = {name: value for name, value in params.extra_args.items() if name != NAME}
    request.sampling_params.extra_args = extra if text is None else {**extra, **text.entry(request.request_id)}
    result = inner(self, request, *args, **kwargs)
    self.request_states[request.request_id].steerscope = text
    return result


def process_outputs(inner: Any, self: Any, outputs: list, *args: Any, **kwargs: Any) -> Any:
    """A text that the workers gave up ends with an error, and ends in the engine too."""
    if not any(front.arena.failures for front in FRONTS):
        return inner(self, outputs, *args, **kwargs)
    from vllm.v1.engine import FinishReason

    stopped = []
    for output in outputs:
        text = getattr(self.request_states.get(output.request_id), "steerscope", None)
        if text is not None and (why := text.allocation.failure) is not None:
            log.error("%s failed: %s", text.plan.request_id, why)
            if why == OVERFLOW:
                text.front.capacity.salts.spoil(text.allocation.shared)
            stopped += [] if output.finished else [output.request_id]
            output.finish_reason = FinishReason.ERROR
            output.stop_reason = why
    result = inner(self, outputs, *args, **kwargs)
    result.reqs_to_abort.extend(stopped)
    return result


def new_completion_output(inner: Any, self: Any, token_ids: list, finish_reason: Any, *args: Any, **kwargs: Any) -> Any:
    completion = inner(self, token_ids, finish_reason, *args, **kwargs)
    text = getattr(self, "steerscope", None)
    if text is None or finish_reason is None:
        return completion
    if finish_reason.name not in ("ABORT", "ERROR") and text.allocation.failure is None:
        completion.steerscope = text.end(list(self.detokenizer.output_token_ids))
    else:
        text.drop_file()
    return completion


def install() -> None:
    """Wrap vLLM's methods; for engines without taps they do what they did."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    for owner, name, wrapper in (
        (InputProcessor, "process_inputs", process_inputs),
        (OutputProcessor, "add_request", add_request),
        (OutputProcessor, "process_outputs", process_outputs),
        (RequestState, "_new_completion_output", new_completion_output),
    ):
        wrap(owner, name, wrapper)

"""HFEngine: continuous batching over a transformers model, in a thread of its own.

Between two steps requests join (prefilled together, then copied into the batch's cache) and leave; every request in
the batch has its own steering, capture, sampling and seed. Captured rows are staged per forward and written to each
request's buffer; a request that fails ends alone.
"""

import contextlib
import inspect
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as transformers_logging

from steerscope.capture.budget import ByteBudget
from steerscope.engines.generation import Job
from steerscope.engines.hf.blocks import find_blocks
from steerscope.engines.hf.kv import BatchCache
from steerscope.engines.hf.passes import Passes, deliver
from steerscope.engines.hf.sampler import choose, log_probabilities
from steerscope.engines.hf.selftest import self_test
from steerscope.engines.hf.sequence import Row
from steerscope.engines.hf.taps import Taps
from steerscope.engines.hf.watching import read
from steerscope.engines.outbox import together
from steerscope.engines.plan import Facts, Plan
from steerscope.engines.text import Decoder
from steerscope.engines.threaded import ThreadedEngine
from steerscope.lenses.monitor import Monitor
from steerscope.lenses.reader import Registered
from steerscope.models import check_adapter
from steerscope.residual.table import SlotTable
from steerscope.specs.errors import (
    CapacityExceeded,
    InvalidRequest,
    ModelNotFound,
    Problem,
    RequestFailed,
    Unsteerable,
    UnsupportedModel,
)

_PREFILL_TOKENS = 8192  # padded tokens of one prefill forward


class HFEngine(ThreadedEngine[Row]):
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        max_batch: int = 32,
        max_columns: int = 16,
        slots: int = 128,
        capture_budget: int = 4 << 30,
        capture_wait: float = 60.0,
        capture_ttl: float = 600.0,
    ) -> None:
        super().__init__(ByteBudget(capture_budget, capture_wait))
        _check_options(max_batch, max_columns, slots, capture_budget, capture_ttl)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.capture_ttl, self.max_batch, self.dtype = capture_ttl, max_batch, model.dtype
        self.device = model.device
        config = model.config.get_text_config(decoder=True)
        blocks = find_blocks(model)
        self.facts = Facts(
            name=name or model.config.name_or_path or type(model).__name__,
            layers=len(blocks),
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            context=_context(config),
            max_columns=max_columns,
            refused_sites=blocks.refused,
            watches=True,
        )
        self._table = SlotTable(config.hidden_size, slots, model.device)
        self._taps = Taps(blocks, self._table)
        self.monitor = Monitor(model.device, slots=max_batch)
        self._taps.gates = self.monitor.rules.gates
        self._passes = Passes(self._table, config.hidden_size, model.dtype)
        self._decoder = Decoder(tokenizer)  # type: ignore[arg-type]
        self.eos = _eos_ids(model, tokenizer)
        # Only the last column's logits are needed; a model that cannot leave the others out computes them all.
        can_skip = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if can_skip else {}
        self._cache = BatchCache(len(blocks))
        self._rows: list[Row] = []
        self._joining: list[Row] = []  # admitted, not yet prefilled
        self._counts |= {"prefills": 0, "rows": 0, "readings": 0, "lens_seconds": 0.0}
        self_test(model, self._taps, self._table)
        self._run()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        **options: int | float | str | None,
    ) -> "HFEngine":
        """Load a directory or hub id. The default dtype is float32 on CPU and the checkpoint's own elsewhere."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        chosen = dtype or ("float32" if device == "cpu" else "auto")
        try:
            with no_bars():
                check_adapter(model)
                tokenizer = AutoTokenizer.from_pretrained(model)
                loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=chosen)
        except UnsupportedModel:
            raise
        except Exception as error:  # transformers and its readers raise all sorts for a bad path, file or dtype
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelNotFound(f"cannot load {model}: {reason}") from error
        placed = hasattr(loaded, "hf_device_map") or hasattr(loaded.config, "quantization_config")
        try:
            if not placed:
                loaded.to(device)  # type: ignore[arg-type]
        except (RuntimeError, AssertionError) as error:  # torch raises either for a device it does not have
            reason = str(error).strip().splitlines()[0]
            raise UnsupportedModel(f"cannot put {model} on device {device!r}: {reason}") from error
        return cls(loaded, tokenizer, **{"name": str(model), **options})  # type: ignore[arg-type]

    # --- the Engine's side (any thread)

    def _row_bytes(self, plan: Plan) -> int:
        if plan.capture is None:
            return 0
        size = 4 if plan.capture.spec.reduce else self.model.dtype.itemsize
        return plan.capture.rows(plan.most_rows) * len(plan.capture.keys) * self.facts.hidden * size

    def _keep_pack(self, registered: Registered) -> None:
        self._call(lambda: self.monitor.keep(registered))

    def _drop_pack(self, registered: Registered) -> None:
        self._call(lambda: self.monitor.drop(registered))

    def stats(self) -> dict[str, float]:
        now = {"running": len(self._rows), "waiting": len(self._waiting), "slots_in_use": self._table.in_use}
        now["packs"] = len(self.monitor)
        return {**self._counts, **now, **self.budget.stats()}

    # --- the thread

    def _loop(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        going = True
        while going:
            try:
                with torch.no_grad():
                    going = self._step()
            except Exception as error:  # a fault of ours: whoever is in the batch is told, the engine goes on
                # With nobody in the batch, the first in the queue is to blame: else this would go round for ever.
                for row in self._clear() or self._waiting[:1]:
                    self._failed(row, error)
                self._waiting = [row for row in self._waiting if not row.over]
        for row in self._clear():
            row.end("cancelled")
        self._drop_waiting(cancelled_only=False)
        # What the engine held is given back even while somebody keeps the closed engine itself.
        self.monitor.close()
        del self.model, self._taps, self._passes

    def _step(self) -> bool:
        going = self._receive()
        if going:
            self._drop_cancelled()
            self._admit()
            self._decode()
        return going

    def _clear(self) -> list[Row]:
        """Empty the batch; those who wait for a place keep waiting."""
        rows = list(dict.fromkeys([*self._rows, *self._joining]))
        self._rows, self._joining = [], []
        self._cache = BatchCache(self.facts.layers)
        return rows

    def _sequence(self, job: Job) -> Row:
        return Row(job, self._decoder, self.eos, self)

    def _busy(self) -> bool:
        if not self._rows and not self._waiting:
            self._taps.attach(())  # the model is left as it was found
        return bool(self._rows)

    def _drop_cancelled(self) -> None:
        self._drop_waiting(cancelled_only=True)
        for row in [row for row in self._rows if row.job.cancelled]:
            self._leave(row)
            row.end("cancelled")

    def _admit(self) -> None:
        """Let waiting requests in, in order, while there is room in the batch and in the slot table."""
        joining = self._joining
        while self._waiting and len(self._rows) + len(joining) < self.max_batch:
            row = self._waiting[0]
            try:
                row.lease(self._table)
            except CapacityExceeded as error:
                if self._rows or joining:
                    break  # somebody will finish and free slots
                self._failed(self._waiting.pop(0), error)
                continue
            except Exception as error:  # no memory for its rows: its own trouble
                self._failed(self._waiting.pop(0), error)
                continue
            joining.append(self._waiting.pop(0))
        while joining:
            longest, group = 0, 0
            for group, row in enumerate(joining, 1):
                longest = max(longest, row.prompt_length)
                if group * longest > _PREFILL_TOKENS and group > 1:
                    group -= 1
                    break
            self._prefill(joining[:group])
            del joining[:group]

    def _prefill(self, rows: list[Row]) -> None:
        """Run prompts, left-padded to one length. If it fails, each is tried alone: one cannot take others along."""
        device = self.model.device
        width = max(row.prompt_length for row in rows)
        pads = [width - row.prompt_length for row in rows]
        ids = torch.tensor([[0] * pad + row.history for pad, row in zip(pads, rows, strict=True)], device=device)
        starts = torch.tensor(pads, device=device).unsqueeze(1)
        columns = torch.arange(width, device=device).unsqueeze(0)
        cache = DynamicCache()
        try:
            logits = self._forward(
                rows,
                input_ids=ids,
                attention_mask=columns >= starts if any(pads) else None,
                position_ids=(columns - starts).clamp(min=0),
                past_key_values=cache,
            )
            self._cache.join(cache, [row.prompt_length for row in rows])
        except Exception as error:
            if len(rows) > 1:
                for row in rows:
                    row.restart()
                    self._prefill([row])
            else:
                self._failed(rows[0], error)
            return
        self._rows += rows
        self._counts["prefills"] += 1
        self._accept(rows, logits)

    def _decode(self) -> None:
        if not self._rows:
            return
        device, rows = self.model.device, list(self._rows)
        try:
            self._cache.make_room()
            logits = self._forward(
                rows,
                input_ids=torch.tensor([[row.history[-1]] for row in rows], device=device),
                attention_mask=self._cache.mask(device),
                position_ids=torch.tensor([[row.fed] for row in rows], device=device),
                past_key_values=self._cache,
            )
        except Exception as error:  # out of memory, mostly: these end, the engine goes on
            for row in self._clear():
                self._failed(row, RequestFailed(f"a step of {self.facts.name} failed: {error}"))
            return
        self._cache.advance()
        self._counts["steps"] += 1
        self._accept(rows, logits)

    def _forward(self, rows: list[Row], **inputs: object) -> torch.Tensor:
        """Logits of the last column; steers and captures on the way."""
        keys = {key for row in [*self._rows, *rows] for key in row.tapped}
        self._taps.attach(keys)
        width = inputs["input_ids"].shape[1]  # type: ignore[attr-defined]
        now, books = self._passes.build(rows, width) if keys else (None, None)
        with self._taps.during(now):
            output = self.model(**inputs, **self._last_only, use_cache=True)
        if now and books:
            captured = len(books.captures)
            self._counts["rows"] += deliver(now.gathers[:captured], books.shares)
            began = time.perf_counter()
            for look, gather in zip(books.looks, now.gathers[captured:], strict=True):
                self._counts["readings"] += read(self.monitor, look, gather)
            self._counts["lens_seconds"] += time.perf_counter() - began
        for row in rows:
            row.fed = len(row.history)
        return output.logits[:, -1]

    @together()
    def _accept(self, rows: list[Row], logits: torch.Tensor) -> None:
        """Sample, and end the requests that are done; the last rows first, since those leave without a copy."""
        choosers = [row.chooser for row in rows]
        asked = log_probabilities(logits, choosers)
        chosen = choose(logits, choosers)
        for i, (row, token) in reversed(list(enumerate(zip(rows, chosen, strict=True)))):
            try:
                if token is None:
                    raise Unsteerable(
                        f"the logits of {row.name} are not finite: its steering overflows the model; lower the strength"
                    )
                done = row.accept(token, asked[i].of(token) if i in asked else None)
            except Exception as error:
                self._leave(row)
                self._failed(row, error)
                continue
            self._counts["tokens"] += 1
            if done:
                self._leave(row)
                row.end(done)
                self._counts["finished"] += 1

    def _leave(self, row: Row) -> None:
        at = self._rows.index(row)
        self._cache.leave(at)
        self._rows[at] = self._rows[-1]
        self._rows.pop()


def _check_options(max_batch: int, max_columns: int, slots: int, capture_budget: int, capture_ttl: float) -> None:
    least = {"max_batch": (max_batch, 1), "max_columns": (max_columns, 1), "slots": (slots, 2)}
    least |= {"capture_budget": (capture_budget, 0), "capture_ttl": (capture_ttl, 0)}
    problems = [
        Problem(name, f"is {value}", f"give at least {low}") for name, (value, low) in least.items() if value < low
    ]
    if problems:
        raise InvalidRequest(problems)


def _context(config: PreTrainedConfig) -> int | None:
    """The longest text. Some rotary embeddings change for the whole batch when one row passes a length (longrope,
    dynamic): there the shorter length is the limit, so that no request can change another's rows."""
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    flat = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if most is None or not any(part.get("rope_type") in ("longrope", "dynamic") for part in flat):
        return most
    limits = [getattr(config, "original_max_position_embeddings", None)]
    limits += [part.get("original_max_position_embeddings") for part in flat]
    return min([most, *(limit for limit in limits if limit)])


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """transformers draws progress bars on loading; a library must not."""
    drawn = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            transformers_logging.enable_progress_bar()


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end a text, looked up once."""
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()

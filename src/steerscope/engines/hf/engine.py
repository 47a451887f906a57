"""HFEngine: continuous batching over a transformers model, in a thread of its own.

Between two steps requests join (prefilled together, then copied into the batch's cache) and leave; every request in
the batch has its own steering, capture, sampling and seed. Captured rows are staged per forward and written to each
request's buffer; a request that fails ends alone.
"""

import inspect
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from steerscope.capture.budget import ByteBudget
from steerscope.core.slot_table import SlotTable
from steerscope.engines.detokenizer import Decoder
from steerscope.engines.engine_thread import ThreadedEngine
from steerscope.engines.hf.blocks import find_blocks
from steerscope.engines.hf.decode_batch import BatchCache, cache_bytes, prompt_cache
from steerscope.engines.hf.forward_index import Pass, PassBuilder, deliver
from steerscope.engines.hf.lenses import MonitorStore, read
from steerscope.engines.hf.prefill import PrefillQueue, prefill_inputs
from steerscope.engines.hf.sampler import choose
from steerscope.engines.hf.selftest import can_continue, self_test
from steerscope.engines.hf.sequence import HFContext, Row, TokenSpan
from steerscope.engines.hf.settings import HFSettings, context_of, eos_ids, gib, memory_of, no_bars
from steerscope.engines.hf.taps import Taps
from steerscope.engines.packs import Packs
from steerscope.engines.plan import Facts
from steerscope.engines.result_channels import together
from steerscope.engines.results import EngineJob
from steerscope.lenses.monitor import Monitor
from steerscope.models import check_adapter, has_adapter
from steerscope.specs.errors import (
    CapacityExceeded,
    ModelNotFound,
    RequestFailed,
    Unsteerable,
    UnsupportedModel,
    first_line,
)


class HFEngine(ThreadedEngine[Row]):
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        **options: float,
    ) -> None:
        """Start the engine; `options` are the fields of `HFSettings`."""
        self.settings = HFSettings.parse(options)
        super().__init__(ByteBudget(self.settings.capture_budget, self.settings.capture_wait))
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.dtype = model.dtype
        self.device = model.device
        self.blocks = find_blocks(model)
        config = model.config.get_text_config(decoder=True)
        self.facts = Facts(
            name=name or model.config.name_or_path or type(model).__name__,
            layers=len(self.blocks),
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            context=context_of(config),
            max_columns=self.settings.max_columns,
            refused_sites=self.blocks.refused,
        )
        self._prepare()
        self_test(model, self._taps, self._table)
        self._prompts = PrefillQueue(self.settings.prefill_chunk, can_continue(model, self.blocks, self._last_only))
        self._run()

    def _prepare(self) -> None:
        model = self.model
        settings = self.settings
        hidden = self.facts.hidden
        self._table = SlotTable(hidden, settings.slots, self.device)
        self._taps = Taps(self.blocks, self._table)
        self.monitor = Monitor(self.device, slots=settings.max_batch)
        self._lenses = Packs(MonitorStore(self.monitor), self._call, self._put, self._packs_in_use)
        self._taps.gates = self.monitor.rules.gates
        self._passes = PassBuilder(self._table, hidden, self.dtype)
        self._clear_batch()
        self.context = HFContext(
            facts=self.facts,
            decoder=Decoder(self.tokenizer),
            eos=eos_ids(model, self.tokenizer),
            budget=self.budget,
            capture_ttl=settings.capture_ttl,
            model=model,
            table=self._table,
            monitor=self.monitor,
        )
        # Only the last column's logits are needed; a model that cannot leave the others out computes them all.
        can_skip = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if can_skip else {}
        self._counts |= {"prefills": 0, "rows": 0, "readings": 0, "lens_seconds": 0.0}

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter: str | Path | None = None,
        **options: int | float | str | None,
    ) -> "HFEngine":
        """Load a directory or hub id. The default dtype is float32 on CPU and the checkpoint's own elsewhere."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        chosen = dtype or ("float32" if device == "cpu" else "auto")
        try:
            with no_bars():
                check_adapter(model)
                tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
                loaded: PreTrainedModel = _class_for(model).from_pretrained(model, dtype=chosen)
                if adapter is not None:
                    check_adapter(adapter)
                    loaded.load_adapter(str(adapter))
        except UnsupportedModel:
            raise
        except Exception as error:  # transformers and its readers raise all sorts for a bad path, file or dtype
            what = model if adapter is None else f"{model} with adapter {adapter}"
            raise ModelNotFound(f"cannot load {what}: {first_line(error)}") from error
        placed = hasattr(loaded, "hf_device_map") or hasattr(loaded.config, "quantization_config")
        try:
            if not placed:
                loaded.to(device)  # type: ignore[arg-type]
        except (RuntimeError, AssertionError) as error:  # torch raises either for a device it does not have
            raise UnsupportedModel(f"cannot put {model} on device {device!r}: {first_line(error)}") from error
        return cls(loaded, tokenizer, **{"name": str(model), **options})  # type: ignore[arg-type]

    @classmethod
    def from_loaded(cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase, **options: Any) -> "HFEngine":
        """Start the engine on a model of transformers, or of peft, that is loaded already."""
        config = getattr(model, "active_peft_config", None)
        if config is not None and config.is_prompt_learning:
            raise UnsupportedModel(
                f"{config.peft_type} puts learned vectors before every prompt, so a position would no longer be "
                "the number of a prompt's token: use an adapter that changes weights, such as LoRA"
            )
        base_of: Any = getattr(model, "get_base_model", None)
        base = model if base_of is None else base_of()
        if not isinstance(base, PreTrainedModel):
            raise UnsupportedModel(f"{type(base).__name__} is no model of transformers (PreTrainedModel)")
        return cls(base, tokenizer, **options)

    # --- the Engine's side (any thread)

    def stats(self) -> dict[str, float]:
        now = {"running": len(self._admitted), "waiting": len(self._waiting), "slots_in_use": self._table.in_use}
        return {**self._counts, **now, "packs": len(self.monitor), **self.budget.stats()}

    def room_for(self, batch: int, tokens: int) -> str:
        weights = sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))
        cache = self._call(lambda: cache_bytes(self.model, batch, tokens), "room_for()")
        total = memory_of(self.device)
        need = f"{batch} × {tokens} tokens need {gib(weights + cache)} (weights {gib(weights)}, cache {gib(cache)})"
        if total is None:
            return need
        return f"{need} of {gib(total)}: {'they fit' if weights + cache < total else 'they do not fit'}"

    # --- the thread

    def _loop(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        going = True
        while going:
            try:
                with torch.no_grad():
                    going = self._step()
            except Exception as error:  # an error of the engine: the batch fails, the engine goes on
                # With an empty batch the first waiting request fails: else this would repeat for ever.
                for row in self._clear() or self._waiting[:1]:
                    self._failed(row, error)
                self._waiting = [row for row in self._waiting if not row.over]
        for row in self._clear():
            row.end("cancelled")
        self._drop_waiting(cancelled_only=False)
        # Memory is freed even while the caller keeps the closed engine.
        self._taps.attach(())  # a model that was loaded by others is left as it was
        self._lenses.close()
        self.monitor.close()
        del self.model, self.blocks, self._taps, self._passes, self.context

    def _step(self) -> bool:
        going = self._receive()
        if going:
            self._drop_cancelled()
            if self._streaming or not self._prompts.rows:
                self._admit()
            self._prefill()
            if self._streaming or not self._prompts.rows:
                self._decode()
            self._lenses.sweep()
        return going

    @property
    def _streaming(self) -> bool:
        """Return whether a stream runs: prompts and decoding take turns then. Else prompts go first."""
        return any(row.job.stream for row in self._decoding)

    def _clear(self) -> list[Row]:
        """Remove all admitted requests and return them; requests that wait for a place keep waiting."""
        rows = list(dict.fromkeys(self._admitted))
        self._clear_batch()
        self._prompts.rows = []
        return rows

    def _clear_batch(self) -> None:
        self._decoding: list[Row] = []
        self._cache = BatchCache(self.model.config)

    def _inputs(self) -> dict[str, object]:
        """Return the inputs of the next decoding step."""
        return self._cache.inputs([row.history[-1] for row in self._decoding], self.device)

    @property
    def _admitted(self) -> list[Row]:
        return [*self._decoding, *self._prompts.rows]

    def _all_requests(self) -> list[Row]:
        return [*self._admitted, *self._waiting]

    def _sequence(self, job: EngineJob) -> Row:
        return Row(job, self.context)

    def _busy(self) -> bool:
        admitted = bool(self._admitted)
        if not admitted and not self._waiting:
            self._taps.attach(())  # the model is left as it was found
        return admitted

    def _drop_cancelled(self) -> None:
        self._drop_waiting(cancelled_only=True)
        for row in [row for row in self._admitted if row.job.cancelled]:
            self._leave(row)
            row.end("cancelled")

    def _admit(self) -> None:
        """Let waiting requests in, in order, while there is room in the batch and in the slot table. A request that
        needs no slot may overtake one that waits for it, and any request one whose pack is being loaded."""
        blocked: Row | None = None
        for row in list(self._waiting):
            if len(self._admitted) >= self.settings.max_batch:
                break
            if blocked is not None and not self._overtakes(row, blocked, place_is_free=True):
                continue
            try:
                if not self._lenses.ready(row):
                    continue
                row.lease()
            except Exception as error:  # no slot, no memory for its rows, a pack that cannot be loaded
                full = isinstance(error, CapacityExceeded) and row.needs_slot
                if full and any(other.leases for other in self._admitted):
                    blocked = row  # until a running request ends and frees slots
                    continue
                self._waiting.remove(row)
                self._failed(row, error)
                continue
            self._prompts.rows.append(row)
            self._waiting.remove(row)

    def _prefill(self) -> None:
        """Run one forward of prompt tokens. Prompts that are complete then join the batch."""
        if not self._prompts.rows:
            return
        spans = self._prompts.next_spans(self._streaming)
        rows = [one.row for one in spans]
        first = rows[0]
        cache = first.prefilled or prompt_cache(self.model.config)
        try:
            texts = [one.row.history[one.start : one.stop] for one in spans]
            inputs = prefill_inputs(texts, spans[0].start, self.device)
            logits = self._forward(spans, **inputs, past_key_values=cache)
            if first.fed == first.prompt_length:
                self._cache.join(cache, [row.prompt_length for row in rows])
                self._decoding += rows
        except Exception as error:
            self._prefill_failed(spans, error)
            return
        if first.fed < first.prompt_length:
            first.prefilled = cache
            if first.fault is not None:
                self._leave(first)
                self._failed(first, first.fault)
            return
        for row in rows:
            row.prefilled = None
            self._prompts.rows.remove(row)
        self._counts["prefills"] += 1
        self._accept(rows, logits)

    def _prefill_failed(self, spans: list[TokenSpan], error: Exception) -> None:
        """Try each prompt alone, from its first token: one cannot take others along, and a cache that holds a part of a
        failed piece is of no use."""
        first = spans[0]
        if len(spans) == 1 and (first.row.alone or first.start == 0):
            self._leave(first.row)
            self._failed(first.row, error)
            return
        for one in spans:
            one.row.restart()

    def _decode(self) -> None:
        if not self._decoding:
            return
        rows = list(self._decoding)
        spans = [TokenSpan.rest(row) for row in rows]
        try:
            logits = self._forward(spans, **self._inputs())
        except Exception as error:
            self._end_step(self._culprits(spans) or rows, error)
            return
        self._cache.advance()
        self._counts["steps"] += 1
        self._accept(rows, logits)

    def _culprits(self, spans: list[TokenSpan]) -> list[Row]:
        """Return the rows whose ops, captures or watches make this step fail; none if it fails without them too. A step
        that was not finished has changed nothing: it can be run again with some of them."""

        def fails(asked: list[TokenSpan]) -> bool:
            try:
                some = [one if one in asked else one.muted for one in spans]
                self._compute(some, **self._inputs())
            except Exception:
                return True
            return False

        def faulty(asked: list[TokenSpan]) -> list[Row]:
            if not fails(asked):
                return []
            if len(asked) == 1:
                return [asked[0].row]
            half = len(asked) // 2
            return faulty(asked[:half]) + faulty(asked[half:])

        tapped = [one for one in spans if one.row.tapped]
        return faulty(tapped) if tapped and not fails([]) else []

    def _end_step(self, rows: list[Row], error: Exception) -> None:
        """End these requests; the engine goes on."""
        if len(rows) == len(self._decoding):
            self._clear_batch()
        for row in rows:
            if row in self._decoding:
                self._leave(row)
            self._failed(row, RequestFailed(f"a step of {self.facts.name} failed: {error}"))

    def _forward(self, spans: list[TokenSpan], **inputs: object) -> torch.Tensor:
        """Steer and capture; return the logits of the last column. Rows and readings that cannot be kept fail their
        request (`Row.fault`), not the forward."""
        logits, now = self._compute(spans, **inputs)
        deliver(now.captured)
        began = time.perf_counter()
        for watched in now.watched:
            read(self.monitor, watched)
        self._counts["lens_seconds"] += time.perf_counter() - began
        for one in spans:
            one.row.fed = one.stop
        return logits

    def _compute(self, spans: list[TokenSpan], **inputs: object) -> tuple[torch.Tensor, Pass]:
        """Run the model and its taps; no request is changed by it."""
        keys = {key for row in self._admitted for key in row.tapped}
        self._taps.attach(keys)
        width = inputs["input_ids"].shape[1]  # type: ignore[attr-defined]
        now = self._passes.build(spans, width) if keys else Pass()
        with self._taps.during(now):
            output = self.model(**inputs, **self._last_only, use_cache=True)
        return output.logits[:, -1], now

    @together()
    def _accept(self, rows: list[Row], logits: torch.Tensor) -> None:
        """Sample, and end the requests that are done; the last rows first, since those leave without a copy."""
        chosen = choose(logits, [row.chooser for row in rows])
        for row, (token, logprobs) in reversed(list(zip(rows, chosen, strict=True))):
            try:
                if row.fault is not None:
                    raise row.fault
                if token is None:
                    raise Unsteerable(
                        f"the logits of {row.name} are not finite: its steering overflows the model; lower the strength"
                    )
                done = row.accept(token, logprobs)
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
        self._counts["rows"] += row.captured_rows
        self._counts["readings"] += row.readings
        if row in self._prompts.rows:
            self._prompts.rows.remove(row)
        else:
            at = self._decoding.index(row)
            self._cache.leave(at)
            self._decoding[at] = self._decoding[-1]
            self._decoding.pop()


def _class_for(model: str | Path) -> Any:
    """Return transformers' class for a folder or hub id. An adapter alone has no config; its base is found by name."""
    if has_adapter(model) or type(AutoConfig.from_pretrained(model)) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText

"""Guards of the code, each with the change that takes it out (`steerscope.bench.stress.mutate` does so).

One that no test notices must be explained here, in `why`; a test holds the list equal to the committed result, and
every `old` to the code as it is.
"""

from dataclasses import dataclass

_PARTS = {
    "residual/equation.py": "tests/residual/test_equation.py",
    "residual/table.py": "tests/residual/test_table.py",
    "residual/rows.py": "tests/residual/test_rows.py",
    "residual/reduce.py": "tests/residual/test_reduce.py",
    "lenses/rules.py": "tests/lenses/test_rules.py",
    "engines/vllm/step.py": "tests/engines/vllm/test_step.py",
    "engines/vllm/steady.py": "tests/engines/vllm/test_step.py",
    "engines/vllm/guards.py": "tests/engines/vllm/test_guards.py",
    "capture/budget.py": "tests/capture/test_budget.py",
    "capture/transport.py": "tests/capture/test_transport.py",
    "analysis/attention.py": "tests/analysis/test_attention.py",
    "analysis/attention_tables.py": "tests/analysis/test_attention.py",
    "analysis/changes.py": "tests/analysis/test_susceptibility.py",
    "analysis/checkpoint.py": "tests/analysis/test_checkpoint.py",
    "analysis/directions.py": "tests/analysis/test_directions.py",
    "analysis/layerwise.py": "tests/analysis/test_mlp.py",
    "analysis/mlp.py": "tests/analysis/test_mlp.py",
    "analysis/onelayer.py": "tests/analysis/test_onelayer.py",
    "analysis/statistics.py": "tests/analysis/test_statistics.py",
    "analysis/susceptibility.py": "tests/analysis/test_susceptibility.py",
}


@dataclass(frozen=True)
class Mutant:
    file: str  # under src/steerscope
    old: str
    new: str
    why: str = ""  # of one that no test can tell from the original

    @property
    def tests(self) -> str:
        return _PARTS[self.file]


def _of(file: str, *changes: tuple[str, ...]) -> list[Mutant]:
    return [Mutant(file, *change) for change in changes]


MUTANTS = [
    *_of(
        "residual/equation.py",
        ("- m * p)\n    active", "+ m * p)\n    active"),
        ("torch.minimum(torch.maximum(s * p, lo), hi)", "torch.maximum(s * p, lo)"),
        ("torch.minimum(torch.maximum(s * p, lo), hi)", "torch.minimum(s * p, hi)"),
        ("active = (gate != 0) & (", "active = ("),
        ("torch.where(active.unsqueeze(-1), amount.unsqueeze(-1) * v, 0.0)", "amount.unsqueeze(-1) * v"),
        ("p = torch.where((s != 0) | (m != 0), (h * v).sum(-1), 0.0)", "p = (h * v).sum(-1)"),
        ("_step(h + total, column, gates)", "_step(h, column, gates)"),
        ("    h = h.float()\n    total", "    total", "vectors are float32, and what meets them becomes float32 too"),
        (" or (column.gate_id != 0).any()", ""),
    ),
    *_of(
        "residual/table.py",
        ("at = last.get(op.key, -1) + 1", "at = 0"),
        ("(columns[at].positions, columns[at].gate) != (op.positions, op.gate)", "columns[at].gate != op.gate"),
        ("(columns[at].positions, columns[at].gate) != (op.positions, op.gate)",
         "columns[at].positions != op.positions"),
        ('found.update(f"{layer}.{site}.{len(data)}:".encode())', "pass"),
        ("if self._users[key] == 0:", "if True:"),
        ("self._idle.pop(key, None)", "pass"),
        ("self._idle.popitem(last=False)", "self._idle.popitem(last=True)"),
        ("tensors[which][slot].zero_()", "pass"),
        ("tensors[which][slot].copy_(tensors[which][0])", "pass"),
        ("            self._vector_slots.release(vector_key)\n            raise", "            raise"),
        ("self.version += 1", "pass"),
        ("list(range(capacity - 1, 0, -1))", "list(range(capacity - 1, -1, -1))"),
        ("torch.from_numpy(v.copy())", "torch.from_numpy(v)",
         "the table copies it anyway: this spares a warning about read-only memory"),
    ),
    *_of(
        "residual/rows.py",
        ("if first != self._written:", "if False:"),
        ("if self._written < len(positions):", "if False:"),
        ("selected(self.positions, min(rows, self.most))", "selected(self.positions, self.most)"),
        ("kept.clone() if len(kept) < len(self._rows) else kept", "kept"),
        ("(positions >= start) & (positions < stop)", "(positions >= start) & (positions <= stop)"),
        ("generated = positions >= prompt_length", "generated = positions > prompt_length"),
        ("        if not open_message:\n            roles", "        if True:\n            roles"),
    ),
    *_of(
        "residual/reduce.py",
        ("known = bisect_left(positions, self.next)", "known = 0"),
        ("known = bisect_left(positions, self._next)", "known = 0"),
        ("rows.sum(0, dtype=torch.float32)", "rows.sum(0)"),
        ("if self.n == 0:", "if False:"),
        ("if self.reducer.next > rows:", "if False:"),
        ("if position < rows]", "if position <= rows]"),
        ("sure = len(self._positions) - self.hold", "sure = len(self._positions)"),
        ("self._rows = [together.clone()]", "self._rows = [together]"),
    ),
    *_of(
        "lenses/rules.py",
        ("fresh = (slot > 0) & (position >= self.next[slot])", "fresh = slot > 0"),
        ("(scores > self.above[slot])", "(scores >= self.above[slot])"),
        ("& (scores < self.below[slot])", ""),
        ("((every & self.negative[slot]) == 0)", "(every == every)"),
        ("run >= self.need[slot]", "run >= 1"),
        ("ends = (quiet >= self.off_need[slot]) & ~holds", "ends = ~holds"),
        ("ends = (quiet >= self.off_need[slot]) & ~holds", "ends = quiet >= self.off_need[slot]",
         "no condition holds on a row that is low: off_below lies under all its thresholds"),
        ("torch.where(self.off_by_failing[slot], ~holds, low)", "~holds"),
        ("torch.where((here == first)[:, None], self.on[slot], state.roll(1, 0))", "state.roll(1, 0)"),
        ("target = torch.where(last & (slot > 0), slot, self._trash)", "target = slot"),
        ("torch.where(broken >= first[:, None], inside, whole)", "inside"),
        ("return torch.where(known, risen > fallen, before)", "return risen > fallen"),
        ("        self._clear(slot)\n        self._free.append(slot)", "        self._free.append(slot)"),
    ),
    *_of(
        "engines/vllm/step.py",
        ("before, fine = at < asker.reached, not asker.failed", "before, fine = False, not asker.failed"),
        ("bring_out(self.close(asker))", "self.close(asker)"),
        ("asker.reached = max(asker.reached, at + last - first)", "asker.reached = at"),
        ("if asker.group and asker.wire.capture and not asker.failed:", "if asker.group and asker.wire.capture:"),
        ("if asker.failed and fine:", "if False:"),
        ("        filled = Filled()\n        self.clear()", "        filled = Filled()"),
        ("where = slice(first + a - at, first + b - at)", "where = slice(first, first + b - a)"),
        ("self.index[where, ASKER] = asker.number", "pass"),
        ("cell += (b - a) * asker.width\n", "cell += (b - a)\n"),
        ("self.index[token, STRIDE] = asker.width", "pass"),
        ("np.where(group == 0, asker.watched.alone, asker.watched.both)", "asker.watched.alone"),
        ("asker.failed or not _lasts(asker, at)", "asker.failed"),
        ("if not here or filled.recomputed:", "if not here:"),
        ("if page.count == page.size:", "if page.count == page.size - 1:"),
        ("min(stop, capture.most)): ", "stop): "),
        ("if capture.positions.count(a) > asker.seen:", "if False:"),
        ("if watch.positions.count(a) > watched.seen:", "if False:"),
        ("asker.seen = max(asker.seen, capture.positions.count(b))", "asker.seen = capture.positions.count(b)"),
        ("        return 0, column.positions & Positions.of(asker.watched.open.get(column.gate, ()))",
         "        return asker.watched.gates[k], column.positions"),
        ("        return 0, Positions()", "        return 0, column.positions"),
        ("self.index[: self._dirty] = 0", "pass"),
        ("if not (now.position < now.most).all():", "if False:"),
        ("if self._steady is not now:", "if False:"),
        ("self.askers[name], self.resting = asker, False", "self.askers[name] = asker"),
        ("asker.reached = max(asker.reached, int(now.position[i]))", "pass"),
        ("asker.page.count = asker.page.size - int(now.room[i])", "pass"),
    ),
    *_of(
        "engines/vllm/steady.py",
        ("if names != self.names:", "if False:"),
        ("            same = self.alone\n", "            same = True\n"),
        ("same and bool((found == self.position).all())", "same"),
        ("or any(asker.wire.columns for asker in self.askers)", ""),
        ("self.cell += self.lag * self.width", "self.cell += self.lag"),
        ("self.room -= self.lag * (self.width > 0)", "self.room -= self.lag",
         "the room of those who capture nothing is never looked at"),
    ),
    *_of(
        "engines/vllm/guards.py",
        ("if config.speculative_config is not None:", "if False:"),
        ('if getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False):', "if False:"),
        ('if getattr(parallel, "prefill_context_parallel_size", 1) > 1:', "if False:"),
        ('if getattr(parallel, "decode_context_parallel_size", 1) > 1:', "if False:"),
        ('if getattr(config.compilation_config.pass_config, "enable_sp", False):', "if False:"),
        ("if config.kv_transfer_config is not None:", "if False:"),
        ('if getattr(config.model_config, "enable_sleep_mode", False):', "if False:"),
        ('if getattr(config.model_config, "enable_prompt_embeds", False):', "if False:"),
        ('if getattr(config.cache_config, "kv_sharing_fast_prefill", False):', "if False:"),
        ('if getattr(parallel, "data_parallel_size", 1) > 1:', "if False:"),
        ('if getattr(parallel, "_api_process_count", 1) > 1:', "if False:"),
        ("if config.lora_config is not None:", "if False:"),
        ('if getattr(config.model_config, "runner_type", "generate") != "generate":', "if False:"),
        ("    if problems:\n        raise InvalidRequest(problems)", "    del problems"),
        ("if minor < OLDEST:", "if False:"),
        ("not in SEEN:", "in ():"),
    ),
    *_of(
        "capture/budget.py",
        ("freed = max(0, self.size - size)", "freed = self.size - size"),
        ("self._queue[0] is not turn or ", ""),
        ("            self.size -= freed\n", ""),
        ("if self.used + size > self.total:", "if self.used >= self.total:"),
        ("                self._queue.remove(turn)", "                pass"),
        ("        self.sweep()\n        with self.lock:\n            if", "        with self.lock:\n            if"),
    ),
    *_of(
        "analysis/attention.py",
        ("keys.keys.repeat_interleave(keys.group, 1)", "keys.keys.repeat(1, keys.group, 1)"),
        ("torch.tanh(found / cap) * cap", "found"),
        ("if distance < 0 or (longest and distance >= longest):", "if distance < 0:"),
    ),
    *_of(
        "analysis/attention_tables.py",
        ("torch.minimum(by_key.abs(), by_query.abs())", "torch.maximum(by_key.abs(), by_query.abs())"),
        ("    p.diagonal().copy_(p_by_rank(seen.own[-1, :n], seen.own[-1, n:][part]))\n", ""),
        ("for part in (own, ~own):", "for part in (own | ~own,):"),
    ),
    *_of(
        "analysis/changes.py",
        ("in _WRITERS if square else linear.shape[0] == hidden", "in _WRITERS"),
        ("at = self.seen + changed.nonzero()", "at = changed.nonzero()"),
        ("    if other:\n        raise BadFile", "    if False:\n        raise BadFile"),
    ),
    *_of(
        "analysis/checkpoint.py",
        ("opened.get_tensor(name).clone()", "opened.get_tensor(name)"),
        (" and not any(part in prefix for part in _OTHER_TOWERS)", ""),
        ("    if missing:\n", "    if False:\n"),
    ),
    *_of(
        "analysis/directions.py",
        (" - rows.mean(1, keepdims=True, dtype=np.float64)", ""),
        ("drawn *= (self.norms / np.linalg.norm(drawn, axis=2))[..., None]", "pass"),
        ("signs.append(signs[-1] * np.where(", "signs.append(np.where("),
    ),
    *_of(
        "analysis/layerwise.py",
        ("torch.cat([named, -named, drawn, given, -given])", "torch.cat([named, -named, drawn, given, given])"),
        ("inside + out / spread", "inside + 0 * out / spread"),
        ("2 * (1 + torch.minimum(above, below))", "2 * torch.minimum(above, below)"),
        ("equal_var=False", "equal_var=True"),
        ("    if random < fewest:", "    if False:"),
    ),
    *_of("analysis/mlp.py", ("number if layer is None else layer", "number")),
    *_of(
        "analysis/onelayer.py",
        ("        if wrong:\n", "        if False:\n"),
        ('            module.to("meta")\n', "            pass\n"),
    ),
    *_of(
        "analysis/statistics.py",
        ("values[order] * np.arange(len(values), 0, -1)", "values[order] * len(values)"),
        ("np.maximum.accumulate(stepped)", "stepped"),
    ),
    *_of(
        "analysis/susceptibility.py",
        ("highest = _among_others(alignment[:, n : n + random]).max(0)",
         "highest = _scores(alignment, n, random)[:, n : n + random].max(0)"),
        ("p = (1 + (highest >=", "p = (0 + (highest >="),
        ('if "." in kind]', "if kind]"),
    ),
]  # fmt: skip

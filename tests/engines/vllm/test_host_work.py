"""Work that every step pays for, counted instead of timed, so that it cannot grow unnoticed on any machine.

On the host: Python and C calls that the worker's hooks, and the client's thread around vLLM's step, make in one decode
step. In the graph: nodes that a tap adds to a layer. The numbers are ceilings: lower one when the code has become
better; raise one only for a reason.
"""

import asyncio
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engines.conftest import HAS_VLLM, saved, start_vllm
from engines.test_watching import PACK
from steerscope.engines.facade import SyncEngine
from steerscope.engines.generation import EndEvent, Generation, TokenEvent, TokenPrompt
from steerscope.engines.vllm.graphs import Graphs
from steerscope.engines.vllm.layer_proof import prove_layers
from steerscope.engines.vllm.layers import attach, find_layers
from steerscope.engines.vllm.step import ENTRIES
from steerscope.engines.vllm.tap import Shared, Tap, TappedNorm
from steerscope.specs import Add, Capture, Sampling
from steerscope.specs.watch import Watch, flag, when
from waiting import HUNG_S

BATCH, HIDDEN, LAYERS = 32, 64, 4
# Calls per decode step of 32 requests.
IDLE, CAPTURING, STEERING, WATCHING = 11, 270, 23, 545
DRIVING = 4  # of the client, for texts that nobody looks at before their ends (one is vLLM's step, as we make it)
# Beside the operator itself a tap may only bring its tensors in.
OPERATORS, INPUTS = 1, 3
# Within a norm, as on a GPU, it stands for the norm's operators: one, and three that take its weight and answers apart.
FUSED_OPERATORS, FUSED_INPUTS = 4, 5
# The same thread drives these, but they are not the worker's.
CLIENT = ("engine.py", "entering.py", "leaving.py", "running.py", "claims.py", "front.py", "plugin.py", "selftest.py")
# Those of them that every step of our own engine passes, and what they are made of.
DRIVERS = ("engine.py", "leaving.py", "running.py", "claims.py", "threaded.py", "outbox.py")


def is_worker(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    inside = file.parent.name == "vllm" and file.parent.parent.name == "engines"
    pure = any(part in str(file) for part in ("steerscope/residual/", "steerscope/specs/tokens"))
    # The equation is what a tap does on a CPU; on a GPU it is in the kernel.
    not_counted = (*CLIENT, "tap.py", "layers.py", "equation.py")
    return (inside or pure) and file.name not in not_counted


def is_client(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    return "steerscope" in file.parts and file.name in DRIVERS


def calls(engine: SyncEngine, tokens: int, **asked: object) -> np.ndarray:
    """Calls by worker code in all steps of a batch, and by the client."""
    count = np.zeros(2)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_call"):
            count[:] += is_worker(frame), is_client(frame)

    prompts = [TokenPrompt([5 + i, 6, 7, 8]) for i in range(BATCH)]
    engine.aio._call(lambda: sys.setprofile(note))  # type: ignore[attr-defined]
    done = engine.generate(prompts, Sampling(max_tokens=tokens, ignore_eos=True), **asked)  # type: ignore[call-overload]
    engine.aio._call(lambda: sys.setprofile(None))  # type: ignore[attr-defined]
    for one in done:
        if one.capture is not None:
            one.capture.close()
    return count


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_calls_of_a_step() -> None:
    """From the difference of two lengths: what a request costs once is in both."""
    folder = saved("llama", "bytes", None, {})
    options: dict[str, object] = {"sites": ("resid_post",), "max_columns": 4, "max_batch": BATCH}
    engine = start_vllm(folder, "llama", {**options, "enable_prefix_caching": False})
    engine.register_pack("p", PACK)
    vectors = np.random.default_rng(0).standard_normal((BATCH, HIDDEN)).astype(np.float32)
    kinds: dict[str, tuple[int, dict[str, object]]] = {
        "idle": (IDLE, {}),
        "capturing": (CAPTURING, {"capture": Capture()}),
        "steering": (STEERING, {"steer": [Add(vector=v, scale=0.1, layers="all") for v in vectors]}),
        "watching": (
            WATCHING,
            {"watch": Watch(pack="p", rules=[when(PACK.concepts[0].id, above=0.5).then(flag("f"))])},
        ),
    }
    try:
        for name, (most, asked) in kinds.items():
            calls(engine, 20, **asked)  # vectors are given to the worker once; and nobody looks for faults any more
            found, client = (calls(engine, 30, **asked) - calls(engine, 10, **asked)) / 20
            print(f"{name}: {found:g} calls per step, {client:g} of the client")  # noqa: T201
            assert found <= most, f"{name}: a step makes {found:g} calls, {most} were allowed"
            assert client <= DRIVING, f"{name}: the client makes {client:g} calls in a step, {DRIVING} were allowed"
    finally:
        engine.close()


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_prompts_of_who_asks_for_later_rows_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for generated tokens alone is met while the device reads its prompt, in one step or in parts; and
    has every row."""
    from steerscope.engines.vllm.worker import HERE

    known: list[int] = []

    def use(graphs: Graphs, *_: bool) -> None:
        """Once in every step, when it is known what its taps are to do."""
        known.extend(len(taps.books.askers) for taps in HERE if taps.graphs is graphs)

    monkeypatch.setattr(Graphs, "use", use)
    options: dict[str, object] = {"sites": ("resid_post",), "max_num_batched_tokens": 64, "max_batch": 4}
    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", {**options, "enable_prefix_caching": False})
    long, sampling = TokenPrompt([20 + i for i in range(100)]), Sampling(max_tokens=4, ignore_eos=True)
    push = Add(vector=np.ones(HIDDEN, np.float32), layers="all", tokens="generated")
    try:
        known.clear()
        plain = engine.generate(long, sampling)
        whole = engine.generate(long, sampling, capture=Capture())
        assert known == [0] * 5 + [1] * 5  # 64 and 36 tokens of the prompt, then one by one
        for asked in ({"capture": Capture(tokens="generated")}, {"capture": Capture(), "steer": push}, {"steer": push}):
            known.clear()
            done = engine.generate(long, sampling, **asked)  # type: ignore[call-overload]
            first = 1 if asked.get("capture") == Capture() else 0
            assert known == [first] + [1] * 4
            assert (done.token_ids == plain.token_ids) == ("steer" not in asked)
            if done.capture is not None:
                done.capture.close()
        late = engine.generate([long, TokenPrompt([5, 6, 7])], sampling, capture=Capture(tokens="generated"))
        for key, rows in whole.rows.items():
            torch.testing.assert_close(late[0].rows[key], rows[100:])
        assert {len(rows) for one in late for rows in one.rows.values()} == {3}
    finally:
        engine.close()


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_who_is_watched_while_another_is_met_late_has_every_reading() -> None:
    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", {"sites": ("resid_post",), "max_batch": 4})
    engine.register_pack("p", PACK)
    long = Sampling(max_tokens=40, ignore_eos=True)

    async def both() -> list[Generation]:
        late: list[asyncio.Task[Generation]] = []
        async for event in engine.aio.stream(TokenPrompt([5, 6, 7]), long, watch=Watch(pack="p")):
            if isinstance(event, TokenEvent) and event.index in (4, 9, 14):
                asked = engine.aio.generate(TokenPrompt([8 + event.index]), long, capture=Capture(tokens="generated"))
                late.append(asyncio.ensure_future(asked))
            elif isinstance(event, EndEvent):
                return [event.generation, *[await one for one in late]]
        raise AssertionError("a stream without an end")

    try:
        watched, *others = asyncio.run(asyncio.wait_for(both(), HUNG_S))
        assert len(watched.readings) == 3 + 39
        assert [{len(rows) for rows in one.rows.values()} for one in others] == [{39}] * 3
    finally:
        engine.close()


class Norm(nn.Module):
    """As vLLM's: it takes and hands on the stream in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(HIDDEN)), 1e-6

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + residual
        scale = torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return stream * scale * self.weight, stream


class Block(nn.Module):
    """A decoder layer as vLLM has them: it hands on (delta, residual)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = self.norm(delta, residual)
        return self.mlp(normed), residual


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(layers)), Norm()

    def forward(self, hidden: Tensor) -> Tensor:
        delta, residual = hidden, torch.zeros_like(hidden)
        for layer in self.layers:
            delta, residual = layer(delta, residual)
        return self.norm(delta, residual)[0]


def nodes(layers: int, tapped: bool, noop: bool = False, fused: bool = False) -> tuple[int, int]:
    """Operators and inputs of the graph the compiler is given; taps are hooks, or `fused` with norms, as on a GPU."""
    model = Model(layers)
    if tapped:
        shared = Shared(
            pool=torch.zeros(64, HIDDEN),
            index=torch.zeros(8, ENTRIES + 12, dtype=torch.int32),
            gates=torch.ones(4),
            before=torch.zeros(8, dtype=torch.bool),
            faults=torch.zeros(8, dtype=torch.int32),
            stage=torch.zeros(8, HIDDEN),
            orders=torch.zeros(8, dtype=torch.int32),
        )
        tables = [(torch.zeros(8, HIDDEN), torch.zeros(32, 5)) for _ in range(layers)]
        own = [{"laid": torch.zeros(8), "staged": torch.zeros(8)} for _ in tables]
        taps = {(i, "resid_post"): Tap(shared, *table, True, True, noop, **own[i]) for i, table in enumerate(tables)}
        if fused:
            for block, tap in zip(model.layers, taps.values(), strict=True):
                block.norm = norm = TappedNorm(block.norm, tap)  # type: ignore[arg-type]
                norm.fused = not noop
        else:
            found = find_layers(model, layers)
            found = prove_layers(found, HIDDEN, ["resid_post"], lambda: model(torch.randn(4, HIDDEN)))
            attach(found, taps)  # type: ignore[arg-type]
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return lambda *_: (torch.zeros(4, HIDDEN),)  # the kernels that it names are a GPU's

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(torch.randn(4, HIDDEN))
    (graph,) = graphs
    kinds = [node.op for node in graph.graph.nodes]
    inputs = kinds.count("placeholder") + kinds.count("get_attr")
    return len(kinds) - inputs - kinds.count("output"), inputs


def per_layer(tapped: bool, noop: bool = False, fused: bool = False) -> tuple[float, float]:
    """What each further layer adds: tensors that all taps share are counted once, and so not here."""
    many, few = (nodes(layers, tapped, noop, fused) for layers in (2 * LAYERS, LAYERS))
    return (many[0] - few[0]) / LAYERS, (many[1] - few[1]) / LAYERS


@pytest.mark.slow
def test_nodes_that_a_tap_adds_to_a_layer() -> None:
    (operators, inputs), (bare_operators, bare_inputs) = per_layer(True), per_layer(False)
    assert operators - bare_operators <= OPERATORS
    assert inputs - bare_inputs <= INPUTS


@pytest.mark.slow
def test_a_tap_within_a_norm_is_one_operator_in_place_of_the_norms_own() -> None:
    (operators, inputs), (bare_operators, bare_inputs) = per_layer(True, fused=True), per_layer(False)
    assert operators <= FUSED_OPERATORS + 1 < bare_operators  # and the layer's one product
    assert inputs - bare_inputs <= FUSED_INPUTS


@pytest.mark.parametrize("fused", [False, True])
def test_a_tap_that_does_nothing_adds_nothing(fused: bool) -> None:
    assert per_layer(True, noop=True, fused=fused) == per_layer(False)

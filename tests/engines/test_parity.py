"""Exact rows: every architecture, site and op against the independent reference."""

import copy

import numpy as np
import pytest
import torch

from engines.conftest import Start
from steerscope.specs import Ablate, Add, Cap, Capture, Sampling, Steering
from steerscope.specs.steering import SITES
from support import tiny
from support.reference import Reference, RefOp, distance, same_until_tie

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

PROMPTS = ["Hello", "The quick brown fox jumps over the lazy dog, and then it rained", "How was your week at work?"]
LENGTHS = Sampling(max_tokens=9, ignore_eos=True)
# float32 carries 7 digits; a forward of a few layers in another batch shape loses one or two of them.
TOLERANCE = 1e-5


def sites_of(architecture: str) -> tuple[str, ...]:
    return tuple(s for s in SITES if not (architecture == "gpt_neox" and s == "resid_mid"))


def unit(vector: np.ndarray) -> np.ndarray:
    return (vector / np.linalg.norm(vector.astype(np.float64))).astype(np.float32)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES, scope="class")  # one after the other, each once
class TestEveryArchitecture:
    def test_rows_of_all_sites_and_layers_equal_the_reference_with_exact_counts(
        self, start: Start, architecture: str
    ) -> None:
        engine = start(architecture)
        model = tiny.model(architecture)
        reference = Reference(model)
        sites = sites_of(architecture)
        for done in engine.generate(PROMPTS, LENGTHS, capture=Capture(sites=sites)):
            fed = [*done.prompt_token_ids, *done.token_ids[:-1]]
            rows = done.rows
            assert rows.n == len(done.prompt_token_ids) + len(done.token_ids) - 1
            assert set(rows) == {(layer, site) for layer in range(4) for site in sites}
            _, wanted = reference.run(fed)
            for key, tensor in rows.items():
                assert tensor.shape == (len(fed), 64)
                assert distance(tensor, wanted[key]) < TOLERANCE, key
            tokens, gaps = reference.greedy(done.prompt_token_ids, 9)
            assert same_until_tie(done.token_ids, tokens, gaps)
            assert list(rows.labels.token_id) == fed
            assert list(rows.labels.position) == list(range(len(fed)))

    def test_resid_post_equals_transformers_hidden_states_and_the_last_layer_does_through_the_final_norm(
        self, start: Start, architecture: str
    ) -> None:
        engine, model = start(architecture), tiny.model(architecture)
        done = engine.generate(PROMPTS[1], LENGTHS, capture=Capture())
        fed = torch.tensor([[*done.prompt_token_ids, *done.token_ids[:-1]]])
        with torch.no_grad():
            hidden = model(fed, output_hidden_states=True).hidden_states
            final = Reference(model).norm(done.rows[3].unsqueeze(0))
        for layer in range(3):
            assert distance(done.rows[layer], hidden[layer + 1][0]) < TOLERANCE
        assert distance(final[0], hidden[4][0]) < TOLERANCE

    def test_what_attention_and_mlp_add_is_what_the_stream_gains(self, start: Start, architecture: str) -> None:
        rows = start(architecture).generate(PROMPTS[1], LENGTHS, capture=Capture(sites=sites_of(architecture))).rows
        for layer in range(4):
            before, after = rows[layer, "resid_pre"], rows[layer, "resid_post"]
            assert distance(before + rows[layer, "attn_out"] + rows[layer, "mlp_out"], after) < TOLERANCE
            if (layer, "resid_mid") in rows:
                assert distance(before + rows[layer, "attn_out"], rows[layer, "resid_mid"]) < TOLERANCE
            if layer:
                assert torch.equal(before, rows[layer - 1, "resid_post"])


def test_soft_capped_attention_is_as_exact_as_the_engine_makes_it(start: Start, request: pytest.FixtureRequest) -> None:
    """Gemma-2 caps attention logits with a tanh, for which vLLM's CPU kernel has an approximation: rows are those it
    computes, and lie as near to transformers' as that allows."""
    on_vllm = "vllm" in request.node.name
    engine = start("gemma2", attn_logit_softcapping=50.0)
    done = engine.generate(PROMPTS[1], LENGTHS, capture=Capture())
    fed = [*done.prompt_token_ids, *done.token_ids[:-1]]
    _, wanted = Reference(tiny.model("gemma2", attn_logit_softcapping=50.0)).run(fed)
    for key, tensor in done.rows.items():
        assert distance(tensor, wanted[key]) < (1e-3 if on_vllm else TOLERANCE), key


def test_the_comparison_would_notice_a_wrong_layer_position_or_half_a_residual(start: Start) -> None:
    """The tolerance means something only if the classic mistakes are far outside it."""
    rows = start().generate(PROMPTS[1], LENGTHS, capture=Capture(sites=("resid_post", "mlp_out"))).rows
    for layer in range(3):
        assert distance(rows[layer, "resid_post"], rows[layer + 1, "resid_post"]) > 1000 * TOLERANCE
        assert distance(rows[layer, "resid_post"][1:], rows[layer, "resid_post"][:-1]) > 1000 * TOLERANCE
        assert distance(rows[layer, "resid_post"], rows[layer, "mlp_out"]) > 1000 * TOLERANCE


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "olmo2", "gpt2"])
def test_every_op_at_every_site_equals_the_float64_oracle(start: Start, architecture: str, site: str) -> None:
    engine, reference = start(architecture), Reference(tiny.model(architecture))
    rng = np.random.default_rng(7)
    a, b, c, d = (rng.normal(size=64).astype(np.float32) for _ in range(4))
    steering = Steering.of(
        Add(vector=a, scale=0.7, layers=2, site=site, tokens="prompt"),
        Cap(vector=b, min=-0.5, max=0.25, layers="1-2", site=site),
        Ablate(vector=c, layers=2, site=site, tokens="generated"),
        Ablate(vector=d, to=1.5, layers=0, site=site, tokens="!positions=[1, -1]"),
    )
    p = len(engine.generate(PROMPTS[2], Sampling(max_tokens=1)).prompt_token_ids)
    infinite = np.inf
    ops = [
        RefOp(2, site, a, (0.7, 0, 0, -infinite, infinite), lambda i: i < p),
        *(RefOp(layer, site, unit(b), (0, 1, 1, -0.5, 0.25)) for layer in (1, 2)),
        RefOp(2, site, unit(c), (0, 0, 1, -infinite, infinite), lambda i: i >= p),
        RefOp(0, site, unit(d), (1.5, 0, 1, -infinite, infinite), lambda i: i not in (1, p - 1)),
    ]
    done = engine.generate(PROMPTS[2], LENGTHS, steer=steering, capture=Capture(sites=SITES))
    plain = engine.generate(PROMPTS[2], LENGTHS, capture=Capture(sites=SITES))
    _, wanted = reference.run([*done.prompt_token_ids, *done.token_ids[:-1]], ops)
    for (layer, at), tensor in done.rows.items():
        # resid_post of a layer is the tap of the next layer's resid_pre: its rows are after the ops of both.
        key = (layer + 1, "resid_pre") if at == "resid_post" and layer < 3 else (layer, at)
        assert distance(tensor, wanted[key]) < TOLERANCE, key
    tokens, gaps = reference.greedy(done.prompt_token_ids, 9, ops)
    assert same_until_tie(done.token_ids, tokens, gaps)
    assert distance(done.rows[2, "resid_post"][:p], plain.rows[2, "resid_post"][:p]) > 1000 * TOLERANCE


def test_ops_at_resid_pre_come_after_those_of_the_layer_before_at_the_same_tap(start: Start) -> None:
    engine = start()
    v = np.eye(1, 64, 3, dtype=np.float32)[0]
    # Written in the other order on purpose: the stream passes resid_post of layer 1 before resid_pre of layer 2.
    steering = Steering.of(
        Add(vector=v, scale=5, layers=2, site="resid_pre"), Ablate(vector=v, layers=1, site="resid_post")
    )
    rows = engine.generate("Hello", LENGTHS, steer=steering, capture=Capture(layers=1)).rows
    assert torch.allclose(rows[1][:, 3], torch.tensor(5.0), atol=1e-5)


def test_rows_are_after_steering_unless_asked_for_before(start: Start) -> None:
    engine = start()
    v = np.linspace(-1, 1, 64, dtype=np.float32)
    add = Add(vector=v, scale=2.0, layers=1)
    after = engine.generate("Hello", LENGTHS, steer=add, capture=Capture(layers=1)).rows[1]
    before = engine.generate("Hello", LENGTHS, steer=add, capture=Capture(layers=1, before_steering=True)).rows[1]
    assert torch.allclose(after - before, 2 * torch.from_numpy(v).expand_as(after), atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul")
def test_bfloat16_rows_agree_with_the_reference_to_bfloat16_precision(start: Start) -> None:
    """Teacher-forced: the tokens are fixed, so that a rounding difference cannot change the text. What rounding does to
    a row depends on the processor (1 to 4 % here), so the measure is what it does to transformers' own rows, beside
    those of the same weights in float64: ours are hardly further from these, nor the two roundings from each other."""
    engine = start(dtype=torch.bfloat16)
    model = copy.deepcopy(tiny.model()).to(torch.bfloat16)
    reference, exact = Reference(model), Reference(copy.deepcopy(model).double())
    for done in engine.generate(PROMPTS, LENGTHS, capture=Capture()):
        ids = [*done.prompt_token_ids, *done.token_ids[:-1]]
        (_, wanted), (_, true) = reference.run(ids), exact.run(ids)
        for layer in range(4):
            rows, theirs, best = (found.double() for found in (
                done.rows[layer], wanted[layer, "resid_post"], true[layer, "resid_post"]
            ))  # fmt: skip
            assert done.rows[layer].dtype == torch.bfloat16
            rounding = far(theirs, best)
            assert 1e-3 < rounding < 5e-2
            assert far(rows, best) < 1.5 * rounding
            assert far(rows, theirs) < 1.5 * rounding
            assert float(torch.cosine_similarity(rows, best, dim=-1).min()) > 0.999


def far(rows: torch.Tensor, wanted: torch.Tensor) -> float:
    """The worst row, in relative L2."""
    return float(((rows - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())

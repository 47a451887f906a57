"""Planning: every way a request can fail to fit a model, all of them at once, and what a good one becomes."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from steerscope.engines.plan import Facts, Plan, Planner, Prompt, RequestSpecs, RequestTemplate, TemplateCache
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Ablate, Add, Cap, Steering, VectorData
from steerscope.specs.tokens import EVERYWHERE, MessageSpan, Positions
from steerscope.specs.watch import Watch

FACTS = Facts(
    name="tiny",
    layers=4,
    hidden=3,
    vocab=100,
    context=32,
    max_columns=3,
    refused_sites={"resid_mid": "attention and MLP run in parallel"},
)
SHARED = VectorData(shared=[3.0, 0.0, 4.0])  # type: ignore[arg-type]
LAYERED = VectorData(per_layer={1: [1.0, 2.0, 2.0], 2: [0.0, 0.0, 2.0]})  # type: ignore[dict-item]
WIDE = VectorData(shared=[1.0] * 5)  # type: ignore[arg-type]
NAMED = {"shared": SHARED, "layered": LAYERED, "wide": WIDE}
SHORT = Sampling(max_tokens=10)
PROMPT = Prompt([5, 6, 7, 8, 9, 10])
SPANS = (MessageSpan(0, "user", (1, 3), (0, 4)),)


def plan(
    *ops: Add | Cap | Ablate,
    prompt: Prompt = PROMPT,
    facts: Facts = FACTS,
    capture: Capture | None = None,
    max_tokens: int = 10,
) -> Plan:
    return Planner(facts, NAMED).plan("r1", prompt, Sampling(max_tokens=max_tokens), Steering(ops=ops), capture)


def problems(*ops: Add | Cap | Ablate, **options) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as caught:
        plan(*ops, **options)
    assert all(problem.remedy for problem in caught.value.problems)
    return [(problem.field, str(problem)) for problem in caught.value.problems]


# --- refusals, one by one


@pytest.mark.parametrize(
    ("op", "field", "text"),
    [
        (
            Add(vector="hapy", layers=1),
            "vector",
            "no vector is named 'hapy'; register it; known: layered, shared, wide",
        ),
        (Add(vector="wide", layers=1), "vector", "the vector has 5 numbers, tiny has hidden size 3"),
        (Add(vector=WIDE, layers=1), "vector", "the vector has 5 numbers, tiny has hidden size 3"),
        (Add(vector="shared", layers=4), "layers", "layer 4 is out of range; tiny has layers 0–3"),
        (Add(vector="shared", layers=[0, 4, 9]), "layers", "layers 4, 9 are out of range; tiny has layers 0–3"),
        (Add(vector="layered", layers="1-3"), "layers", "the vector has no layers [3]; it has 1, 2"),
        (Add(vector="layered", layers="all"), "layers", "the vector has no layers [0, 3]; it has 1, 2"),
        (Add(vector="shared"), "layers", "the same for every layer; say which layers to steer"),
        (Add(vector={7: [1.0] * 3}), "layers", "layer 7 is out of range"),  # type: ignore[arg-type]
        (
            Add(vector="shared", layers=1, site="resid_mid"),
            "site",
            "resid_mid cannot be had on tiny: attention and MLP",
        ),
        (
            Add(vector="shared", layers=1, tokens="positions=[5:5]"),
            "tokens",
            "selects no token of this request; widen it",
        ),
        (Add(vector="shared", layers=1, tokens="generated & prompt"), "tokens", "selects no token"),
        (Add(vector="shared", layers=1, tokens="positions=[15:]"), "tokens", "selects no token"),  # rows end at 14
        (Add(vector="shared", layers=1, tokens="positions=[15]"), "tokens", "position 15 is never computed"),
        (Add(vector="shared", layers=1, tokens="positions=[-7]"), "tokens", "position -7 is before the prompt's start"),
        (Add(vector="shared", layers=1, tokens="role=user"), "tokens", "needs chat messages with proven spans"),
    ],
)
def test_an_op_that_cannot_be_honoured_is_refused_with_its_field_and_a_remedy(op, field: str, text: str):
    ((found, message),) = problems(op)
    assert found == f"steer.ops[0].{field}"
    assert text in message


def test_with_no_vector_registered_the_refusal_says_so():
    with pytest.raises(InvalidRequest, match="no vector is named 'x'; register it; known: none"):
        Planner(FACTS, {}).plan("r", PROMPT, Sampling(), Steering.of(Add(vector="x", layers=1)), None)


def test_steering_only_what_is_generated_is_refused_when_no_generated_token_has_a_row():
    op = Add(vector="shared", layers=1, tokens="generated")
    assert plan(op, max_tokens=2).template.applied[0].positions.count(7) == 1
    ((field, text),) = problems(op, max_tokens=1)  # the one sampled token is never fed back
    assert field == "steer.ops[0].tokens"
    assert "selects no token" in text


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "text"),
    [
        (Prompt([]), 10, "prompt", "the prompt is empty; give at least one token"),
        (Prompt([5, 100]), 10, "prompt", "token id 100 does not exist; tiny has ids 0–99"),
        (Prompt([5, -1]), 10, "prompt", "token id -1 does not exist; tiny has ids 0–99"),
        (Prompt(["a"]), 10, "prompt", "token id 'a' does not exist"),  # type: ignore[list-item]
        (Prompt([1.5]), 10, "prompt", "token id 1.5 does not exist"),  # type: ignore[list-item]
        (Prompt([5, 1 << 70]), 10, "prompt", f"token id {1 << 70} does not exist"),
        (
            Prompt([5] * 32),
            1,
            "prompt",
            "the prompt has 32 tokens, the context of tiny holds 32; shorten it to at most 31",
        ),
        (Prompt([5] * 500), 10, "prompt", "the prompt has 500 tokens"),
        (Prompt([5] * 30), 3, "sampling.max_tokens", "30 prompt tokens + max_tokens 3 exceed the context of 32; lower"),
        (Prompt([5]), 32, "sampling.max_tokens", "lower max_tokens to 31"),
    ],
)
def test_a_prompt_that_does_not_fit_the_model_is_refused(prompt: Prompt, max_tokens: int, field: str, text: str):
    ((found, message),) = problems(prompt=prompt, max_tokens=max_tokens)
    assert found == field
    assert text in message


def test_the_context_may_be_filled_to_the_last_token_and_may_be_unknown():
    assert plan(prompt=Prompt([5] * 30), max_tokens=2).most_rows == 31
    assert plan(prompt=Prompt([5] * 500), facts=replace(FACTS, context=None)).most_rows == 509


def test_token_ids_may_come_from_numpy():
    assert plan(prompt=Prompt(list(np.array([0, 99])))).prompt.token_ids == [0, 99]


def test_more_columns_than_the_engine_has_are_refused_with_both_numbers():
    ops = [Add(vector="shared", layers=1, tokens=f"positions=[{i}]") for i in range(4)]
    assert len(plan(*ops[:3]).columns) == 3
    ((field, text),) = problems(*ops)
    assert field == "steer.ops"
    assert "the ops need 4 columns, the engine has 3 per token" in text


@pytest.mark.parametrize(
    ("capture", "field", "text"),
    [
        (Capture(layers="2-4"), "capture.layers", "layer 4 is out of range; tiny has layers 0–3"),
        (Capture(layers=[4, 5, 6]), "capture.layers", "layers 4, 5, 6 are out of range"),
        (Capture(sites=("resid_post", "resid_mid")), "capture.sites", "resid_mid cannot be had on tiny"),
        (Capture(tokens="message=0"), "capture.tokens", "needs chat messages"),
        (Capture(tokens="positions=[99]"), "capture.tokens", "position 99 is never computed"),
    ],
)
def test_a_capture_that_cannot_be_had_is_refused(capture: Capture, field: str, text: str):
    ((found, message),) = problems(capture=capture)
    assert found == field
    assert text in message


def test_a_thousand_layers_out_of_range_are_one_problem():
    ((_, text),) = problems(Add(vector="shared", layers="0-1999"))
    assert len(text) < 300


# --- refusals, all together


def test_all_problems_of_a_request_are_reported_together():
    found = problems(
        Add(vector="nobody", layers=1),
        Add(vector="wide", layers=77, site="resid_mid", tokens="role=user"),
        Add(vector="shared", layers=1),
        Cap(vector="shared", layers=[2, 88], max=1, tokens="positions=[40]"),
        Ablate(vector="shared"),
        prompt=Prompt([200] * 40),
        capture=Capture(layers=99, sites=("resid_mid",), tokens="role=user"),  # type: ignore[arg-type]
    )
    assert sorted(field for field, _ in found) == [
        "capture.layers",
        "capture.sites",
        "capture.tokens",
        "prompt",
        "prompt",
        "steer.ops[0].vector",
        "steer.ops[1].layers",
        "steer.ops[1].site",
        "steer.ops[1].tokens",
        "steer.ops[1].vector",
        "steer.ops[3].layers",
        "steer.ops[4].layers",
    ]


# --- what a good request becomes


def test_without_steering_and_capture_nothing_is_tapped():
    made = plan()
    assert made.columns == ()
    assert made.template.applied == ()
    assert made.capture is None
    assert made.template.tapped == set()
    assert made.most_rows == 6 + 10 - 1


def test_an_op_becomes_the_equations_vector_and_coefficients_at_each_of_its_layers():
    made = plan(Add(vector="layered", scale=6.0), Cap(vector="shared", layers="0-1", max=2.0))
    add, cap = made.columns
    assert {key: v.tolist() for key, v in add.vectors.items()} == {
        (1, "resid_post"): [1.0, 2.0, 2.0],  # as it is
        (2, "resid_post"): [0.0, 0.0, 2.0],
        (0, "resid_post"): pytest.approx([0.6, 0.0, 0.8]),  # at unit length; layer 0 had room in the first column
    }
    assert {key: v.tolist() for key, v in cap.vectors.items()} == {(1, "resid_post"): pytest.approx([0.6, 0.0, 0.8])}
    assert cap.coefficients[1, "resid_post"] == Cap(vector="x", max=2.0).coefficients()
    assert all(v.dtype == np.float32 for column in made.columns for v in column.vectors.values())
    assert made.template.tapped == {(0, "resid_post"), (1, "resid_post"), (2, "resid_post")}


@pytest.mark.parametrize("size", [1e-30, 1e-44, 1.0, 1e38])
def test_directions_of_any_size_have_unit_length_where_the_op_needs_it(size: float):
    vector = VectorData(shared=[size, -size, size])  # type: ignore[arg-type]
    ((_, found),) = plan(Ablate(vector=vector, layers=1)).columns[0].vectors.items()
    assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-6)


def test_applied_says_where_each_op_really_acts_in_the_order_of_the_request():
    ops = (Add(vector="layered", tokens="prompt"), Cap(vector="shared", layers="all", max=1, tokens="last_prompt"))
    made = plan(*ops)
    assert [applied.op for applied in made.template.applied] == list(ops)
    assert [applied.layers for applied in made.template.applied] == [(1, 2), (0, 1, 2, 3)]
    assert [applied.positions for applied in made.template.applied] == [Positions(((0, 6),)), Positions(((5, 6),))]


def test_roles_are_resolved_with_the_spans_of_the_chat():
    chat = Prompt([5] * 6, SPANS)
    assert plan(Add(vector="layered", tokens="role=user"), prompt=chat).columns[0].positions == Positions(((1, 3),))
    answer = plan(Add(vector="layered", tokens="role=assistant"), prompt=chat).columns[0].positions
    assert [i for i in range(9) if i in answer] == [6, 7, 8]


def cached(
    cache: TemplateCache, op: Add, prompt: Prompt = PROMPT, sampling: Sampling = SHORT, version: int = 0
) -> Plan:
    """Plan a request through a cache."""
    specs = RequestSpecs(sampling, Steering.of(op), None, None)
    return cache.plan(Planner(FACTS, NAMED), "r", prompt, specs, version)


def test_equal_requests_share_a_template_and_others_do_not():
    cache, op = TemplateCache(), Add(vector="layered", tokens="last_prompt")
    first = cached(cache, op)
    other_ids = Prompt([9] * 6)
    assert cached(cache, op.model_copy(), other_ids, SHORT.model_copy()).template is first.template
    assert cached(cache, op, sampling=Sampling(max_tokens=11)).template is not first.template
    assert cached(cache, op, version=1).template is not first.template  # a name was registered again
    longer = cached(cache, op, Prompt([5] * 7)).template
    assert longer.applied[0].positions == Positions(((6, 7),))
    chat = Prompt([5] * 6, SPANS)
    assert cached(cache, op, chat).template is not first.template
    with pytest.raises(InvalidRequest, match="does not exist"):
        cached(cache, op, Prompt([1000] * 6))


def test_changed_numbers_of_a_vector_are_seen():
    data = VectorData(per_layer={1: [1.0, 2.0, 2.0], 2: [0.0, 0.0, 2.0]})  # type: ignore[dict-item]
    cache, op = TemplateCache(), Add(vector=data)
    before = cached(cache, op).columns[0].vectors[1, "resid_post"]
    assert cached(cache, op).columns[0].vectors[1, "resid_post"] is before
    data.per_layer[1] = data.per_layer[2]
    assert cached(cache, op).columns[0].vectors[1, "resid_post"].tolist() == [0.0, 0.0, 2.0]
    assert before.tolist() == [1.0, 2.0, 2.0]
    del data.per_layer[1]
    assert cached(cache, op).template.applied[0].layers == (2,)


def test_a_template_with_a_watch_lives_only_as_long_as_its_requests():
    """It holds a lens pack in memory."""
    planner = SimpleNamespace(check_prompt=lambda *_: None, template=lambda *_: RequestTemplate(6, 15), problems=[])
    cache, specs = TemplateCache(), RequestSpecs(SHORT, Steering(), None, Watch(pack="p"))
    plans = [cache.plan(planner, name, PROMPT, specs, 0) for name in "ab"]  # type: ignore[arg-type]
    assert plans[0].template is plans[1].template
    plans.clear()
    gc.collect()
    assert not cache._known


def test_a_limited_number_of_templates_is_kept():
    cache, ops = TemplateCache(), [Add(vector="shared", layers=1, scale=float(i)) for i in range(1, 200)]
    for op in ops:
        cached(cache, op)
    gc.collect()
    assert len(cache._known) <= 128
    assert cached(cache, ops[-1]).template is cached(cache, ops[-1]).template


def test_at_a_shared_tap_the_ops_of_resid_post_come_before_those_of_the_next_resid_pre():
    """Whatever the order in the request: layer 1 is left before layer 2 is entered."""
    pre = Add(vector="shared", layers=2, site="resid_pre", scale=2.0)
    post = Add(vector="shared", layers=1, site="resid_post", scale=1.0)
    for ops in ((pre, post), (post, pre)):
        made = plan(*ops)
        assert made.template.tapped == {(1, "resid_post")}
        assert [column.coefficients[1, "resid_post"][0] for column in made.columns] == [1.0, 2.0]


def test_ops_of_one_site_keep_their_order_at_a_shared_tap():
    pre = [Add(vector="shared", layers=2, site="resid_pre", scale=x) for x in (3.0, 4.0)]
    post = Add(vector="shared", layers=1, scale=1.0)
    made = plan(pre[0], post, pre[1])
    assert [column.coefficients[1, "resid_post"][0] for column in made.columns] == [1.0, 3.0, 4.0]


def test_a_capture_of_both_names_of_a_tap_reads_it_once():
    made = plan(capture=Capture(layers="0-2", sites=("resid_pre", "resid_post"), tokens="prompt"))
    assert made.capture is not None
    assert made.capture.asked == tuple((layer, site) for layer in range(3) for site in ("resid_pre", "resid_post"))
    assert made.capture.keys == ((0, "resid_pre"), (0, "resid_post"), (1, "resid_post"), (2, "resid_post"))
    assert made.template.tapped == set(made.capture.keys)
    assert made.capture.n_bytes(made.most_rows, hidden=3, itemsize=2) == 6 * 4 * 3 * 2


def test_a_capture_of_all_tokens_has_room_for_every_row_and_a_reduced_one_for_one():
    whole, reduced = plan(capture=Capture()).capture, plan(capture=Capture(reduce="mean")).capture
    assert whole is not None
    assert reduced is not None
    assert whole.positions == EVERYWHERE
    assert whole.n_bytes(15, hidden=3, itemsize=2) == 15 * 4 * 3 * 2
    assert reduced.n_bytes(15, hidden=3, itemsize=2) == 4 * 3 * 4
    assert whole.keys == tuple((layer, "resid_post") for layer in range(4))

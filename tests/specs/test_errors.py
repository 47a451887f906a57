"""One error for a whole request: every problem, with the field as the user wrote it, and what to do about it."""

import copy
import json
import pickle

import pytest

from steerscope.specs.capture import Capture
from steerscope.specs.chat import Message, parse_chat
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Add, Steering

BAD_OPS: list[dict[str, object]] = [
    {"op": "add", "vector": "ok"},
    {"op": "add", "vector": "v", "scale": "loud", "tokens": "promt", "layers": "9-3"},
    {"op": "cap", "vector": {"per_layer": {"3": "!!"}}},
    {"op": "ablate", "scale": 0.5, "to": 1.0, "strength": 3},
]
FIELDS = ["ops[1].layers", "ops[1].scale", "ops[1].tokens", "ops[2].vector.per_layer.3", "ops[3].strength"]


def fields_of(build) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        build()
    assert all(problem.what and problem.remedy for problem in caught.value.problems)
    return sorted(problem.field for problem in caught.value.problems)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Steering(ops=BAD_OPS),  # type: ignore[arg-type]
        lambda: Steering.parse({"ops": BAD_OPS}),
        lambda: Steering.parse(BAD_OPS),
        lambda: Steering.from_json(json.dumps({"ops": BAD_OPS})),
        lambda: Steering.from_json(json.dumps(BAD_OPS).encode()),
    ],
    ids=["constructor", "parse", "parse a list", "from_json", "from_json bytes"],
)
def test_all_problems_of_all_ops_come_together_with_the_fields_the_user_wrote(build):
    found = fields_of(build)
    assert [field for field in found if field in FIELDS] == FIELDS
    assert "ops[3].vector" in found  # missing
    assert not [field for field in found if ".add" in field or ".cap" in field or ".ablate" in field]


def test_a_missing_field_an_unknown_op_and_a_missing_op_say_what_to_do():
    with pytest.raises(InvalidRequest) as caught:
        Steering.parse([{"op": "add"}, {"op": "rotate", "vector": "v"}, {"vector": "v"}, 7])
    texts = [str(problem) for problem in caught.value.problems]
    assert texts[0] == "ops[0].vector: is missing; add it"
    assert "'rotate'" in texts[1]
    assert "'add', 'cap', 'ablate'" in texts[1]
    assert texts[1].endswith("; choose one of them")
    assert texts[2].endswith("; add the field")
    assert texts[3].startswith("ops[3]: ")


@pytest.mark.parametrize("name", ["add", "cap", "ablate", "self", "cls", "data"])
def test_an_unknown_field_is_named_whatever_its_name(name: str):
    assert fields_of(lambda: Sampling.parse({name: 1})) == [name]
    assert fields_of(lambda: Sampling.from_json(json.dumps({name: 1}))) == [name]
    assert fields_of(lambda: Steering.parse([{"op": "add", "vector": "v", name: 1}])) == [f"ops[0].{name}"]


def test_a_semicolon_in_what_the_user_wrote_does_not_split_the_remedy_wrongly():
    for build in (
        lambda: Add(vector="v", tokens="a; b"),
        lambda: Add(vector="v", layers="1; 2"),
        lambda: Steering.parse([{"op": "x; y"}]),
        lambda: Capture.parse({"reduce": "mean; last"}),
    ):
        with pytest.raises(InvalidRequest) as caught:
            build()
        (problem,) = caught.value.problems
        assert "; " in problem.what
        assert "; " not in problem.remedy
        assert problem.remedy.startswith(("use all", "write 12", "choose one"))


@pytest.mark.parametrize("text", ["", "{", '{"ops": [}', "\x00", '{"max_tokens": 1} trailing'])
def test_text_that_is_not_json_is_refused_as_such(text: str):
    with pytest.raises(InvalidRequest) as caught:
        Sampling.from_json(text)
    (problem,) = caught.value.problems
    assert problem.field == ""
    assert "JSON" in problem.what


@pytest.mark.parametrize("data", [None, 3, "max_tokens", [1]])
def test_data_of_the_wrong_shape_is_refused(data: object):
    assert fields_of(lambda: Sampling.parse(data)) == [""]


def test_an_invalid_request_is_a_value_error_and_a_steerscope_error():
    with pytest.raises(InvalidRequest) as caught:
        Sampling(n=0)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SteerscopeError)
    assert caught.value.__cause__ is None  # pydantic's own report stays out of the traceback
    assert caught.value.__suppress_context__


def test_one_problem_is_one_line_and_several_are_counted():
    one, two = Problem("a", "is bad", "mend it"), Problem("", "is worse", "leave it")
    assert str(InvalidRequest([one])) == "a: is bad; mend it"
    assert str(InvalidRequest([one, two])) == "2 problems:\n  a: is bad; mend it\n  is worse; leave it"


def test_a_problem_can_be_seen_from_further_out():
    problem = Problem("scale", "is bad", "mend it")
    assert problem.under("ops[1]").field == "ops[1].scale"
    assert problem.under("").field == "scale"
    assert Problem("", "is bad", "mend it").under("ops[1]").field == "ops[1]"
    assert Problem("[3]", "is bad", "mend it").under("layers").field == "layers[3]"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_invalid_request_comes_whole_through_copying_and_other_processes(again):
    error = InvalidRequest([Problem("a", "is bad", "mend it"), Problem("b", "is worse", "leave it")])
    twin = again(error)
    assert type(twin) is InvalidRequest
    assert twin.problems == error.problems
    assert str(twin) == str(error)


def test_long_values_are_cut_in_the_message():
    with pytest.raises(InvalidRequest) as caught:
        Sampling.parse({"max_tokens": "x" * 10_000})
    assert len(str(caught.value)) < 300


# --- chats


def test_all_bad_messages_of_a_chat_are_reported_together():
    chat = [{"role": "user", "content": "hi"}, {"role": "", "content": "x"}, {"role": "user", "text": "x"}, 3]
    assert fields_of(lambda: parse_chat(chat)) == [  # type: ignore[arg-type]
        "messages[1].role",
        "messages[2].content",
        "messages[2].text",
        "messages[3]",
    ]


def test_messages_may_be_given_as_objects_or_dicts():
    message = Message(role="user", content="")
    assert parse_chat([message, {"role": "user", "content": ""}]) == [message, message]


def test_an_empty_chat_is_refused():
    assert fields_of(lambda: parse_chat([])) == ["messages"]

"""Contrast data from files: pairs, labelled texts and chats, and every bad line named."""

import json
from pathlib import Path

import pytest

from steerscope.extraction import DatasetEntry, Examples, load_examples
from steerscope.specs.errors import BadFile, InvalidRequest

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_pairs_are_read_in_order_with_blank_lines_skipped(tmp_path: Path) -> None:
    pairs = [{"positive": f"yes {i}", "negative": f"no {i}"} for i in range(3)]
    chat = {"positive": CHAT, "negative": [*CHAT[:1], {"role": "assistant", "content": "Go away."}]}
    found = load_examples(write(tmp_path / "a.jsonl", *pairs, "", chat))
    assert found.texts == ("yes 0", "yes 1", "yes 2", CHAT, "no 0", "no 1", "no 2", chat["negative"])
    assert found.positive == (True,) * 4 + (False,) * 4
    assert found.pairs == (0, 1, 2, 3, 0, 1, 2, 3)


def test_labelled_texts_and_chats_have_no_pairs(tmp_path: Path) -> None:
    texts = [{"text": f"text {i}", "label": "positive" if i % 2 else "negative"} for i in range(7)]
    found = load_examples(write(tmp_path / "a.jsonl", *texts, {"messages": CHAT, "label": "positive"}))
    assert found.pairs is None
    assert found.positive == (False, True, False, True, False, True, False, True)
    assert found.texts[-1] == CHAT


def test_every_bad_line_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"positive": "yes", "negative": "no"},
        "not json",
        {"positive": "yes"},
        {"positive": "", "negative": "same"},
        {"text": "x", "label": "maybe"},
        [1, 2],
        {"messages": [{"role": "user"}], "label": "positive"},
        {"text": "x", "label": ["positive"]},
        {"text": "fine", "label": "positive"},
    )
    with pytest.raises(InvalidRequest) as caught:
        load_examples(path)
    places = [problem.field for problem in caught.value.problems]
    wanted = ["2", "3", "4.positive", "5.label", "6", "7.messages.messages[0].content", "8.label", ""]
    assert places == [f"{path}:{place}" if place else str(path) for place in wanted]
    assert "mixed" in caught.value.problems[-1].what
    assert all(problem.remedy for problem in caught.value.problems)


def test_too_few_examples_are_refused_for_each_side(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": str(i), "label": "positive"} for i in range(9)))
    with pytest.raises(InvalidRequest, match="0 are negative; give at least 4 of them"):
        load_examples(path)
    with pytest.raises(InvalidRequest, match="2 problems"):
        Examples.of_pairs([DatasetEntry("yes", "no")] * 3)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_line_ends_where_json_lines_end_and_nowhere_else(tmp_path: Path, mark: str) -> None:
    pairs = [{"positive": f"yes{mark}{i}", "negative": f"no {i}"} for i in range(4)]
    path = tmp_path / "a.jsonl"
    path.write_bytes("\r\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs).encode())
    assert load_examples(path).texts[:4] == tuple(pair["positive"] for pair in pairs)


def test_examples_that_do_not_fit_together_are_refused() -> None:
    texts, labels = tuple("abcdefgh"), (True,) * 4 + (False,) * 4
    with pytest.raises(InvalidRequest, match="there are 7 texts, 8 positive; give one of each for every example"):
        Examples(texts[:7], labels)
    with pytest.raises(InvalidRequest, match="there are 8 texts, 8 positive, 2 pairs"):
        Examples(texts, labels, (0, 1))
    with pytest.raises(InvalidRequest) as caught:
        Examples(texts, labels, (0, 1, 2, 2, 0, 1, 3, 3))
    assert [problem.field for problem in caught.value.problems] == ["pairs[2]", "pairs[3]"]
    assert "is not one example of either label; give one positive and one negative" in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("gone.jsonl", "bytes.jsonl"):
        with pytest.raises(BadFile, match=name):
            load_examples(tmp_path / name)


def test_a_chat_that_is_no_chat_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="positive.messages: has 0 items; give at least 1"):
        DatasetEntry([], "no")
    with pytest.raises(InvalidRequest, match="positive.messages: cannot be 3; give a list"):
        DatasetEntry(3, "no")  # type: ignore[arg-type]

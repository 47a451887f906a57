"""A tiny model in a folder, and a corpus with everything in it that a corpus should not have."""

import json
import random
from pathlib import Path

import pytest

from support import tiny

WORDS = tiny.TEXT.split()
CHAT = [{"role": "user", "content": "How was your week?"}, {"role": "assistant", "content": "I had a wonderful time."}]
LINES = 60
BAD = {
    8: "not JSON",
    21: "the context",
    34: "has text and messages",
    35: "has no content",
    36: "is list, not an object",
}
BAD |= {37: "messages[0].role", 38: "text is empty, or not a text", 39: "token id 99999 does not exist", 40: "not JSON"}


def line(i: int) -> bytes:
    odd: dict[int, object] = {
        21: {"text": "word " * 600},
        25: {"messages": CHAT, "id": 25},
        26: {"token_ids": [20, 21, 22, 23], "topic": "ids"},
        34: {"text": "a", "messages": CHAT},
        35: {"id": "x"},
        36: ["text"],
        37: {"messages": [{"content": "who?"}]},
        38: {"text": ""},
        39: {"token_ids": [99999]},
    }
    if i in (8, 30, 40):
        return {8: b'{"text": "half', 30: b"  ", 40: b'{"text": "caf\xe9"}'}[i]
    words = random.Random(i).choices(WORDS, k=3 + i % 17)
    return json.dumps(odd.get(i, {"id": f"d{i}", "text": " ".join(words), "topic": f"t{i % 3}"})).encode()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.jsonl"
    path.write_bytes(b"\n".join(line(i) for i in range(LINES)))  # no newline at the end
    return path

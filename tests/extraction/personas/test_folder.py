"""Ledgers and shards: what a crash leaves behind is found and dropped, nothing else."""

from pathlib import Path

import pytest
import torch

from steerscope.extraction.personas.build import write_pt
from steerscope.extraction.personas.run import Shards
from steerscope.extraction.runs import Ledger


def records(n: int) -> list[dict[str, object]]:
    return [{"id": f"id-{i}", "text": "naïve 🎉\n" * i} for i in range(n)]


def test_a_ledger_cut_at_any_byte_keeps_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    Ledger(path).append(records(4))
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        ledger = Ledger(path)
        lines = whole[:size].count(b"\n")
        assert list(ledger.records) == [f"id-{i}" for i in range(lines)]
        ledger.append([one for one in records(4) if one["id"] not in ledger.records])
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line", [b"[1]\n", b'{"no": "id"}\n', b'{"id": 5}\n', b"\xff\xfe\n", b"\n", b'{"id": "id-0"}\n']
)
def test_lines_that_are_none_of_ours_or_come_twice_are_dropped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    Ledger(path).append(records(2))
    whole = path.read_bytes()
    path.write_bytes(whole + line)
    ledger = Ledger(path)
    assert list(ledger.records.values()) == records(2)
    assert path.read_bytes() == whole + line  # who only reads changes nothing
    ledger.append(records(3)[2:])
    ledger.append(records(4)[3:])
    assert path.read_bytes().startswith(whole)
    assert list(Ledger(path).records.values()) == records(4)
    assert path.read_bytes().count(b"\n") == 4


def test_reading_what_is_not_there_makes_no_folder(tmp_path: Path) -> None:
    assert Ledger(tmp_path / "a" / "b.jsonl").records == {}
    Shards(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_shard_gives_its_rows_back_in_any_order(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "shards")
    first, second = torch.randn(3, 2, 4), torch.randn(2, 2, 4)
    names = shards.write("fox", first), shards.write("fox", second)
    asked = [{"shard": names[1], "row": 1}, {"shard": names[0], "row": 2}, {"shard": names[1], "row": 0}]
    assert torch.equal(shards.read(asked), torch.stack([second[1], first[2], second[0]]))


def test_a_shard_with_one_changed_byte_or_none_at_all_is_not_held(tmp_path: Path) -> None:
    name = Shards(tmp_path).write("fox", torch.randn(3, 2, 4))
    assert Shards(tmp_path).holds({"shard": name, "row": 0})
    assert Shards(tmp_path).holds({"shard": None, "row": None})
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert not Shards(tmp_path).holds({"shard": name, "row": 0})
    path.unlink()
    assert not Shards(tmp_path).holds({"shard": name, "row": 0})
    assert not Shards(tmp_path / "deeper").holds({"shard": f"../{name}", "row": 0})


def test_the_same_tensors_make_the_same_file(tmp_path: Path) -> None:
    data = {"pos_all": torch.randn(2, 3)}
    for name in ("a.pt", "b.pt"):
        write_pt(tmp_path / name, data)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()

"""The list of guards is true of the code as it is, and so is the committed result of the list."""

import json
from pathlib import Path

import pytest

from steerscope.bench.stress.faults import FAULTS
from steerscope.bench.stress.mutants import MUTANTS, Mutant
from steerscope.bench.stress.mutate import run_one

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}: {m.old.strip()[:40]} > {m.new.strip()[:20]}")
def test_every_guard_is_where_the_list_says(mutant: Mutant) -> None:
    text = (ROOT / "src" / "steerscope" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert (ROOT / mutant.tests).is_file()
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


def test_a_guard_that_no_test_looked_at_is_not_taken_for_noticed(tmp_path: Path) -> None:
    mutant = Mutant("residual/rows.py", "1", "2")
    code, empty = tmp_path / "src" / "steerscope" / mutant.file, tmp_path / mutant.tests
    for path, text in ((code, "x = 1\n"), (empty, "")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    with pytest.raises(RuntimeError, match="could not be run"):
        run_one(tmp_path, mutant)
    assert code.read_text() == "x = 1\n"


def test_the_committed_result_is_of_this_list_and_every_survivor_is_explained() -> None:
    known = json.loads((RESULTS / "mutants.json").read_text())["mutants"]
    assert {(one["file"], one["old"], one["new"]) for one in known} == {(m.file, m.old, m.new) for m in MUTANTS}
    assert [one for one in known if not one["killed_by"] and not one["why"]] == []
    assert [one for one in known if one["killed_by"] and one["why"]] == []


@pytest.mark.parametrize("test", sorted({test for fault in FAULTS for test in fault.tests}))
def test_every_fault_has_the_test_it_names(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_committed_run_has_every_fault() -> None:
    known = json.loads((RESULTS / "faults.json").read_text())["faults"]
    assert [(one["name"], one["promise"], tuple(one["tests"])) for one in known] == [
        (fault.name, fault.promise, fault.tests) for fault in FAULTS
    ]
    assert not any(one["missing"] for one in known)
    assert not any(one["failed"] for one in known)


@pytest.mark.parametrize(("name", "least"), [("vllm", 10_000), ("hf", 256)])
def test_the_committed_ledgers_come_out(name: str, least: int) -> None:
    found = json.loads((RESULTS / "stress" / f"{name}.json").read_text())
    assert found["wrong"] == []
    assert found["sent"] == found["finished"] + found["cancelled"] + found["refused"] >= least
    assert found["reserved_bytes"] == found["delivered_bytes"] + found["released_bytes"]
    assert not any(found["left_over"].values())
    assert found["holds"]

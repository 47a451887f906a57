"""What goes wrong around an engine, what is promised then, and the tests that make it happen.

    python -m bench.stress.faults --out bench/results/faults.json      from the root of the repository

Runs those tests, here and in the environment of vLLM, and writes what became of them; docs/stress.md shows it.
"""

import argparse
import json
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree  # nosec B405 # of a report that this program has made
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import commit
from steerscope.bench.one import versions, write

_VLLM = Path(".venv-vllm/bin/python")


@dataclass(frozen=True)
class Fault:
    name: str
    promise: str
    tests: tuple[str, ...]  # file::function, of which every case is run


FAULTS = (
    Fault(
        "an engine's worker is killed",
        "requests in flight fail within a minute with the reason, later ones are refused, closing does not hang; a "
        "server starts the engine again with its vectors and steering, or ends",
        (
            "tests/engines/vllm/test_lifetimes.py::test_a_killed_engine_core_ends_its_requests_and_refuses_others",
            "tests/serving/test_life.py::test_an_engine_that_dies_is_started_again_with_its_vectors_and_steering",
            "tests/serving/test_life.py::test_an_engine_that_cannot_be_started_again_ends_the_server",
        ),
    ),
    Fault(
        "a worker of a corpus is killed",
        "it is started again, its shard is read again, and the store has the same checksum",
        (
            "tests/corpus/test_run.py::test_a_worker_that_is_killed_is_started_again_and_nothing_changes",
            "tests/corpus/test_run.py::test_killed_at_twenty_random_moments_it_ends_with_the_same_checksum",
        ),
    ),
    Fault(
        "a client is killed while it fetches rows",
        "other clients are not affected, and the rows can be fetched again until they are dropped",
        (
            "tests/serving/test_faults.py::"
            "test_a_client_that_is_killed_while_it_fetches_hurts_nobody_and_the_rows_can_be_fetched_again",
        ),
    ),
    Fault(
        "a client leaves in mid-stream",
        "its request ends between two steps and its rows are given back, without a warning",
        (
            "tests/serving/test_life.py::test_a_client_that_leaves_takes_its_request_along",
            "tests/engines/test_contract.py::"
            "test_rows_that_came_before_a_client_left_its_stream_are_given_back_without_a_warning",
        ),
    ),
    Fault(
        "shared memory or the capture budget is full",
        "a file system that is too small is found at the start; a capture waits for room, and is refused with the "
        "holders' names when none is freed",
        (
            "tests/capture/test_transport.py::test_a_full_disk_is_found_at_the_start_and_nothing_is_left",
            "tests/engines/test_contract.py::test_a_capture_waits_for_room_and_is_refused_when_none_comes",
            "tests/serving/test_life.py::test_a_capture_without_room_is_told_so_and_expired_ones_make_room",
        ),
    ),
    Fault(
        "the disk is full",
        "what was whole stays whole and nothing half written is left; a server sends captured rows without it",
        (
            "tests/serving/test_faults.py::test_rows_are_fetched_though_the_disk_is_full",
            "tests/capture/test_store.py::test_a_disk_that_is_full_stops_the_writing_and_leaves_what_was_whole",
            "tests/capture/test_rows.py::test_a_full_disk_leaves_the_old_file_whole_and_nothing_half_written",
            "tests/vectors/test_files.py::test_a_write_that_runs_out_of_room_keeps_the_old_file_and_leaves_nothing",
        ),
    ),
    Fault(
        "the clock is set",
        "rows that wait to be fetched live as long as they were promised to",
        ("tests/serving/test_faults.py::test_a_clock_that_is_set_neither_drops_rows_nor_keeps_them",),
    ),
    Fault(
        "a client does not read, or does not send",
        "its connection is closed after a while, and its request ends",
        (
            "tests/serving/test_life.py::test_one_that_does_not_read_is_not_written_to_for_ever",
            "tests/serving/test_hostile.py::test_a_head_that_trickles_in_is_not_waited_for",
            "tests/serving/test_hostile.py::test_a_body_that_trickles_in_gets_408",
        ),
    ),
    Fault(
        "a pack, a vector, a shard or rows are damaged",
        "one error that names the file; never other numbers",
        (
            "tests/lenses/test_pack.py::test_with_a_changed_byte_a_pack_is_refused_or_still_the_same",
            "tests/vectors/test_files.py::test_damaged_bytes_give_a_vector_or_bad_file_and_nothing_else",
            "tests/capture/test_store.py::test_verify_finds_what_was_changed_and_what_is_gone",
            "tests/capture/test_store.py::test_a_damaged_index_is_refused_by_name",
            "tests/capture/test_rows.py::test_a_truncated_file_is_refused_by_name",
        ),
    ),
    Fault(
        "vLLM's compile cache is damaged",
        "the code is compiled again, and every row and token is right",
        ("tests/engines/vllm/test_modes.py::test_inductor_and_again_with_a_damaged_cache",),
    ),
    Fault(
        "a step runs out of memory",
        "the requests in it fail (HTTP 503), waiting requests continue, and the engine lives; a prefill is tried one "
        "by one",
        (
            "tests/serving/test_life.py::test_a_step_that_fails_is_a_503_and_the_next_request_works",
            "tests/engines/test_lifecycle.py::test_a_fault_in_a_step_spares_those_who_wait",
            "tests/engines/test_contract.py::test_a_fault_inside_the_engine_fails_the_requests_and_not_the_engine",
        ),
    ),
    Fault(
        "SIGTERM under load",
        "every stream ends with its text, or with the reason; exit code 0, no file left",
        (
            "tests/serving/test_faults.py::"
            "test_sigterm_under_load_ends_every_stream_with_its_text_or_with_the_reason",
            "tests/serving/test_life.py::test_the_command_serves_and_sigterm_ends_it_in_good_order",
        ),
    ),
)  # fmt: skip


class Case(NamedTuple):
    """One run of a test."""

    outcome: str
    seconds: float
    why: str  # it failed


def run_tests(tests: list[str], python: Path) -> dict[str, list[Case]]:
    """file::function → its cases."""
    found: dict[str, list[Case]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        names = sorted({test.partition("::")[2] for test in tests})
        files = sorted({test.partition("::")[0] for test in tests})
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", " or ".join(names)]
        subprocess.run([str(python), "-m", "pytest", *files, *options], check=False, capture_output=True)
        for case in ElementTree.parse(report).iter("testcase"):  # nosec B314 # the same report
            file = case.attrib["classname"].partition(".Test")[0].replace(".", "/") + ".py"
            name = f"{file}::{case.attrib['name'].partition('[')[0]}"
            bad = [one.attrib.get("message", "") for kind in ("failure", "error") for one in case.iter(kind)]
            outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
            why = f"{case.attrib['name']}: {bad[0][:400]}" if bad else ""
            found.setdefault(name, []).append(Case(outcome, float(case.attrib["time"]), why))
    return found


def measure(python: Path, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All faults but those whose result is known."""
    tests = sorted({test for fault in FAULTS if fault.name not in known for test in fault.tests})
    here = run_tests(tests, python)
    if _VLLM.exists():
        there = run_tests([test for test in tests if test.startswith("tests/engines")], _VLLM)
        here = {name: here.get(name, []) + there.get(name, []) for name in here | there}
    faults = []
    for fault in FAULTS:
        if fault.name in known:
            faults.append(known[fault.name])
            continue
        cases = [case for test in fault.tests for case in here.get(test, []) if case.outcome != "skipped"]
        missing = [test for test in fault.tests if all(one.outcome == "skipped" for one in here.get(test, []))]
        why = [case.why for case in cases if case.outcome == "failed"]
        seconds = round(sum(case.seconds for case in cases), 1)
        said = {"name": fault.name, "promise": fault.promise, "tests": list(fault.tests)}
        said["commit"] = commit()
        faults.append(
            {**said, "cases": len(cases), "failed": len(why), "why": why, "missing": missing, "seconds": seconds}
        )
    return {"commit": commit(), "versions": versions(), "faults": faults}


def main() -> None:
    import sys

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--again", action="store_true", help="only those that are new, or that failed last time")
    args = parser.parse_args()
    run = json.loads(args.out.read_text()) if args.again else {"faults": []}
    known = {
        one["name"]: {"commit": run["commit"], **one}
        for one in run["faults"]
        if not one["failed"] and not one["missing"]
    }
    found = measure(Path(sys.executable), known)
    write(args.out, found)
    for fault in found["faults"]:
        print(f"{fault['name']}: {fault['cases']} cases, {fault['failed']} failed, missing {fault['missing']}")  # noqa: T201
    raise SystemExit(any(fault["failed"] or fault["missing"] for fault in found["faults"]))


if __name__ == "__main__":
    main()

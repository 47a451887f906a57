"""The serve command's own mistakes; what it serves is tested with the server."""

from collections.abc import Callable


def test_every_mistake_is_told_at_once(refused: Callable[..., list[str]], model: str) -> None:
    lines = refused("serve", model, "--host", "0.0.0.0", "--vllm", "[1]", "--taps", "{")
    assert lines[0].startswith("without an API key only this machine may connect; bind 127.0.0.1")
    assert lines[1].startswith("--vllm: is not a JSON object")
    assert lines[2].startswith("--taps: is not JSON")
    assert len(lines) == 3


def test_values_out_of_range_are_refused(refused: Callable[..., list[str]], model: str) -> None:
    lines = refused("serve", model, "--port", "70000", "--max-running", "0", "--drain", "-1")
    assert [line.partition(":")[0] for line in lines] == ["port", "max_running", "drain_s"]

"""A tiny model directory, a vector file and a way to call the command line, for all tests of it."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from typer.testing import CliRunner, Result

from steerscope import SteeringVector, save_vector
from steerscope.cli.main import app
from support import tiny

Cli = Callable[..., Result]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def vector(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers 1 and 2, strong enough at scale 5 to make the tiny model repeat one word."""
    path = tmp_path_factory.mktemp("vectors") / "happy.safetensors"
    generator = torch.Generator().manual_seed(1)
    save_vector(SteeringVector({layer: torch.randn(64, generator=generator) for layer in (1, 2)}), path)
    return str(path)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Remove what a command sends logs to: the runner closes it when the command ends."""
    root = logging.getLogger()
    handlers = root.handlers
    yield
    root.handlers = handlers


@pytest.fixture
def cli() -> Cli:
    def run(*arguments: object, text: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)

    return run


@pytest.fixture
def refused(cli: Cli) -> Callable[..., list[str]]:
    """Call, see that it is refused as a user's mistake, and return the lines after `error: `."""

    def run(*arguments: object) -> list[str]:
        result = cli(*arguments)
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert all(line.startswith("error: ") for line in lines), lines
        return [line.removeprefix("error: ") for line in lines]

    return run

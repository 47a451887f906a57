"""Options that are made from a settings model."""

from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from steerscope.cli.options import Fields, Given, with_fields
from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest


class Settings(Spec):
    size: int = Field(default=3, ge=1, description="Size of it.")
    limit_s: float | None = Field(default=None, description="Seconds.")
    kind: Literal["a", "b"] = Field(default="a", description="Kind of it.")
    names: tuple[str, ...] = Field(default=(), description="A name; repeatable.")
    fast: bool = Field(default=False, description="Be fast.")


OPTIONS = Fields(Settings, "size limit_s kind names fast", names={"limit_s": ("--limit",)}, kind="b")


@pytest.fixture
def given() -> Any:
    """Call a command with arguments; return what its parameter was given."""
    app, seen = typer.Typer(), list[Given[Settings]]()

    @app.command()
    @with_fields
    def command(what: str, settings: Annotated[Given[Settings], OPTIONS]) -> None:
        assert what == "x"
        seen.append(settings)

    def call(*arguments: str) -> Given[Settings]:
        done = CliRunner().invoke(app, ["x", *arguments])
        assert done.exit_code == 0, done.output
        return seen[-1]

    call.app = app  # type: ignore[attr-defined]
    return call


def test_defaults_are_those_of_the_fields_or_of_the_command(given: Any) -> None:
    assert given().values == {"size": 3, "kind": "b", "fast": False}
    assert given().parse() == Settings(kind="b")


def test_every_kind_of_option_reaches_the_model(given: Any) -> None:
    found = given("--size", "5", "--limit", "0.5", "--kind", "a", "--names", "p", "--names", "q", "--fast")
    assert found.parse() == Settings(size=5, limit_s=0.5, kind="a", names=("p", "q"), fast=True)
    assert found.parse(size=7).size == 7


def test_a_value_that_the_model_refuses_is_its_error(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="size"):
        given("--size", "0").parse()


def test_help_is_that_of_the_fields(given: Any) -> None:
    shown = CliRunner().invoke(given.app, ["--help"]).output
    for field in Settings.model_fields.values():
        assert field.description in shown

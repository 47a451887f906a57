"""Command-line options made from the fields of settings models: name, type, default and help are the field's."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from steerscope.specs.base import Spec

S = TypeVar("S", bound=Spec)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Given(Generic[S]):
    """Values of the options that fill a settings model; options that are not given and have no default are left out."""

    model: type[S]
    values: Mapping[str, Any]

    def parse(self, **more: object) -> S:
        return self.model.parse({**self.values, **more})


class Fields:
    """Options for the named fields of a model, as the annotation of one parameter of a command.

    `names` maps a field to the names of its option where they differ; `defaults` replace those of fields.
    """

    def __init__(
        self,
        settings: type[Spec],
        fields: str,
        *,
        panel: str | None = None,
        names: Mapping[str, tuple[str, ...]] | None = None,
        **defaults: object,
    ) -> None:
        self.model, self.fields = settings, fields.split()
        self.panel, self.names, self.defaults = panel, names or {}, defaults

    def options(self) -> list[inspect.Parameter]:
        return [self._option(name, self.model.model_fields[name]) for name in self.fields]

    def _option(self, name: str, field: FieldInfo) -> inspect.Parameter:
        declared = self.names.get(name, ("--" + name.replace("_", "-"),))
        option = typer.Option(*declared, help=field.description, rich_help_panel=self.panel)
        default = self.defaults.get(name, field.default)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if default == () else default,
            annotation=Annotated[_option_type(field.annotation), option],
        )


def with_fields(command: F) -> F:
    """Give a command the options of its `Fields` parameters; the command receives one `Given` for each."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Fields] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        fields = [one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, Fields)]
        if fields:
            groups[parameter.name] = fields[0]
            parameters += fields[0].options()
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def filled(**values: Any) -> Any:
        for name, fields in groups.items():
            given = {field: values.pop(field) for field in fields.fields}
            values[name] = Given(fields.model, {field: value for field, value in given.items() if value is not None})
        return command(**values)

    filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    filled.__annotations__ = {}  # typer reads the signature
    return filled  # type: ignore[return-value]


def _option_type(annotation: Any) -> Any:
    """Return the option's type: a list for a sequence, and text for what only a validator understands."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [_option_type(part) for part in get_args(annotation) if part is not NoneType]
        return parts[0] | None if len(parts) == 1 else str | None
    if get_origin(annotation) is tuple:
        return list[str] | None
    if get_origin(annotation) is Literal or annotation in (int, float, bool, Path):
        return annotation
    return str

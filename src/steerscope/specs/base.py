"""The base of all specs: frozen, strict about unknown fields, all problems in one error, exact JSON round-trip."""

from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from steerscope.specs.errors import InvalidRequest, problems_of


def one_or_many(value: object) -> object:
    """Return a single text or number as a tuple of one."""
    return (value,) if isinstance(value, str | int) else value


class Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_bytes="base64")

    # Type checkers see pydantic's own signature. A failed construction raises InvalidRequest, which is a ValueError:
    # pydantic collects those of nested specs, and the outermost spec unfolds them.
    if not TYPE_CHECKING:

        def __init__(self, /, **data):
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise InvalidRequest(problems_of(error)) from None

    @classmethod
    def parse(cls, data: object) -> Self:
        """Build from plain data (dicts, lists), reporting every problem at once."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InvalidRequest(problems_of(error)) from None

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InvalidRequest(problems_of(error)) from None

    def to_json(self) -> str:
        return self.model_dump_json(exclude_defaults=False)

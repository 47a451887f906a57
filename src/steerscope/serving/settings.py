"""The settings of a server."""

import ipaddress
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from steerscope.specs.base import Spec

LogFormat = Literal["json", "pretty"]


class ServerSettings(Spec):
    """Address, key, files, and limits in bytes, seconds and counts."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free one
    api_key: SecretStr | None = None
    model_name: str | None = None  # the model's name for clients; None: its own
    vectors: str | None = None  # folder of vector files
    lenses: tuple[str, ...] = ()  # folders of packs, each known by its folder's name
    any_model: bool = False  # accept packs that were made for a model of another name
    captures_bytes: int = Field(default=4 << 30, ge=0)
    capture_ttl_s: float = Field(default=600.0, gt=0)
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_upload_bytes: int = Field(default=256 << 20, ge=1024)
    max_vectors: int = Field(default=1000, ge=0)
    max_running: int = Field(default=1024, ge=1)  # choices that the engine runs at once
    max_waiting: int = Field(default=1024, ge=0)  # requests in the queue
    cors_origins: tuple[str, ...] = ()
    drain_s: float = Field(default=30.0, ge=0)
    head_timeout_s: float = Field(default=20.0, gt=0)  # for the head of a request to arrive
    body_timeout_s: float = Field(default=30.0, gt=0)  # for a whole body to arrive
    stall_s: float = Field(default=60.0, gt=0)  # for a client to read what it was sent
    log_format: LogFormat = "pretty"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.api_key is not None and not self.api_key.get_secret_value().strip():
            raise ValueError("the API key is empty; give one, or leave it out")
        if self.api_key is None and not self.loopback:
            raise ValueError(f"without an API key only this machine may connect; bind 127.0.0.1 instead of {self.host}")
        return self

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

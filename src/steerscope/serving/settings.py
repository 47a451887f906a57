"""The settings of a server."""

import ipaddress
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from steerscope.specs.base import Spec

LogFormat = Literal["json", "pretty"]


class ServerSettings(Spec):
    """Address, key, files, and limits in bytes, seconds and counts."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; other than loopback needs an API key.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: SecretStr | None = Field(default=None, description="Bearer token that clients must send.")
    model_name: str | None = Field(default=None, description="Name of the model in the API; default: as it was loaded.")
    vectors: str | None = Field(default=None, description="Folder of vector files, each known by its file name.")
    lenses: tuple[str, ...] = Field(default=(), description="Folder of a lens pack, known by its name; repeatable.")
    any_model: bool = Field(default=False, description="Accept packs that were made for another model's name.")
    captures_bytes: int = Field(default=4 << 30, ge=0, description="Bytes of captured rows kept until fetched.")
    capture_ttl_s: float = Field(default=600.0, gt=0, description="Seconds after which rows not fetched are dropped.")
    max_body_bytes: int = Field(default=8 << 20, ge=1024, description="Maximum size of a request body.")
    max_upload_bytes: int = Field(default=256 << 20, ge=1024, description="Maximum size of an uploaded vector file.")
    max_vectors: int = Field(default=1000, ge=0)
    max_running: int = Field(default=1024, ge=1, description="Maximum number of choices in the engine at once.")
    max_waiting: int = Field(default=1024, ge=0, description="Maximum number of queued requests; more are refused.")
    cors_origins: tuple[str, ...] = Field(default=(), description="Web origin that may call the API; repeatable.")
    drain_s: float = Field(default=30.0, ge=0, description="Seconds that running requests get when the server stops.")
    head_timeout_s: float = Field(default=20.0, gt=0)  # for the head of a request to arrive
    body_timeout_s: float = Field(default=30.0, gt=0)  # for a whole body to arrive
    stall_s: float = Field(default=60.0, gt=0)  # for a client to read what it was sent
    log_format: LogFormat = Field(default="pretty", description="Format of log lines.")

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

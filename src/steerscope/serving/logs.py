"""Log lines as text or JSON, each with the id of its request."""

import json
import logging
import sys
import time

from steerscope.serving.settings import LogFormat

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


def _more(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _USUAL}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_more(record),
        }
        if record.exc_info:
            about["error"] = self.formatException(record.exc_info)
        return json.dumps(about, default=str)


class Pretty(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        more = _more(record)
        shown = "".join(f" {name}={_short(value)}" for name, value in more.items())
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{at} {record.levelname.lower():7} {_short(record.getMessage(), quote=False)}{shown}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _short(value: object, quote: bool = True) -> str:
    """Return one printable line."""
    text = str(value)
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()
    return f'"{text}"' if quote and " " in text else text


def set_up(kind: LogFormat, level: str) -> None:
    """Send all logs to stderr in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else Pretty())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in ("steerscope", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())

"""Captured rows: handles, budgets and files."""

from steerscope.capture.handle import CaptureHandle, private_bytes
from steerscope.capture.rows import Rows, load_rows

__all__ = ["CaptureHandle", "Rows", "load_rows", "private_bytes"]

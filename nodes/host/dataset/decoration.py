"""What lies in a dataset for people alone: contact sheet and report. No training reads them, no hash covers them."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from ....training.storage.files import write_whole

__all__ = ["REPORT_FILE", "SHEET_FILE", "png", "read_decoration", "report_bytes", "write_decoration"]

SHEET_FILE, REPORT_FILE = "contact_sheet.png", "report.txt"


def read_decoration(folder: Path) -> tuple[Image.Image, str] | None:
    """(contact sheet, report) of a finished dataset, or None where one of them is missing or damaged."""
    try:
        with Image.open(folder / SHEET_FILE, formats=("PNG",)) as file:
            sheet = file.convert("RGB")
        return sheet, (folder / REPORT_FILE).read_bytes().decode("utf-8")
    except Exception:  # decoders fail in many ways, and whatever it is, both can be made again
        return None


def write_decoration(folder: Path, sheet: Image.Image, report: str) -> str:
    """Put both into a finished dataset, in place of what is there; returns what became of it, for the report."""
    try:
        write_whole(folder / SHEET_FILE, png(sheet))
        write_whole(folder / REPORT_FILE, report_bytes(report))
    except OSError as error:  # the dataset itself is whole: a training can begin
        why = error.strerror or error
        return f"Its contact sheet and report are missing or damaged, and cannot be written again ({why})."
    return "Its contact sheet and report were missing or damaged, and were made again."


def report_bytes(report: str) -> bytes:
    """The report as its file has it."""
    return report.encode(errors="backslashreplace")


def png(picture: Image.Image) -> bytes:
    """The picture as the bytes of a PNG file."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()

"""Bundles: pictures, arrays and a manifest with their hashes, in one file to take away."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from relprop import figure
from relprop.app.answer import Answer

__all__ = ["bundle"]


def bundle(answer: Answer, folder: Path) -> bytes:
    """A zip file with what ``relprop explain`` writes.

    Args:
        answer: With its photo and its plan.
        folder: Where it may be made; nothing stays there.
    """
    assert answer.plan is not None
    assert answer.photo is not None
    e = answer.explanation
    quantization = {"edges": "paper", "levels": 8}
    pictures = figure.pictures(e, answer.plan, answer.photo, e.quantized()[0], answer.label)
    signed = replace(e, settings={**e.settings, "quantization": quantization})
    packed = io.BytesIO()
    with TemporaryDirectory(dir=folder) as work:
        files = figure.save(signed, pictures, Path(work), Path(work) / "relprop")
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files:
                archive.write(file, f"{Path(answer.name).stem}/{file.name}")
    return packed.getvalue()

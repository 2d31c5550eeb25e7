"""Drawings of the concept pages: docs/drawings, one SVG per page.

`python tools/draw_concepts.py [FOLDER]` writes them. A page shows its drawing with the
description as the text for readers that cannot see it (`tests/test_drawings.py`).
"""

import pathlib
import sys

import draw_communication
import draw_steps

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "drawings"

DRAWINGS = {
    "replicas": draw_steps.replicas,
    "step": draw_steps.step,
    "buckets": draw_steps.buckets,
    "unused_parameters": draw_steps.unused_parameters,
    "micro_batches": draw_steps.micro_batches,
    "uneven_inputs": draw_steps.uneven_inputs,
    "hooks": draw_communication.hooks,
    "zero1": draw_communication.zero1,
    "same_bits": draw_communication.same_bits,
    "local_training": draw_communication.local_training,
    "collectives": draw_communication.collectives,
    "eager": draw_communication.eager,
    "parameter_server": draw_communication.parameter_server,
}


def main(folder: pathlib.Path = FOLDER) -> None:
    """Writes all drawings into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw().to_svg())


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:2]))

"""A model that trains in milliseconds, for tests of everything around the training."""

from __future__ import annotations

from pathlib import Path

from jax_fp4.cli import transformer

SIZE = transformer.Size(32, 1, 64, 2, context=32, batch=2, learning_rate=1e-2)


def use() -> None:
    """Puts it in the place of the demo's smallest one, in a process of its own."""
    transformer.SIZES["tiny"] = SIZE


def write_text(folder: Path) -> Path:
    """A text long enough to train on."""
    path = folder / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(300)))
    return path

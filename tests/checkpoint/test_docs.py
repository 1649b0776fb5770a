"""docs/checkpoints.md: every command and every program on it runs, in its order."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from support.checkpoints import bf16, write_raw
from support.repository import ROOT

PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def write_model(folder: Path) -> None:
    """A checkpoint with the names that the page uses."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (16, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (16, 64),
        "model.layers.0.mlp.up_proj.weight": (32, 64),
        **{f"model.layers.0.self_attn.{n}_proj.weight": (8, 64) for n in "qkv"},
    }
    tensors = {
        name: ("BF16", shape, bf16(generator.standard_normal(shape).astype(np.float32)))
        for name, shape in shapes.items()
    }
    write_raw(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text("{}")


def test_every_command_and_program_of_the_page_runs(tmp_path: Path) -> None:
    """As a user types them, beside a folder "model" and the rules of the page."""
    write_model(tmp_path / "model")
    (rules,) = blocks("toml")
    (tmp_path / "rules.toml").write_text(rules)
    commands = [
        line.removeprefix("$ ").split()
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    assert len(commands) == 3 and all(words[0] == "python" for words in commands)
    programs = [[sys.executable, "-c", text] for text in blocks("python")]
    assert len(programs) == 1
    for words in [[sys.executable, *words[1:]] for words in commands] + programs:
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr)
    copy, original = tmp_path / "copy.safetensors", tmp_path / "out" / "model.safetensors"
    assert copy.read_bytes() == original.read_bytes()
    report = json.loads((tmp_path / "out-mixed" / "convert_report.json").read_text())
    formats = {t["name"].split(".")[-2]: t["format"] for t in report["tensors"]}
    assert formats == {
        "embed_tokens": "-",
        "norm": "-",
        "lm_head": "-",
        "up_proj": "MXFP8_E4M3",
        "q_proj": "NVFP4",
        "k_proj": "NVFP4",
        "v_proj": "NVFP4",
    }

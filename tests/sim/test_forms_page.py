"""docs/forms.md lists the whole instruction table: no form is missing among the unproven."""

import subprocess
import sys

from support.repository import ROOT


def test_the_page_has_every_form_of_the_table() -> None:
    """Each row stands on the page once, with a witness or as unproven; see foreign/forms.py."""
    code = "from jax_fp4 import sim; print(*sim.unreached_forms(), sep=chr(10))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    table = {line.partition(": ")[0] for line in done.stdout.splitlines()}
    page = (ROOT / "docs" / "forms.md").read_text().replace("\\|", "|")
    listed = [line.split("`")[1] for line in page.splitlines() if line.startswith(("| `", "* `"))]
    assert sorted(listed) == sorted(table)

"""Which alternatives of the instruction table no test has executed: printed after a run.

Each process counts for itself; with pytest-xdist the workers' lists are intersected.
"""

from typing import Any

import pytest

_KEY = "sim_unreached_forms"
_collected: list[set[str]] = []


def _unreached() -> list[str]:
    from jax_fp4 import sim

    return sim.unreached_forms()


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_KEY] = _unreached()
    elif not session.config.pluginmanager.hasplugin("dsession"):
        _collected.append(set(_unreached()))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Called in the process that starts the workers, when one of them ends."""
    if _KEY in getattr(node, "workeroutput", {}):
        _collected.append(set(node.workeroutput[_KEY]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _collected:
        return
    rows = sorted(set.intersection(*_collected))
    terminalreporter.section(f"instruction table: {len(rows)} alternatives that no test executed")
    # After a part of the tests the list is long and says nothing.
    for row in rows if len(rows) <= 40 else ():
        terminalreporter.write_line(row)

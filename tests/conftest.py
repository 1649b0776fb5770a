"""What holds for every test: the platform, the examples hypothesis draws, and no hollow runs.

`JAX_FP4_REQUIRE_ALL=1` (set by `make test` and by continuous integration) turns every skip into a
failure: a suite that skips what it cannot do on this machine would pass there without testing
anything. (`oracles` and `support` are importable through `pythonpath` in pyproject.toml.)
"""

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

# Before any test module imports jax: a test must not depend on which accelerator a machine has.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A shell that starts a run in the background has SIGINT ignored, also in the programs that tests
# start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REQUIRE_ALL = os.environ.get("JAX_FP4_REQUIRE_ALL") == "1"

# Shared machines are too noisy for hypothesis' deadline. A required run draws the same examples
# every time; a developer's run draws new ones.
settings.register_profile("jax_fp4", deadline=None, derandomize=REQUIRE_ALL)
settings.load_profile("jax_fp4")


def _forbid_skip(report: Any) -> None:
    # An expected failure is also reported as skipped, but it did run.
    if not REQUIRE_ALL or not report.skipped or hasattr(report, "wasxfail"):
        return
    longrepr = report.longrepr  # (file, line, reason) of a skip
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped although JAX_FP4_REQUIRE_ALL=1 asks for every test: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Turns the skip of a test into a failure where every test is required."""
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Does the same for a module that skips itself while it is imported."""
    report = yield
    _forbid_skip(report)
    return report

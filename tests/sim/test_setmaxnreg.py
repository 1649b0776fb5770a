"""setmaxnreg: registers that warps give back and take from the CTA's pool."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run

SPLIT = (
    "{ .reg .pred low; mov.u32 r0, %tid.x; setp.lt.u32 low, r0, 128; @low bra GIVE;\n"
    "setmaxnreg.inc.sync.aligned.u32 232; bra END;\n"
    "GIVE: setmaxnreg.dec.sync.aligned.u32 40;\n"
    "END: ld.param.u64 a0, [y]; mad.wide.u32 a0, r0, 4, a0; st.global.u32 [a0], r0; }"
)


def test_takers_wait_for_givers() -> None:
    """384 threads start with 168 registers each; two groups reach 232 once one has gone to 40."""
    for seed in range(10):
        out = np.zeros(384, np.uint32)
        run(SPLIT, out, parameters=".param .u64 y", block=384, seed=seed)
        np.testing.assert_array_equal(out, np.arange(384))


def test_a_pool_that_never_suffices_is_a_deadlock() -> None:
    """If the first group gives back less, somebody waits for ever; the report says for what."""
    out = np.zeros(384, np.uint32)
    with pytest.raises(sim.SimulationError, match="registers that other warps give back") as error:
        run(SPLIT.replace("u32 40", "u32 48"), out, parameters=".param .u64 y", block=384)
    assert error.value.kind == "deadlock"


def test_maxnreg_is_what_a_thread_starts_with() -> None:
    """.maxnreg 64: a thread may go down from 64 and back to it, and no further."""
    text = (
        ".version 8.8\n.target sm_100a\n.address_size 64\n"
        ".visible .entry k() .maxnreg 64 {\n"
        "setmaxnreg.dec.sync.aligned.u32 24; setmaxnreg.inc.sync.aligned.u32 64;\n"
        "ret; }"
    )
    machine = sim.Machine("100a")
    machine.load(text).launch("k", 1, 128)
    with pytest.raises(sim.SimulationError) as error:
        machine.load(text.replace("inc.sync.aligned.u32 64", "inc.sync.aligned.u32 72")).launch(
            "k", 1, 128
        )
    assert error.value.kind == "deadlock"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("dec.sync.aligned.u32 16", "multiple of 8 from 24 to 256"),
        ("dec.sync.aligned.u32 60", "multiple of 8 from 24 to 256"),
        ("inc.sync.aligned.u32 264", "multiple of 8 from 24 to 256"),
        ("inc.sync.aligned.u32 64", "has 128 registers, so .inc is the wrong way"),
        ("dec.sync.aligned.u32 160", "has 128 registers, so .dec is the wrong way"),
    ],
)
def test_wrong_counts_are_reported(form: str, message: str) -> None:
    """512 threads start with 128 registers each."""
    with pytest.raises(sim.SimulationError) as error:
        run(f"setmaxnreg.{form};", block=512)
    assert message in str(error.value)
    assert (error.value.kind, error.value.line) == ("argument", FIRST_LINE)

from __future__ import annotations

import pytest

from layerkit_runner.tools.plan.hlo import instructions

# `work` is called twice by the body of an outer loop (3 times), once of them in an inner loop of
# unknown length; `branch` by a conditional; `unused` is not called.
PROGRAM = """HloModule test, is_scheduled=true

%unused (p.0: f32[]) -> f32[] {
  %p.0 = f32[] parameter(0)
  ROOT %unused.1 = f32[] negate(%p.0)
}

%work (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %worked = f32[4]{0} negate(%p.1), metadata={op_name="f"}
}

%inner (p.2: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.2 = (s32[], /*index=1*/f32[4]{0:T(128)}) parameter(0)
  ROOT %inner.1 = (s32[], f32[4]{0}) call(%p.2), to_apply=%work
}

%outer (p.3: f32[4]) -> f32[4] {
  %p.3 = f32[4]{0} parameter(0)
  %called = f32[4]{0} call(%p.3), to_apply=%work
  ROOT %looped = f32[4]{0} while(%called), condition=%c, body=%inner
}

%c (p.4: f32[4]) -> pred[] {
  %p.4 = f32[4]{0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

%branch (p.5: f32[4]) -> f32[4] {
  %p.5 = f32[4]{0} parameter(0)
  ROOT %branched = f32[4]{0} sqrt(%p.5)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %loop = f32[4] while(%x), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %started = ((f32[4]{0}), f32[4]{0}) async-start(%loop), calls=%branch
  %finished = f32[4]{0} async-done(%started), calls=%branch
  ROOT %choice = f32[4]{0} conditional(%loop, %x, %x), branch_computations={%branch, %branch}
}
"""


def test_counts_are_handed_down_from_all_callers():
    result = {each.name: each for each in instructions(PROGRAM)}
    assert "unused.1" not in result
    assert result["choice"].executions == 1
    assert result["choice"].is_exact
    # Three times from the call, three from the inner loop, whose length is not known.
    assert result["worked"].executions == 3 + 3
    assert not result["worked"].is_exact
    assert result["called"].executions == 3
    assert result["called"].is_exact
    # Once asynchronously, and in each of two branches.
    assert result["branched"].executions == 1 + 2
    assert not result["branched"].is_exact


def test_types_with_brackets_and_comments_are_read():
    result = {each.name: each for each in instructions(PROGRAM)}
    assert result["p.2"].type == "(s32[], /*index=1*/f32[4]{0:T(128)})"
    assert result["p.2"].opcode == "parameter"


LOOP = """%condition (state: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %state = (s32[], f32[4]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  COMPARE
}

%body (state.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state.1 = (s32[], f32[4]{0}) parameter(0)
  %step = s32[] constant(STEP)
  %old = s32[] get-tuple-element(%state.1), index=0
  %new = s32[] add(%old, %step)
  %y = f32[4]{0} negate(%x)
  ROOT %next = (s32[], f32[4]{0}) tuple(%new, %y)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %first = s32[] constant(FIRST)
  %first.copy = s32[] copy(%first)
  %start = (s32[], f32[4]{0}) tuple(%first.copy, %x)
  ROOT %loop = (s32[], f32[4]{0}) while(%start), condition=%condition, body=%body
}
"""


LESS = "%less = pred[] compare(%counter, %limit), direction=LT"
MAY_END_EARLY = f"{LESS}\n  ROOT %both = pred[] and(%less, %alive)"
UNKNOWN = f"ROOT {LESS}".replace("LT", "NE")


@pytest.mark.parametrize(
    ("first", "step", "compare", "executions", "is_exact"),
    [
        ("0", "1", f"ROOT {LESS}", 12, True),
        ("0", "5", f"ROOT {LESS}", 3, True),  # 0, 5 and 10
        ("2", "5", f"ROOT {LESS}", 2, True),  # 2 and 7
        ("0", "unknown", f"ROOT {LESS}", 12, False),
        ("unknown", "1", f"ROOT {LESS}", 12, False),
        ("0", "1", MAY_END_EARLY, 12, False),
        ("0", "1", UNKNOWN, 1, False),
    ],
)
def test_loop_count_is_read_from_the_condition(first, step, compare, executions, is_exact):
    text = LOOP.replace("FIRST", first).replace("STEP", step).replace("COMPARE", compare)
    program = {each.name: each for each in instructions(text)}
    assert (program["y"].executions, program["y"].is_exact) == (executions, is_exact)
    assert program["y"].computation == "body"

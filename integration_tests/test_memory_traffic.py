"""Bytes that a program reads and writes by `benchmarks/memory_traffic.py`, on HLO by hand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

# A loop of three rounds over a stack of three rows of four float32 numbers, 16 bytes each.
PROGRAM = """HloModule test, is_scheduled=true

%update (p.0: f32[3,4], p.1: f32[4], p.2: s32[]) -> f32[3,4] {
  %p.0 = f32[3,4]{1,0} parameter(0)
  %p.1 = f32[4]{0} parameter(1)
  %row = f32[1,4]{1,0} bitcast(%p.1)
  %p.2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %updated = f32[3,4]{1,0} dynamic-update-slice(%p.0, %row, %p.2, %zero)
}

%square (p.3: f32[3,4], p.4: s32[]) -> f32[4] {
  %p.3 = f32[3,4]{1,0} parameter(0)
  %p.4 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %read = f32[1,4]{1,0} dynamic-slice(%p.3, %p.4, %zero.1), dynamic_slice_sizes={1,4}
  %flat = f32[4]{0} bitcast(%read)
  ROOT %squared = f32[4]{0} multiply(%flat, %flat)
}

%sum (p.5: f32[], p.6: f32[]) -> f32[] {
  %p.5 = f32[] parameter(0)
  %p.6 = f32[] parameter(1)
  ROOT %added = f32[] add(%p.5, %p.6)
}

%total (p.7: f32[3,4]) -> f32[] {
  %p.7 = f32[3,4]{1,0} parameter(0)
  %zero.2 = f32[] constant(0)
  ROOT %summed = f32[] reduce(%p.7, %zero.2), dimensions={0,1}, to_apply=%sum
}

%body (state: (s32[], f32[3,4])) -> (s32[], f32[3,4]) {
  %state = (s32[], f32[3,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[3,4]{1,0} get-tuple-element(%state), index=1
  %product = f32[4]{0} fusion(%stack, %i), calls=%square, metadata={op_name="square"}
  %storing = f32[3,4] fusion-start(%stack, %product, %i), calls=%update, metadata={op_name="store"}
  %stored = f32[3,4]{1,0} fusion-done(%storing)
  ROOT %next = (s32[], f32[3,4]{1,0}) tuple(%i, %stored)
}

%c (state.1: (s32[], f32[3,4])) -> pred[] {
  %state.1 = (s32[], f32[3,4]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[3,4]) -> f32[] {
  %x = f32[3,4]{1,0} parameter(0)
  %empty = f32[3,4]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %start = s32[] constant(0)
  %cast = bf16[3,4]{1,0} convert(%x)
  %twice = f32[3,4]{1,0} add(%x, %x)
  %first = (s32[], f32[3,4]{1,0}) tuple(%start, %twice)
  %loop = s32[] while(%first), condition=%c, body=%body, config={"known_trip_count":{"n":"3"}}
  %last = f32[3,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %result = f32[] fusion(%last), kind=kInput, calls=%total
}
"""


@pytest.mark.parametrize(
    ("name", "size", "executions", "is_copy"),
    [
        ("square", 3 * (16 + 4 + 16), 3, False),  # a row and its number are read, a row is written
        ("store", 3 * (16 + 4 + 16), 3, True),  # in place
        ("cast", 48 + 24, 1, True),
        ("twice", 48 + 48, 1, False),  # an operand that is used twice is read once
        ("result", 48 + 4, 1, False),
    ],
)
def test_access_of_an_instruction_counts_the_parts_that_it_reads_and_writes(
    name: str, size: int, executions: int, *, is_copy: bool
):
    memory_traffic = runpy.run_path(str(BENCHMARKS / "memory_traffic.py"))["memory_traffic"]
    accesses = memory_traffic(PROGRAM)
    assert len(accesses) == 5  # allocations, tuples and the loop itself have none
    assert [one.bytes for one in accesses] == sorted((one.bytes for one in accesses), reverse=True)
    (access,) = [one for one in accesses if one.name == name]
    assert (access.bytes, access.executions, access.is_copy) == (size, executions, is_copy)

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from layerkit_runner.tools.plan.collectives import (
    Traffic,
    axes_of_groups,
    axes_of_pairs,
    collective_traffic,
    parse_groups,
    type_bytes,
)

AXES = ("data", "fsdp", "tensor")
SPLIT = PartitionSpec(AXES)
# Each device has f32[4, 8], 128 bytes.
GLOBAL = jax.ShapeDtypeStruct((32, 8), jnp.float32)


def make_mesh(order=range(8)):
    devices = np.array(jax.devices("cpu"))[list(order)]
    return Mesh(devices.reshape(2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)


def traffic(fn, mesh):
    """Traffic of a function of each device's shard."""
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    jitted = jax.jit(mapped, in_shardings=NamedSharding(mesh, SPLIT))
    return collective_traffic(jitted.lower(GLOBAL).compile().as_text(), mesh.shape)


def program(*lines):
    """Return HLO of a function of f32[4] with these instructions."""
    body = ["%x = f32[4]{0} parameter(0)", *lines]
    return "ENTRY %main (x: f32[4]) -> f32[4] {\n  " + "\n  ".join(body) + "\n}\n"


@pytest.mark.parametrize("order", [range(8), [5, 2, 7, 0, 1, 6, 3, 4]])
@pytest.mark.parametrize(
    ("fn", "kind", "axes", "bytes_sent"),
    [
        # 2 · 128 · 1/2
        (lambda x: lax.psum(x, "tensor"), "all-reduce", "tensor", 128),
        (lambda x: lax.psum(x, "data"), "all-reduce", "data", 128),
        # 2 · 128 · 3/4
        (lambda x: lax.psum(x, ("data", "fsdp")), "all-reduce", "data+fsdp", 192),
        # 2 · 128 · 7/8
        (lambda x: lax.psum(x, AXES), "all-reduce", "data+fsdp+tensor", 224),
        # The result is 256 bytes, half of them its own.
        (lambda x: lax.all_gather(x, "fsdp"), "all-gather", "fsdp", 128),
        # 4 · 128 bytes, a quarter of them its own.
        (lambda x: lax.all_gather(x, ("fsdp", "tensor")), "all-gather", "fsdp+tensor", 384),
        # Half of 128 bytes go to the other, half of the other's come in.
        (lambda x: lax.psum_scatter(x, "fsdp", tiled=True), "reduce-scatter", "fsdp", 64),
        (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), "all-to-all", "data", 64),
        (
            lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]),
            "collective-permute",
            "tensor",
            128,
        ),
    ],
)
def test_bytes_sent_by_each_kind_of_collective(fn, kind, axes, bytes_sent, order):
    assert traffic(fn, make_mesh(order)) == [Traffic(kind, axes, 1, bytes_sent, is_exact=True)]


def test_loops_of_known_length_multiply():
    def inner(x, _):
        return lax.psum(jnp.sin(x), "fsdp"), None

    def outer(x, _):
        x = lax.ppermute(x, "data", [(0, 1), (1, 0)])
        return lax.scan(inner, x, length=5)[0], None

    result = traffic(lambda x: lax.scan(outer, x, length=3)[0], make_mesh())
    assert result == [
        Traffic("all-reduce", "fsdp", 3 * 5, 3 * 5 * 128, is_exact=True),
        Traffic("collective-permute", "data", 3, 3 * 128, is_exact=True),
    ]


def test_loop_of_unknown_length_counts_once_and_is_not_exact():
    def grow(x):
        return lax.while_loop(lambda y: y[0, 0] < 100, lambda y: 1 + lax.pmax(y, "tensor"), x)

    assert traffic(grow, make_mesh()) == [Traffic("all-reduce", "tensor", 1, 128, is_exact=False)]


def test_collectives_added_by_the_compiler_are_counted():
    mesh = make_mesh()
    # Rows over fsdp, then whole: an all-gather in which data and tensor take no part.
    split, whole = (NamedSharding(mesh, PartitionSpec(spec)) for spec in ("fsdp", None))
    gather = jax.jit(lambda x: x * 2, in_shardings=split, out_shardings=whole)
    text = gather.lower(GLOBAL).compile().as_text()
    # The whole is 32 · 8 · 4 = 1024 bytes, half of them its own.
    assert collective_traffic(text, mesh.shape) == [
        Traffic("all-gather", "fsdp", 1, 512, is_exact=True)
    ]


def test_no_traffic_within_one_device():
    text = program("ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add")
    assert collective_traffic(text, {"data": 2}) == []


def test_asynchronous_collectives_count_once_by_their_result():
    text = program(
        "%gs = (f32[4]{0}, f32[16]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4]",
        "%gd = f32[16]{0} all-gather-done(%gs)",
        "%ps = (f32[4], f32[4], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
        "%pd = f32[4]{0} collective-permute-done((f32[4], f32[4], u32[]) %ps)",
        "%rs = f32[4]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add",
        "ROOT %rd = f32[4]{0} all-reduce-done(%rs)",
    )
    assert collective_traffic(text, {"data": 2, "fsdp": 2}) == [
        Traffic("all-gather", "data+fsdp", 1, 48, is_exact=True),  # 64 · 3/4
        Traffic("all-reduce", "data+fsdp", 1, 24, is_exact=True),  # 2 · 16 · 3/4
        Traffic("collective-permute", "fsdp", 1, 16, is_exact=True),
    ]


def test_ragged_all_to_all_counts_by_its_smaller_buffer():
    text = program(
        "%s = ((f32[4], f32[16], s32[4], s32[4], s32[4], s32[4]), f32[16]) ragged-all-to-all-start"
        "(%x, %y, %n, %n, %n, /*index=5*/%n), replica_groups={{0,1,2,3}}",
        "%d = f32[16]{0} ragged-all-to-all-done(%s)",
        "ROOT %r = f32[4]{0} ragged-all-to-all(%d, %x, %n, %n, %n, %n), replica_groups={{0,1,2,3}}",
    )
    # 16 · 3/4 bytes there and as many back.
    assert collective_traffic(text, {"expert": 4}) == [
        Traffic("ragged-all-to-all", "expert", 2, 24, is_exact=True)
    ]


def test_all_gather_in_a_chain_counts_once():
    """As libtpu 0.0.42 writes those of Llama13B, shortened: the links are in several fusions."""
    link = (
        "f32[16]{{0}} all-gather(%x), channel_id={channel}, replica_groups=[1,4]<=[4],"
        ' dimensions={{0}}, frontend_attributes={{chain_id="{chain}"}}'
    )
    links = [(3, 9), (3, 9), (3, 9), (4, 9), (4, 10), (4, 10)]
    lines = [
        f"%g.{n} = {link.format(channel=channel, chain=chain)}"
        for n, (channel, chain) in enumerate(links)
    ]
    gathers = Traffic("all-gather", "data+fsdp", 3, 3 * 48, is_exact=True)
    assert collective_traffic(program(*lines), {"data": 2, "fsdp": 2}) == [gathers]


TWO_SLICES = [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("line", "axes", "sent", "slow"),
    [
        # A sum over both slices of four: within them it is split, so that a quarter of 64 bytes
        # leaves each device's slice, and comes back.
        ("f32[16]{0} all-reduce(%x), replica_groups=[1,8]<=[8]", "data+fsdp", 112, 16),
        ("f32[16]{0} all-reduce(%x), replica_groups=[2,4]<=[8]", "fsdp", 96, 0),
        # One of each slice: everything crosses.
        ("f32[16]{0} all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0)", "data", 64, 64),
        # Of 64 bytes each device has 8; it sends them to one device of the other slice.
        ("f32[16]{0} all-gather(%x), replica_groups=[1,8]<=[8]", "data+fsdp", 56, 8),
        ("f32[2]{0} reduce-scatter(%x), replica_groups=[1,8]<=[8]", "data+fsdp", 56, 8),
        # Half of what is dealt out goes to the other half of the devices.
        ("f32[16]{0} all-to-all(%x), replica_groups=[1,8]<=[8]", "data+fsdp", 56, 32),
        ("f32[16]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", "fsdp", 64, 0),
        ("f32[16] collective-permute(%x), source_target_pairs={{0,1},{3,7}}", "data+fsdp", 64, 64),
    ],
)
def test_bytes_that_leave_a_slice(line, axes, sent, slow):
    text = program(f"ROOT %r = {line}, to_apply=%add")
    (result,) = collective_traffic(text, {"data": 2, "fsdp": 4}, slices=TWO_SLICES)
    assert (result.axes, result.bytes_sent, result.bytes_slow) == (axes, sent, slow)


def test_send_of_a_tpu_counts_as_its_collective():
    # Two slices of four: each device has added up its quarter, and sends it to its partner.
    attributes = 'is_host_transfer=true, {_xla_megascale_transfer_type="ALL_REDUCE"}'
    text = program(
        f"%send = (bf16[4,8]{{1,0}}, u32[], token[]) send(%y, %token), channel_id=3, {attributes}",
        f"%recv = (bf16[4,8]{{1,0}}, u32[], token[]) recv(%token), channel_id=2, {attributes}",
        "%sent = token[] send-done(%send), channel_id=3, is_host_transfer=true",
        "ROOT %received = (bf16[4,8]{1,0}, token[]) recv-done(%recv), channel_id=2",
    )
    assert collective_traffic(text, {"data": 2, "fsdp": 4}, slices=TWO_SLICES) == [
        Traffic("all-reduce", "data", 1, 64, is_exact=True, bytes_slow=64)
    ]


def test_fused_reduce_scatter_of_a_tpu():
    text = """%all-reduce-scatter.1 (input: f32[32]) -> f32[8] {
  %sum = f32[32]{0} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = f32[8]{0} dynamic-slice(%sum, %place), dynamic_slice_sizes={8}
}

ENTRY %main (x: f32[32]) -> f32[8] {
  %x = f32[32]{0} parameter(0)
  ROOT %fused = f32[8]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""
    assert collective_traffic(text, {"fsdp": 4}) == [
        Traffic("reduce-scatter", "fsdp", 1, 3 * 32, is_exact=True)
    ]


@pytest.mark.parametrize(
    ("hlo_type", "size"),
    [
        ("f32[]", 4),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 30),
        ("pred[7]{0}", 7),
        ("f8e4m3fn[4]{0}", 4),
        ("c64[2]", 16),
        ("s4[3]", 2),
        ("f32[<=4]{0}", 16),
        ("(f32[4,8]{1,0}, /*index=1*/u8[2]{0})", 130),
        ("token[]", 0),
    ],
)
def test_size_of_each_hlo_type(hlo_type, size):
    assert type_bytes(hlo_type) == size


MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # [0 1 2 3; 4 5 6 7] transposed, then cut in pairs.
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh[a=4,b=2] {b}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # Device 2·j + i stands at place (i, j).
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'a'}", [[0, 1], [3, 2]]),
        # Axis a is seen as [2, 4]; its second factor alone runs within halves.
        ("mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        # First and last factor of [2, 2, 2]: bits 4 and 1.
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=1,'b'=8] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_all_forms_of_groups_are_read(text, expected):
    assert parse_groups(text, num_devices=8) == expected


@pytest.mark.parametrize("text", ["mesh['a'=8]", "[2,4]<=", "everyone"])
def test_unknown_form_of_groups_raises(text):
    with pytest.raises(ValueError, match="unknown form of replica_groups"):
        parse_groups(text, num_devices=8)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([[0, 2, 4, 6], [1, 3, 5, 7]], "data+fsdp"),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], "data+fsdp+tensor"),
        ([[0, 3], [1, 2], [4, 7], [5, 6]], "mixed"),  # two coordinates differ, two of four members
        ([[0, 1], [2, 6], [4, 5], [3, 7]], "mixed"),  # tensor in some groups, data in others
        ([[0, 1, 2], [3, 4, 5, 6, 7]], "mixed"),
    ],
)
def test_groups_are_named_by_the_axes_they_span(groups, axes):
    assert axes_of_groups(groups, MESH) == axes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_each_set_of_axes_is_recovered(sizes, data):
    mesh = {f"axis{i}": size for i, size in enumerate(sizes)}
    chosen = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    kept = [axis for axis in range(len(sizes)) if axis not in chosen]
    members = math.prod(sizes[axis] for axis in chosen)
    order = [*kept, *sorted(chosen)]
    groups = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, members)
    expected = "+".join(f"axis{axis}" for axis in sorted(chosen) if sizes[axis] > 1)
    assert axes_of_groups(groups, mesh) == expected

    # The same groups, as XLA writes a transposed range.
    numbers = [",".join(map(str, part)) for part in (groups.shape, sizes, order)]
    text = f"[{numbers[0]}]<=[{numbers[1]}]T({numbers[2]})"
    assert parse_groups(text, num_devices=math.prod(sizes)) == groups.tolist()


def test_pairs_are_named_by_the_axes_along_which_they_move():
    assert axes_of_pairs([(0, 2), (2, 0), (1, 3), (3, 1)], MESH) == "fsdp"
    assert axes_of_pairs([(2, 4), (3, 5), (4, 2), (5, 3)], MESH) == "data+fsdp"

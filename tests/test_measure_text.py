"""Programs written out as other backends and other compilers print them, and as no one does."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import measure, mesh
from shardwise.measure import hlo
from shardwise.measure.counts import Count
from shardwise.measure.hlo import Array


def module(body, header="num_partitions=8", more=""):
    return hlo.parse(f"HloModule m, {header}\n\n{more}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")


def test_flops_of_library_calls():
    gemm = """
      %a = bf16[4,8,16]{2,1,0:T(8,128)(2,1)} parameter(0)
      %b = bf16[4,16,32]{2,1,0} parameter(1)
      ROOT %g = (bf16[4,8,32]{2,1,0}, /*index=1*/s8[1024]{0}) custom-call(%a, %b), NAME"""
    sizes = (
        ', backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"]}}}'
    )
    program = module(gemm.replace("NAME", 'custom_call_target="__cublas$gemm"') + sizes)
    assert measure.flops(program) == 2 * 4 * 8 * 32 * 16
    with pytest.raises(ValueError, match=r"g, a __cudnn\$convForward; known are dot"):
        measure.flops(module(gemm.replace("NAME", 'custom_call_target="__cudnn$convForward"')))
    assert measure.flops(module(gemm.replace("NAME", 'custom_call_target="TopK"'))) == 0


@pytest.mark.parametrize("mask, seen", [("CAUSAL", 1), ("NO_MASK", 2)])
@pytest.mark.parametrize("which, products", [("", 2), ("Backward", 5)])
def test_flops_of_cudnns_attention(which, products, mask, seen):
    """As an H200's programs have it: 8 rows of 1,024 tokens, 16 heads of 64 numbers, 8 for keys."""
    config = (
        '{"cudnn_fmha_backend_config":{"bmm1_dot_dimension_numbers":{"lhs_batch_dimensions":'
        '["0","2"],"lhs_contracting_dimensions":["3"]},"intermediate_tensor_shape":{"dimensions":'
        f'["8","16","1024","1024"],"element_type":"BF16"}},"mask_type":"{mask}"}}}}'
    )
    body = """
      %q = bf16[8,1024,16,64]{3,2,1,0} parameter(0)
      %k = bf16[8,1024,8,64]{3,2,1,0} parameter(1)
      ROOT %a = (bf16[8,16,1024,64]{3,1,2,0}, u8[256]{0}) custom-call(%q, %k, %k), """
    body += f'custom_call_target="__cudnn$fmhaSoftmax{which}", backend_config={config}'
    product = 2 * 8 * 16 * 1024**2 * 64
    assert measure.flops(module(body)) == products * product * seen / 2
    window = '"mask_type":', '"sliding_window_length":128,"mask_type":'
    for old, new in ("intermediate_tensor_shape", "another"), (mask, "PADDING"), window:
        with pytest.raises(ValueError, match="cannot read the size"):
            measure.flops(module(body.replace(old, new)))


@pytest.mark.parametrize("opcode", ["ragged-dot", "scaled-dot"])
def test_products_whose_size_cannot_be_read_are_refused(opcode):
    body = f"  %p = f32[4,8] parameter(0)\n  ROOT %g = f32[4,8] {opcode}(%p, %p, %p)"
    with pytest.raises(ValueError, match=rf"the size of the product in g, a {opcode}; known are"):
        measure.flops(module(body))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("pred", 15), ("s4", 8), ("bf16", 30), ("f8e4m3fn", 15), ("c64", 120), ("token", 0)],
)
def test_bytes_of_an_array_of_every_width(dtype, expected):
    assert Array(dtype, (3, 5)).bytes == expected


GATHER = (
    "%p = f32[4,8]{1,0} parameter(0)\n ROOT %g = f32[32,8]{1,0} all-gather(%p), dimensions={0}, "
)


@pytest.mark.parametrize(
    ("groups", "n"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("{{0,1,2},{3,4,5,6,7}}", 5),
        ("{{0}}", 1),
        ("{}", 8),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4] {'b','a'}", 8),
        ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b':(1)2}", 4),
    ],
)
def test_replica_groups_in_every_form(groups, n):
    found = measure.collectives(module(GATHER + f"replica_groups={groups}, channel_id=1"))
    assert found == {"all-gather": Count(1, 1, 128 * n, 128 * (n - 1))}
    assert found.ops[0].group_size == n
    together = sorted(i for group in found.ops[0].groups for i in group)
    assert together == list(range(len(together)))


AXES = [
    ("{{0,1},{2,3},{4,5},{6,7}}", ("c",)),
    ("{{0,2},{1,3},{4,6},{5,7}}", ("b",)),
    ("[2,4]<=[2,2,2]T(1,0,2)", ("a", "c")),
    ("[4,2]<=[2,4]T(1,0)", ("a",)),
    ("{}", ("a", "b", "c")),
    ("mesh['x'=4,'y'=2] {'x':(1)2}", ("a",)),
    ("mesh['x'=4,'y'=2] {'x':(2)2}", ("b",)),
    ("mesh['x'=2,'y'=2,'z'=2] {'z','x'}", ("a", "c")),
    ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}", ("b", "c")),
    ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", ("a",)),
]


@pytest.mark.parametrize(("groups", "axes"), AXES)
def test_bytes_by_the_axes_of_a_mesh(groups, axes):
    found = measure.collectives(module(GATHER + f"replica_groups={groups}, channel_id=1"))
    parts = measure.by_axis(found, mesh.make(a=2, b=2, c=2))
    assert {axes: part.ring_bytes for axes, part in parts.items()} == {axes: found.ring_bytes}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (
            "mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        ("mesh['a'=2,'b'=4] {'a','b':(1)2}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_which_devices_form_a_group(groups, expected):
    found = measure.collectives(module(GATHER + f"replica_groups={groups}, channel_id=1"))
    assert sorted(found.ops[0].groups) == sorted(expected)


SCALARS = """
%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}

%wrapped (q: bf16[8,16]) -> bf16[4,16] {
  %q = bf16[8,16]{1,0} parameter(0)
  ROOT %rs = bf16[4,16]{1,0} reduce-scatter(%q), replica_groups={{0,1}}, to_apply=%add
}
"""
P16, PAIR = "bf16[8,16]{1,0:T(8,128)(2,1)}", "replica_groups={{0,1},{2,3}}"


@pytest.mark.parametrize(
    ("lines", "kind", "payload", "ring"),
    [
        (
            f"%s = ({P16}, bf16[16,16]) all-gather-start(%p), {PAIR}, dimensions={{0}}\n"
            "ROOT %d = bf16[16,16] all-gather-done(%s)",
            "all-gather",
            512,
            256,
        ),
        (
            f"%s = ({P16}, f32[]) all-reduce-start(%p, %z), {PAIR}, to_apply=%add\n"
            f"ROOT %d = ({P16}, f32[]) all-reduce-done(%s)",
            "all-reduce",
            260,
            260,
        ),
        (
            f"%s = ({P16}, {P16}, u32[], u32[]) collective-permute-start({P16} %p), "
            "source_target_pairs={{0,1},{1,2}}\nROOT %d = bf16[8,16] collective-permute-done(%s)",
            "collective-permute",
            256,
            256,
        ),
        (
            f"%s = (({P16}), bf16[4,16], s32[]) async-start(%p), calls=%wrapped\n"
            f"%u = (({P16}), bf16[4,16], s32[]) async-update(%s), calls=%wrapped\n"
            "ROOT %d = bf16[4,16] async-done(%u), calls=%wrapped",
            "reduce-scatter",
            256,
            128,
        ),
        (
            f"%s = (({P16}), {P16}, u32[]) all-to-all-start(%p), {PAIR}, dimensions={{0}}, "
            'metadata={op_name="jit(f)/{all_to_all}, (x" source_line=3}\n'
            f"ROOT %d = {P16} all-to-all-done(%s)",
            "all-to-all",
            256,
            128,
        ),
        (
            "ROOT %s = bf16[8,16] collective-permute(%p), source_target_pairs={{0,0},{1,1}}",
            "collective-permute",
            256,
            0,
        ),
    ],
)
def test_asynchronous_and_combined_collectives_count_once(lines, kind, payload, ring):
    inputs = f"%p = {P16} parameter(0)\n %z = f32[] parameter(1)\n "
    found = measure.collectives(module(inputs + lines.replace("\n", "\n "), more=SCALARS))
    assert found == {kind: Count(1, 1, payload, ring)}


T, CALL = "tuple({})", 'custom-call({}), custom_call_target="Mix"'


def loop(start=0, step=1, bound=5, direction="LT", config="", swap=False, first=T, last=T):
    """HLO of a while loop around an all-reduce of 4 bytes on 8 devices; a fusion compares."""
    sides = "%bound, %i" if swap else "%i, %bound"
    more = f"""
%compare (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction={direction}
}}

%test (t: (s32[], f32[])) -> pred[] {{
  %t = (s32[], f32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %bound = s32[] constant({bound})
  ROOT %holds = pred[] fusion({sides}), kind=kLoop, calls=%compare
}}

%body (t.1: (s32[], f32[])) -> (s32[], f32[]) {{
  %t.1 = (s32[], f32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %copy = s32[] copy(%i.1)
  %step = s32[] constant({step})
  %next = s32[] add(%step, %copy)
  %x = f32[] get-tuple-element(%t.1), index=1
  %r = f32[] all-reduce(%x), replica_groups={{}}, to_apply=%add
  ROOT %carry = (s32[], f32[]) {last.format("%next, %r")}
}}
"""
    entry = f"""
  %start = s32[] constant({start})
  %one = f32[] constant(1)
  %first = (s32[], f32[]) {first.format("%start, %one")}
  %while.7 = (s32[], f32[]) while(%first), condition=%test, body=%body{config}
  ROOT %out = f32[] get-tuple-element(%while.7), index=1"""
    return module(entry, more=SCALARS + more)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("direction", "sign"), [("LT", 1), ("LE", 1), ("GT", -1), ("GE", -1)])
@given(st.integers(-9, 9), st.integers(1, 4), st.integers(-9, 9))
def test_trips_are_inferred_from_the_condition(direction, sign, swap, start, step, bound):
    holds = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__}[direction]
    value, trips = start, 0
    while holds(value, bound):
        value, trips = value + sign * step, trips + 1
    written = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}[direction] if swap else direction
    found = measure.collectives(loop(start, sign * step, bound, written, swap=swap))
    assert found == {"all-reduce": Count(1, trips, 4 * trips, 7 * trips)}


def test_trips_that_the_compiler_noted_are_taken():
    noted = ', backend_config={"known_trip_count":{"n":"11"},"x":{"init":"0"}}'
    assert measure.collectives(loop(config=noted)).dynamic == 11


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"step": 0}, "counts from 0 by 0 and never passes 5"),
        ({"direction": "NE", "step": 2}, "counts from 0 by 2"),
        ({"direction": "EQ"}, "test is no comparison of a counter"),
        ({"first": CALL}, "main does not write what it carries: first, a custom-call"),
        ({"last": CALL}, "body does not write what it carries: carry, a custom-call"),
    ],
)
def test_a_loop_whose_trips_are_unknown_is_named(options, reason):
    with pytest.raises(ValueError, match=rf"loop while\.7 in main .*{reason}.*jax\.lax\.scan"):
        measure.collectives(loop(**options))


def test_an_operand_may_be_an_element_of_a_tuple_in_the_short_form():
    """`%t#1` of newer XLA is what a get-tuple-element of index 1 was, of nested tuples too."""
    long = """
  %t = ((f32[8,4]{1,0:T(8,128)}, s32[]), bf16[2]{0}) parameter(0)
  %pair = (f32[8,4]{1,0:T(8,128)}, s32[]) get-tuple-element(%t), index=0
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%pair), index=0
  %y = bf16[2]{0} get-tuple-element(%t), index=1
  %d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %g = bf16[16]{0} all-gather(%y), dimensions={0}, replica_groups={}"""
    lines = long.splitlines()
    short = "\n".join([*lines[:2], *lines[3:4], *lines[5:]])
    short = short.replace("(%pair), index", "(%t#0), index").replace("(%y)", "(%t#1)")
    programs = module(long), module(short)
    assert [measure.flops(each) for each in programs] == [2 * 8 * 8 * 4] * 2
    sent = [measure.collectives(each).ops[0] for each in programs]
    assert [op.ring_bytes for op in sent] == [7 * 2 * 2] * 2
    found = programs[1].entry.instructions["t#1"]
    assert (found.opcode, found.arrays) == ("get-tuple-element", (Array("bf16", (2,)),))
    assert programs[1].entry.root == "g"


def test_attributes_without_a_value_are_passed_over():
    body = (
        "  %p = f32[4,8] parameter(0)\n  ROOT %r = f32[4,8] all-reduce(%p), word, replica_groups={}"
    )
    assert measure.collectives(module(body)) == {"all-reduce": Count(1, 1, 128, 224)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ROOT %g = f32[4,8] ragged-all-to-all(%p)", "bytes of g, a ragged-all-to-all; known are"),
        ("ROOT %g = f32[4,8] all-gather(%p), replica_groups=new", "groups of g: new; expected"),
        ("ROOT %g = f32[4,8] all-gather(%lost)", "main uses lost, which no instruction defines"),
        ("ROOT %g = f32[4,8]", "no opcode in this line"),
        ("something else", "no instruction: 'something else'"),
    ],
)
def test_programs_that_cannot_be_read_are_refused_by_name(line, message):
    with pytest.raises(ValueError, match=message):
        measure.collectives(module(f"  %p = f32[4,8] parameter(0)\n  {line}"))


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match=r"no ENTRY computation .*'hello'; expected an HLO module"):
        hlo.parse("hello")


def test_collectives_print_as_a_table():
    found = measure.collectives(loop(bound=1000))
    assert repr(found).splitlines()[1].split() == ["all-reduce", "1", "1,000", "4,000", "7,000"]
    cells = "".join(f"<td>{cell}</td>" for cell in ("1", "1,000", "4,000", "7,000"))
    row = f'<tbody><tr><th scope="row">all-reduce</th>{cells}</tr></tbody></table>'
    assert found._repr_html_().replace(' style="text-align:right"', "").endswith(row)
    assert len(repr(found).splitlines()) == 2  # of one kind no total
    pair = module(
        "%p = f32[4,8] parameter(0)\n %r = f32[4,8] all-reduce(%p), replica_groups={}\n"
        "ROOT %g = f32[32,8] all-gather(%r), replica_groups={}, dimensions={0}"
    )
    *_, last = repr(measure.collectives(pair)).splitlines()
    assert last.split() == ["total", "2", "2", "1,152", "1,120"]
    none = measure.collectives(module("  ROOT %c = f32[] constant(1)"))
    assert (repr(none), none._repr_html_(), none.ring_bytes) == (
        "no collectives",
        "<p>no collectives</p>",
        0,
    )


@pytest.mark.parametrize(
    ("said", "needed", "allowed"),
    [
        ("Ran out of memory. Used 18.75G of 15.75G hbm. Exceeded", 18.75 * 2**30, 15.75 * 2**30),
        ("HLO temporaries (17.5G) exceeds available HBM (512.0M). H", 17.5 * 2**30, 2**29),
        (
            "Allocation (size=29262643200) would exceed memory (size=17179869184)",
            29262643200,
            2**34,
        ),
    ],
)
def test_a_refusal_tells_what_was_needed_and_allowed(said, needed, allowed):
    fit = measure.fits(RuntimeError(said))
    assert (fit.needed, fit.allowed, fit.memory, fit.buffers) == (needed, allowed, None, ())
    assert not fit
    assert measure.fits(RuntimeError(said), allowed=2**40)


def test_what_tells_no_memory_is_refused_by_name():
    with pytest.raises(ValueError, match="this KeyError tells no numbers of memory"):
        measure.fits(KeyError("x"))
    with pytest.raises(TypeError, match="takes a compiled program, and got str"):
        measure.fits("x")
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()
    with pytest.raises(ValueError, match=r"say measure\.fits\(compiled, allowed="):
        measure.fits(compiled)
    memory = measure.bytes_per_device(compiled)
    for allowed in (memory.total, memory.total - 1):
        fit = measure.fits(compiled, allowed)
        assert bool(fit) == (allowed == memory.total) and fit.memory == memory
    assert repr(fit).startswith("does not fit: 0.00 of 0.00 GiB\n  arguments 0.00")


NESTED = """
%inner (q: bf16[64]) -> bf16[16] {
  %q = bf16[64] parameter(0)
  %z = s32[] constant(0)
  ROOT %part = bf16[16] dynamic-slice(%q, %z), dynamic_slice_sizes={16}
}

%outer (r: bf16[64]) -> bf16[16] {
  %r = bf16[64] parameter(0)
  %ar = bf16[64] all-reduce(%r), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %f = bf16[16] fusion(%ar), kind=kLoop, calls=%inner
}
"""


def test_a_sum_of_which_a_fusion_within_its_fusion_takes_a_part_is_a_scatter():
    lines = "%p = bf16[64] parameter(0)\nROOT %c = bf16[16] fusion(%p), kind=kCustom, calls=%outer"
    found = measure.collectives(module(lines, "num_partitions=4", SCALARS + NESTED))
    assert found == {"reduce-scatter": Count(1, 1, 128, 128 * 3 // 4)}

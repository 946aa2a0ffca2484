"""The byte and collective counter of benchmarks/hlo.py, on small programs whose answers are known."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import hlo

# A weight [64, 128] bfloat16 is 16,384 bytes, a vector f32[128] 512.
HEADER = "HloModule test, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }\n\n"


def program(entry, *computations):
    body = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return HEADER + "\n\n".join(computations) + f"\n\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"


def computation(name, body):
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    return f"%{name} (p: f32[]) -> f32[] {{\n{lines}\n}}"


def count(text, **options):
    return hlo.count(hlo.parse(text), **options)


def moved(text, **options):
    traffic = count(text, **options)
    return traffic.read, traffic.write


def test_operands_are_read_and_results_written():
    text = program("""
        %w = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
        %x = f32[128]{0:T(128)} parameter(1)
        ROOT %y = f32[64]{0:T(128)} custom-call(%w, /*index=1*/%x), custom_call_target="other"
    """)
    assert moved(text) == (16384 + 512, 256)
    assert hlo.aliased(text) == 1


def test_memory_on_the_chip_is_free_and_its_copies_are_counted_once():
    text = program("""
        %w = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
        %s = (bf16[64,128]{1,0:T(8,128)S(1)}, bf16[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
        %d = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%s)
        ROOT %y = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} negate(%d)
    """)
    assert moved(text) == (16384, 0)


def test_an_asynchronous_slice_reads_the_slice():
    text = program("""
        %w = bf16[64,128]{1,0} parameter(0)
        %s = ((bf16[64,128]{1,0}), bf16[16,128]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:16]}
        %d = bf16[16,128]{1,0:S(1)} slice-done(%s)
        ROOT %y = bf16[16,128]{1,0} negate(%d)
    """)
    assert moved(text) == (4096, 4096)


def test_a_fusion_that_slices_reads_only_the_slice():
    slices = computation(
        "sliced",
        """
        %a = bf16[64,128]{1,0} parameter(0)
        %i = s32[] parameter(1)
        %c = f32[64,128]{1,0} convert(%a)
        ROOT %r = f32[1,128]{1,0} dynamic-slice(%c, %i, %i), dynamic_slice_sizes={1,128}
        """,
    )
    entry = """
        %w = bf16[64,128]{1,0} parameter(0)
        %i = s32[] parameter(1)
        ROOT %y = f32[1,128]{1,0} fusion(%w, %i), kind=kLoop, calls=%sliced
    """
    assert moved(program(entry, slices)) == (128 * 2 + 4, 512)
    # The same parameter, also used whole.
    whole = slices.replace("ROOT %r", "%r").replace(
        "dynamic_slice_sizes={1,128}",
        "dynamic_slice_sizes={1,128}\n  %n = f32[64,128]{1,0} negate(%c)\n"
        '  ROOT %t = f32[1,128]{1,0} custom-call(%r, %n), custom_call_target="other"',
    )
    assert moved(program(entry, whole)) == (16384 + 4, 512)


def test_slices_inside_of_nested_fusions():
    inner = computation("inner", "%b = bf16[64,128]{1,0} parameter(0)\nROOT %c = bf16[8192]{0} bitcast(%b)")
    outer = computation(
        "outer",
        """
        %a = bf16[64,128]{1,0} parameter(0)
        %f = bf16[8192]{0} fusion(%a), kind=kLoop, calls=%inner
        ROOT %r = bf16[100]{0} slice(%f), slice={[0:100]}
        """,
    )
    entry = """
        %w = bf16[64,128]{1,0} parameter(0)
        ROOT %y = bf16[100]{0} fusion(%w), kind=kLoop, calls=%outer
    """
    assert moved(program(entry, inner, outer)) == (200, 200)


UPDATE = """
    %c = bf16[64,128]{1,0} parameter(0)
    %u = bf16[1,128]{1,0} parameter(1)
    %i = s32[] parameter(2)
"""


def test_an_update_in_place_writes_only_the_update():
    update = "bf16[64,128]{1,0} dynamic-update-slice(%c, %u, %i, %i)"
    assert moved(program(f"{UPDATE}ROOT %r = {update}")) == (256 + 8, 256)
    entry = f"{UPDATE}ROOT %y = bf16[64,128]{{1,0}} fusion(%c, %u, %i), kind=kLoop, calls=%updated"
    in_place = computation("updated", f"{UPDATE}ROOT %r = {update}")
    assert moved(program(entry, in_place)) == (256 + 4, 256)


def test_an_update_of_something_computed_rewrites_everything():
    body = f"""{UPDATE}
        %n = bf16[64,128]{{1,0}} negate(%c)
        ROOT %r = bf16[64,128]{{1,0}} dynamic-update-slice(%n, %u, %i, %i)
    """
    entry = f"{UPDATE}ROOT %y = bf16[64,128]{{1,0}} fusion(%c, %u, %i), kind=kLoop, calls=%updated"
    assert moved(program(entry, computation("updated", body))) == (16384 + 256 + 4, 16384)


BODY = computation(
    "body",
    """
    %p = (s32[], f32[128]{0}) parameter(0)
    %v = f32[128]{0} get-tuple-element(%p), index=1
    %n = f32[128]{0} negate(%v)
    %j = s32[]{:S(1)} constant(1)
    ROOT %t = (s32[], f32[128]{0}) tuple(%j, %n)
    """,
)
LOOP = """
    %x = f32[128]{0} parameter(0)
    %z = s32[] constant(2)
    %t = (s32[], f32[128]{0}) tuple(%z, %x)
    %w = (s32[], f32[128]{0}) while(%t), condition=%cond, body=%body
    ROOT %r = f32[128]{0} get-tuple-element(%w), index=1
"""


def condition(end):
    return computation(
        "cond",
        f"""
        %p = (s32[], f32[128]{{0}}) parameter(0)
        %i = s32[] get-tuple-element(%p), index=0
        {end}
        ROOT %c = pred[]{{:S(1)}} compare(%i, %e), direction=LT
        """,
    )


def test_a_loop_counts_its_trips():
    literal = condition("%e = s32[] constant(7)")
    assert moved(program(LOOP, BODY, literal)) == (5 * 512, 5 * 512)
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"11"}}')
    assert moved(program(known, BODY, literal)) == (11 * 512, 11 * 512)


def test_a_loop_of_unknown_length_is_listed():
    traced = program(
        LOOP, BODY, condition("%e = s32[] get-tuple-element(%p), index=0\n%q = s32[] negate(%e)")
    )
    traced = traced.replace("%z = s32[] constant(2)", "%z = s32[] parameter(1)")
    traffic = count(traced, unknown_trips=3)
    assert (traffic.read, traffic.write) == (3 * 512, 3 * 512)
    [loop] = traffic.loops
    assert (loop.trips, loop.body.read) == (None, 512)


def test_a_conditional_counts_one_branch():
    cheap = computation("cheap", "ROOT %x = f32[128]{0} parameter(0)")
    dear = computation("dear", "%x = f32[128]{0} parameter(0)\nROOT %n = f32[128]{0} negate(%x)")
    text = program(
        """
        %p = pred[] parameter(0)
        %x = f32[128]{0} parameter(1)
        ROOT %y = f32[128]{0} conditional(%p, %x, %x), true_computation=%dear, false_computation=%cheap
        """,
        cheap,
        dear,
    )
    assert moved(text) == (0, 0)
    assert moved(text, dearest=True) == (512, 512)
    indexed = text.replace(
        "true_computation=%dear, false_computation=%cheap", "branch_computations={%cheap, %dear}"
    )
    assert moved(indexed, dearest=True) == (512, 512)


def test_collectives_of_a_conditional_are_those_of_any_branch():
    """Each branch has some that the other, dearer or cheaper, has not."""
    reduced = computation("reduced", "%x = f32[2048]{0} parameter(0)\nROOT %r = f32[2048]{0} all-reduce(%x)")
    gathered = computation(
        "gathered",
        """
        %x = f32[2048]{0} parameter(0)
        %n = f32[2048]{0} negate(%x)
        ROOT %g = f32[2048]{0} collective-permute(%n), source_target_pairs={{0,1}}
        """,
    )
    text = program(
        """
        %p = pred[] parameter(0)
        %x = f32[2048]{0} parameter(1)
        ROOT %y = f32[2048]{0} conditional(%p, %x, %x), branch_computations={%reduced, %gathered}
        """,
        reduced,
        gathered,
    )
    found = {"all-reduce": (1, 8192), "collective-permute": (1, 8192)}
    assert count(text).collectives == count(text, dearest=True).collectives == found
    assert (moved(text), moved(text, dearest=True)) == ((8192, 8192), (16384, 16384))


def test_collectives_by_kind_with_tiny_ones_apart():
    fused = computation(
        "fused",
        "%a = f32[2048]{0} parameter(0)\nROOT %r = f32[2048]{0} all-reduce(%a), to_apply=%add",
    )
    text = program(
        """
        %x = f32[2048]{0} parameter(0)
        %s = f32[8]{0} parameter(1)
        %l = f32[1024]{0} parameter(2)
        %a = f32[2048]{0} all-reduce(%x), to_apply=%add
        %b = f32[8]{0} all-reduce(%s), to_apply=%add
        %t = f32[1024]{0} all-reduce(%l), to_apply=%add
        %g = (f32[2048]{0}, f32[16384]{0}) all-gather-start(%x), dimensions={0}
        %h = f32[16384]{0} all-gather-done(%g)
        %f = f32[2048]{0} fusion(%x), kind=kCustom, calls=%fused
        ROOT %c = f32[2048]{0} collective-permute(%f), source_target_pairs={{0,1}}
        """,
        fused,
    )
    assert count(text).collectives == {
        "all-reduce": (2, 2 * 8192),
        "all-reduce (tiny)": (2, 32 + 4096),
        "all-gather": (1, 65536),
        "collective-permute": (1, 8192),
    }


def test_a_gather_that_goes_on_beside_products_counts_once():
    whole, part = "bf16[64,128]{1,0}", "bf16[64,8]{1,0}"
    inner = f"""
        %a = {part} parameter(0)
        %g = {whole} all-gather(%a), channel_id=3, dimensions={{1}}
        ROOT %c = ({part}, {whole}) custom-call(%g), custom_call_target="AsyncCollectiveSTEP"
    """
    text = program(
        f"""
        %p = {part} parameter(0)
        %s = ({part}, {whole}) fusion(%p), kind=kCustom, calls=%start
        %o = ({part}, {whole}) fusion(%p), kind=kOutput, calls=%async_collective_fusion.7
        ROOT %e = ({part}, {whole}) fusion(%p), kind=kOutput, calls=%done
        """,
        computation("start", inner.replace("STEP", "Start")),
        computation("async_collective_fusion.7", inner.replace("STEP", "Step")),
        computation("done", inner.replace("STEP", "Done")),
    )
    assert count(text).collectives == {"all-gather": (1, 16384)}


def test_collectives_in_a_loop_are_multiplied():
    body = BODY.replace("negate(%v)", "all-reduce(%v), to_apply=%add")
    text = program(LOOP, body, condition("%e = s32[] constant(7)"))
    assert count(text).collectives == {"all-reduce (tiny)": (5, 5 * 512)}


def test_the_largest_rows_come_first():
    text = program("""
        %x = f32[2048]{0} parameter(0)
        %a = f32[128]{0} slice(%x), slice={[0:128]}
        ROOT %b = f32[2048]{0} negate(%x), metadata={op_name="jit(f)/neg"}
    """)
    [(read, write, what), _] = count(text).largest(2)
    assert (read, write, what) == (8192, 8192, "negate b jit(f)/neg")


@pytest.mark.parametrize("text", ["", "HloModule empty\n"])
def test_text_without_a_program_is_refused(text):
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse(text)


def test_a_program_of_this_machine():
    """Real text, of whatever form this version of XLA prints."""

    def scaled(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.cos(x), x)

    text = jax.jit(scaled).lower(jnp.zeros((1024,), jnp.float32)).compile().as_text()
    traffic = count(text)
    assert [loop.trips for loop in traffic.loops] in ([3], [])  # a short loop may be unrolled
    assert traffic.read >= 3 * 4096
    assert traffic.write >= 3 * 4096

"""`hlo` on stored programs, and `explain` on functions compiled for chips that are not there."""

import gzip
import json
from pathlib import Path

import pytest

import meshwise
from meshwise.compiler.hlo.liveness import Liveness
from meshwise.compiler.hlo.reader import read_module
from meshwise.compiler.program_file import read_program
from meshwise.core.errors import CompilerError

DATA = Path(__file__).parents[1] / "data" / "compiled"
FILE = DATA / "v5p_4x4x4_fsdp16_tensor4.hlo.gz"


def stored(name):
    with gzip.open(DATA / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)["compiled"]


@pytest.mark.parametrize("name", [p.name.removesuffix(".json.gz") for p in DATA.glob("*.json.gz")])
def test_memory_by_the_schedule_is_near_what_the_compiler_says(name):
    found = stored(name)
    memory, use = found["memory"], Liveness(read_module(found["hlo"])).use
    assert use.arguments == pytest.approx(memory["arguments"], rel=1e-3)
    assert use.total == pytest.approx(memory["peak"], rel=0.05)
    assert use.temporaries <= sum(h.num_bytes for h in use.held)


def test_a_program_has_its_collectives_by_mesh_axes_and_its_least_time():
    found = meshwise.explain_file(str(FILE), on="v5p:4x4x4", mesh="fsdp=16,tensor=4")
    assert {axis for sent in found.collectives for axis in sent.emitted.axes} == {"fsdp", "tensor"}
    assert found.floor.seconds >= max(found.floor.compute, found.floor.memory)
    assert sum(p.flops for p in found.parts) == pytest.approx(found.floor.compute * 459e12)
    assert sum(p.exposed for p in found.parts) == pytest.approx(found.floor.exposed)
    data = found.to_dict()
    assert data["memory"]["peak_bytes"] == found.memory.total
    assert data["collectives"][0]["received_bytes"] >= data["collectives"][-1]["received_bytes"]
    assert data["floor_s"]["compiled"] == found.floor.seconds


def test_without_a_cluster_there_are_bytes_and_no_times():
    found = meshwise.explain_file(str(FILE))
    assert found.floor is None
    data = found.to_dict()
    assert data["floor_s"] is None
    assert "exposed_s" not in data["collectives"][0]
    assert data["mesh"] == {"devices": 64}
    assert "at least" not in str(found)


def test_source_lines_come_from_both_forms(tmp_path):
    text = """HloModule m, is_scheduled=true

FileNames
1 "/home/me/model.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=41 end_line=41 column=4 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} negate(%x), metadata={op_name="layer/neg" stack_frame_id=1}
  ROOT %z = f32[8]{0} negate(%y), metadata={op_name="layer/neg" source_file="/home/me/loss.py" source_line=7}
}
"""
    path = tmp_path / "module.txt"
    path.write_text(text)
    found = meshwise.explain_file(str(path))
    assert [found.source(i) for i in found.read.main.instructions] == ["", "model.py:41", "loss.py:7"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"module @jit_f attributes {}", "found StableHLO"),
        (b"no program", "found neither"),
        (b"\x0a\x05hello", "found neither"),
        (b"\x1f\x8bbroken", "cannot be read"),
        (b"HloModule torn\n\n%a (x: f32[]) -> f32[] {\n", r"file: .*no ENTRY computation; give the whole file"),
    ],
)
@pytest.mark.jax
def test_files_that_hold_no_program_are_refused(content, words, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CompilerError, match=words):
        read_program(str(path))


@pytest.mark.parametrize(("name", "words"), [("none.hlo", "No such file or directory"), ("", "Is a directory")])
def test_files_that_cannot_be_read_are_named_once(name, words, tmp_path):
    path = str(tmp_path / name)
    with pytest.raises(CompilerError) as error:
        read_program(path)
    assert str(error.value) == f"{path}: it cannot be read: {words}"


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(CompilerError, match="has 8 devices, the program 64"):
        meshwise.explain_file(str(FILE), mesh="fsdp=8")
    with pytest.raises(CompilerError, match="give --mesh and --on"):
        meshwise.explain_file(str(FILE), wires="fsdp=16")


@pytest.mark.jax
def test_protocol_buffers_are_read_as_their_text(tmp_path):
    import jax  # noqa: PLC0415  (only these tests need it)
    import jax.numpy as jnp  # noqa: PLC0415

    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((64, 64))).compile()
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    assert len(module) > 127
    length = bytes([len(module) & 0x7F | 0x80, len(module) >> 7])
    for name, data in (("module.pb", module), ("hlo.pb", b"\x0a" + length + module)):
        (tmp_path / name).write_bytes(data)
        found = meshwise.explain_file(str(tmp_path / name))
        assert sum(p.flops for p in found.parts) in (0, 2 * 64**3)  # a call of a library, or a product
        assert found.read.main.parameters[0].shape.arrays[0].dims == (64, 64)


@pytest.mark.jax
def test_programs_for_absent_chips_stay_out_of_the_cache_of_jax(tmp_path, monkeypatch):
    import jax  # noqa: PLC0415  (only these tests need it)
    import jax.numpy as jnp  # noqa: PLC0415

    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        for own in ("first", "second"):  # nothing of the first is known to the second
            monkeypatch.setenv("MESHWISE_CACHE", str(tmp_path / own))
            x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
            meshwise.explain(jax.jit(lambda x: x @ x), x, on="v5e:2x2", mesh="data=4")
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
    assert not list((tmp_path / "jax").rglob("*cache"))


@pytest.mark.jax
def test_explain_says_which_collectives_a_sharding_inserts():
    import jax  # noqa: PLC0415  (only these tests need it)
    import jax.numpy as jnp  # noqa: PLC0415
    from jax.sharding import PartitionSpec as P  # noqa: PLC0415

    @jax.jit
    def product(x, w):
        return jax.lax.with_sharding_constraint(x @ w, P("data", None))

    x = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=P("data", "model"))
    w = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16, sharding=P("model", None))
    found = meshwise.explain(product, x, w, on="v5e:2x2", mesh="data=2,model=2")
    assert [(s.emitted.kind, s.emitted.axes) for s in found.collectives] == [("all-reduce", ("model",))]
    assert found.floor.compute == pytest.approx(2 * 1024 * 2048 * 512 / 4 / 197e12)
    assert found.compiled.arguments == pytest.approx((1024 * 2048 / 4 + 2048 * 512 / 2) * 2, rel=0.01)
    with pytest.raises(CompilerError, match="has 2 devices"):
        meshwise.explain(product, x, w, on="v5e:2x2", mesh="data=2")

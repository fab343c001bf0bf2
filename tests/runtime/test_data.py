"""Files of token numbers; clipping; evaluation, metrics and the steps that are kept, in runs of a small model."""

import importlib.util
import json
import struct
import sys
from contextlib import ExitStack

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file
from tensorboardX.proto.event_pb2 import Event

import meshwise
from meshwise.core.errors import MeshwiseError, MissingDependencyError
from meshwise.runtime.data import map_tokens
from meshwise.runtime.metrics import tensorboard, weights_and_biases
from meshwise.runtime.optimizer import clipped
from tests.runtime.test_run import plan_of

NEEDED = {"vocabulary": 32, "shortest": 9, "seed": 0}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.bin"
    (np.arange(4096) % 32).astype("<u2").tofile(path)
    return path


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_windows_of_a_file_are_those_of_its_numbers(kind, tmp_path):
    path = tmp_path / "tokens.bin"
    (np.arange(1000) % 32).astype(kind).tofile(path)
    tokens = map_tokens("--token-file", path, kind, **NEEDED)
    found = tokens.sequences(3, 5, 9)
    assert (found.shape, found.dtype) == ((5, 9), np.int32)
    assert ((found[:, 1:] - found[:, :-1]) % 32 == 1).all()
    assert (found == map_tokens("--token-file", path, kind, **NEEDED).sequences(3, 5, 9)).all()
    assert (found != tokens.sequences(4, 5, 9)).any()
    assert isinstance(tokens.ids, np.memmap)


def test_small_vocabularies_are_two_bytes_a_token(file):
    assert map_tokens("--token-file", file, None, **NEEDED).ids.dtype == np.uint16
    assert map_tokens("--token-file", file, None, **NEEDED | {"vocabulary": 1 << 17}).ids.dtype == np.uint32


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"\0\0\0", "uint16", "3 bytes are no whole number of uint16 tokens"),
        (b"\0" * 16, "uint16", "expected at least 9 tokens .*, found 8"),
    ],
)
def test_files_that_cannot_be_tokens_are_refused(content, kind, words, tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(MeshwiseError, match=words):
        map_tokens("--token-file", path, kind, **NEEDED)
    with pytest.raises(MeshwiseError, match="No such file"):
        map_tokens("--token-file", tmp_path / "none", kind, **NEEDED)


def test_a_file_of_another_format_is_noticed_by_its_tokens(file):
    wrong = map_tokens("--token-file", file, "uint32", **NEEDED)
    with pytest.raises(MeshwiseError, match="is not among the 32 of the model; give the format"):
        wrong.sequences(1, 4, 9)


def test_gradients_are_scaled_down_to_a_norm_and_never_up():
    given = {"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}
    found, norm = clipped(given, 1.0)
    assert float(norm) == pytest.approx(5.0)
    assert float(found["a"][0]) == pytest.approx(0.6)
    assert float(clipped(given, 10.0)[0]["b"][0, 0]) == pytest.approx(4.0)


@pytest.fixture(params=["parquet", "arrow", "stream", "safetensors"])
def table(request, tmp_path):
    """A file of the same tokens as `file`, in rows of 16; beside them a text, and other numbers."""
    ids = (np.arange(4096) % 32).astype(np.int32)
    if request.param == "safetensors":
        save_file({"tokens": ids.reshape(-1, 16), "lengths": np.full(256, 16)}, tmp_path / "train.safetensors")
        return tmp_path / "train.safetensors"
    rows = pa.table({"text": ["a"] * 256, "input_ids": list(ids.reshape(-1, 16)), "length": [16] * 256})
    path = tmp_path / ("train.parquet" if request.param == "parquet" else "train.arrow")
    if request.param == "parquet":
        parquet.write_table(rows, path, row_group_size=100)
    else:
        made = pa.ipc.new_file if request.param == "arrow" else pa.ipc.new_stream
        with made(path, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=100)
    return path


def test_a_known_format_has_the_same_windows(table, file):
    expected = map_tokens("--token-file", file, None, **NEEDED).sequences(3, 5, 9)
    np.testing.assert_array_equal(map_tokens("--token-file", table, None, **NEEDED).sequences(3, 5, 9), expected)
    with pytest.raises(MeshwiseError, match=f"--token-format uint16: {table.name} says itself"):
        map_tokens("--token-file", table, "uint16", **NEEDED)
    with pytest.raises(MeshwiseError, match=r"expected at least 5,000 tokens .* found 4,096"):
        map_tokens("--token-file", table, None, **{**NEEDED, "shortest": 5000})
    table.write_bytes(table.read_bytes()[:50])
    with pytest.raises(MeshwiseError, match=r"expected (Parquet|Arrow|safetensors): "):
        map_tokens("--token-file", table, None, **NEEDED)


def test_tokens_that_are_not_found_are_asked_for_by_name(tmp_path):
    path = tmp_path / "train.parquet"
    for columns, words in (
        ({"text": ["a"]}, "expected one column of whole numbers, or one named input_ids or tokens$"),
        ({"a": [1], "b": [[2]]}, "or one named input_ids or tokens; found a, b"),
        ({"tokens": [1], "input_ids": [2]}, "; found input_ids, tokens"),
    ):
        parquet.write_table(pa.table(columns), path)
        with pytest.raises(MeshwiseError, match=words):
            map_tokens("--token-file", path, None, **NEEDED)
    parquet.write_table(pa.table({"only": [[1, 2], None, [3] * 7]}), path)  # a row may lack a list
    assert map_tokens("--token-file", path, None, **NEEDED).ids.tolist() == [1, 2] + [3] * 7


def test_documents_end_with_a_token(file):
    """Of tokens that count up to 31 again and again, each of which ends with 31."""
    tokens = map_tokens("--token-file", file, None, **NEEDED, documents="31")
    found, begins = tokens.sequences(3, 5, 70), tokens.documents(3, 5, 70)
    assert begins.dtype == np.int32
    expected = [[max([p for p in range(t + 1) if row[p] == 0], default=0) for t in range(70)] for row in found]
    np.testing.assert_array_equal(begins, expected)
    assert map_tokens("--token-file", file, None, **NEEDED).documents(3, 5, 70) is None
    assert tokens.identity == {**map_tokens("--token-file", file, None, **NEEDED).identity, "documents": "31"}


def test_documents_are_rows_of_a_table(table):
    """Of 16 tokens each, which begin with 0 or 16."""
    tokens = map_tokens("--token-file", table, None, **NEEDED, documents="rows")
    found, begins = tokens.sequences(3, 5, 40), tokens.documents(3, 5, 40)
    expected = [[max([p for p in range(t + 1) if row[p] % 16 == 0], default=0) for t in range(40)] for row in found]
    np.testing.assert_array_equal(begins, expected)


def test_rows_of_any_length_are_documents(tmp_path):
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"only": [[1, 2], None, [], [3] * 7, [4]]}), path)
    tokens = map_tokens("--token-file", path, None, **{**NEEDED, "shortest": 10}, documents="rows")
    assert tokens.documents(1, 1, 10).tolist() == [[0, 0, *[2] * 7, 9]]
    parquet.write_table(pa.table({"only": [[1, None], [3] * 9]}), path)
    with pytest.raises(MeshwiseError, match="expected whole numbers in the lists of only, found some that are null"):
        map_tokens("--token-file", path, None, **NEEDED)


def test_documents_that_are_not_there_are_refused(file):
    for asked, words in (
        ("rows", "--documents rows: --token-file .* has no rows of several tokens"),
        ("<end>", "--documents <end>: no number; expected the token"),
        ("77", "none of the 4,096 tokens of --token-file .* is token 77"),
    ):
        with pytest.raises(MeshwiseError, match=words):
            map_tokens("--token-file", file, None, **NEEDED, documents=asked)


@pytest.mark.jax
def test_a_run_keeps_documents_apart_and_goes_on_with_the_same(file, tmp_path):
    plan = plan_of(layout="fsdp=2,context=2", chips=4, tokens=64)
    given = {"token_file": str(file), "checkpoint": str(tmp_path / "steps")}
    ran = meshwise.run_plan(plan, steps=2, documents="31", **given)
    assert ran.data == f"random windows of {file}, documents kept apart (the plan counts whole sequences)"
    assert ran.losses[0] != meshwise.run_plan(plan, steps=1, token_file=str(file)).losses[0]
    assert meshwise.run_plan(plan, steps=3, documents="31", **given).first == 3
    with pytest.raises(MeshwiseError, match="documents"):
        meshwise.run_plan(plan, steps=4, **given)
    with pytest.raises(MeshwiseError, match="--documents needs --text or --token-file"):
        meshwise.run_plan(plan, steps=1, documents="31")


#: Stands for the library, which is none of ours.
WANDB = """
import json

class Error(Exception):
    pass

class Run:
    def log(self, numbers, step):
        with open("{path}", "a") as file:
            file.write(json.dumps(dict(step=step, **numbers)) + chr(10))

    def finish(self):
        pass

def init(**given):
    if given["project"] == "none":
        raise Error("no key")
    with open("{path}", "a") as file:
        file.write(json.dumps(given) + chr(10))
    return Run()
"""


def stand_in(folder, monkeypatch):
    (folder / "wandb.py").write_text(WANDB.format(path=folder / "logged"))
    spec = importlib.util.spec_from_file_location("wandb", folder / "wandb.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "wandb", module)


def scalars(folder):
    """By step and name, what TensorBoard reads: records of a length, its checksum, an event, its checksum."""
    found = {}
    for path in folder.iterdir():
        left = path.read_bytes()
        while left:
            end = 12 + struct.unpack("<Q", left[:8])[0]
            event, left = Event.FromString(left[12:end]), left[end + 4 :]
            found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
    return found


@pytest.mark.jax
def test_a_run_evaluates_tells_and_keeps(file, tmp_path, monkeypatch):
    held_out = tmp_path / "val.bin"
    (np.arange(512) % 32).astype("<u2").tofile(held_out)
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "steps"
    data = {"token_file": str(file), "evaluate": str(held_out), "evaluate_every": 2, "evaluate_batches": 2}
    told = {"metrics": str(metrics), "checkpoint": str(folder), "every": 1, "keep": 2}
    told |= {"tensorboard": str(tmp_path / "events"), "wandb": "mine"}
    stand_in(tmp_path, monkeypatch)
    first = meshwise.run_plan(plan_of(), steps=3, learning_rate=0.01, clip_gradients=0.5, beta2=0.99, **data, **told)
    second = meshwise.run_plan(plan_of(), steps=5, learning_rate=0.01, clip_gradients=0.5, beta2=0.99, **data, **told)
    whole = meshwise.run_plan(plan_of(), steps=5, learning_rate=0.01, clip_gradients=0.5, beta2=0.99, **data)
    assert first.losses + second.losses == whole.losses
    assert [step for step, _ in first.evaluations + second.evaluations] == [2, 3, 4, 5]
    assert dict(whole.evaluations)[4] == dict(second.evaluations)[4]
    assert sorted(p.name for p in folder.iterdir() if p.name != "lock") == ["step-00000004", "step-00000005"]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["gradient_norm"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert ["evaluation_loss" in row for row in rows] == [False, True, True, True, True]
    assert scalars(tmp_path / "events") == {(r["step"], k): pytest.approx(r[k]) for r in rows for k in r if k != "step"}
    begun, *logged = [json.loads(line) for line in (tmp_path / "logged").read_text().splitlines()]
    assert (begun["project"], begun["config"]["beta2"]) == ("mine", 0.99)
    assert [one for one in logged if "config" not in one] == rows
    with pytest.raises(MeshwiseError, match="of another run: run: beta2"):
        meshwise.run_plan(plan_of(), steps=6, learning_rate=0.01, clip_gradients=0.5, **data, **told)


def test_a_place_for_numbers_that_is_not_there_is_said_in_words(tmp_path, monkeypatch):
    with ExitStack() as closing:
        with monkeypatch.context() as missing:
            missing.setattr(importlib.util, "find_spec", lambda _: None)
            with pytest.raises(MissingDependencyError, match="--wandb needs the library wandb: pip install wandb"):
                weights_and_biases("mine", {}, closing)
        stand_in(tmp_path, monkeypatch)
        with pytest.raises(MeshwiseError, match="--wandb none: no key"):
            weights_and_biases("none", {}, closing)
        (tmp_path / "taken").touch()
        with pytest.raises(MeshwiseError, match=r"--tensorboard .*taken"):
            tensorboard(tmp_path / "taken", closing)


@pytest.mark.jax
def test_the_norm_is_that_of_all_devices_together(file):
    """Clipping to a norm that no gradient reaches changes nothing; sharded gradients have the norm of whole ones."""
    asked = {"steps": 2, "learning_rate": 0.01, "token_file": str(file)}
    whole = meshwise.run_plan(plan_of("fsdp=1,micro_batch=8,num_microbatches=1", chips=1), clip_gradients=0.05, **asked)
    split = meshwise.run_plan(plan_of(), clip_gradients=0.05, **asked)
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)
    assert whole.losses[1] != meshwise.run_plan(plan_of(), **asked).losses[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"text": "a", "tokenizer": "b", "token_file": "c"}, "train on one of them"),
        ({"evaluate": "a"}, "--evaluate needs --text or --token-file"),
        ({"evaluate_every": 3}, "--evaluate-every needs --evaluate"),
        ({"token_format": "uint16"}, "--token-format needs --token-file"),
        ({"keep": 2}, "--keep needs --checkpoint"),
    ],
)
def test_options_that_mean_nothing_alone_are_refused(given, words):
    with pytest.raises(MeshwiseError, match=words):
        meshwise.run_plan(plan_of(), steps=1, **given)

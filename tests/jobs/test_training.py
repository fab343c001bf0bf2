"""A training job: what it reads, what it derives, and the words of every refusal."""

import pytest
from pydantic import ValidationError

from meshwise.core.errors import MeshwiseError, UnitError, UnknownNameError
from meshwise.jobs import OPTIMIZERS, TrainingJob, parse_optimizer
from tests.each import each


def job(**changes):
    return TrainingJob(**{"batch_tokens": "4Mi", "seq_len": "4096"} | changes)


def test_text_becomes_numbers():
    j = job(tokens="15T", batch_slack="5%")
    assert (j.batch_tokens, j.seq_len, j.tokens, j.batch_slack) == (4194304, 4096, 15e12, 0.05)
    assert job(batch_tokens="4M").batch_tokens == 4_000_000
    assert job(batch_tokens=8192, seq_len=4096.0).sequences == 2


def test_defaults():
    j = job()
    assert j.tokens is None
    assert j.batch_slack == 0.1
    assert j.formats.name == "mixed"
    assert j.optimizer_kind is OPTIMIZERS["adamw"]


def test_sequences_need_not_be_whole():
    assert job(batch_tokens="10000", seq_len="4096").sequences == 10000 / 4096


def test_a_sequence_may_round_the_batch_up_within_the_slack():
    assert job(batch_tokens="3800", seq_len="4096").sequences < 1
    with pytest.raises(ValidationError):
        job(batch_tokens="3600", seq_len="4096")


@each(
    "changes, words",
    [
        ({"batch_tokens": "0"}, "expected more than zero"),
        ({"batch_tokens": "-4"}, "batch_tokens"),
        ({"batch_tokens": "2T"}, "less than or equal to 1000000000000"),
        ({"seq_len": "0"}, "expected more than zero"),
        ({"seq_len": "2G"}, "seq_len"),
        ({"batch_tokens": "4096.5", "seq_len": "4096"}, r"expected a whole number of tokens, found 4,096\.5"),
        ({"seq_len": "100.5"}, r"expected a whole number of tokens, found 100\.5"),
        (
            {"batch_tokens": "2048"},
            r"batch_tokens 2,048 is less than one sequence of seq_len 4,096 tokens; raise batch_tokens or",
        ),
        (
            {"tokens": "1M"},
            r"tokens 1,000,000 is less than one batch of batch_tokens 4,194,304; raise tokens or lower batch_to",
        ),
        ({"tokens": "0"}, "expected more than zero"),
        ({"batch_slack": "60%"}, "less than or equal to 0.5"),
        ({"batch_slack": "-1%"}, "batch_slack"),
        ({"precision": "bf17"}, r"unknown precision 'bf17'\. Nearest: bf16"),
        ({"precision": "bf16,grads=fp33"}, "unknown dtype 'fp33'"),
        ({"optimizer": "adamv"}, r"unknown optimizer 'adamv'\. Nearest: adamw"),
        ({"batch": "4Mi"}, "Extra inputs are not permitted"),
        ({"batch_tokens": "four"}, "batch_tokens"),
        ({"batch_tokens": "4MB"}, "batch_tokens"),
        ({"batch_tokens": float("nan")}, "batch_tokens"),
        ({"batch_tokens": float("inf")}, "batch_tokens"),
        ({"batch_tokens": None}, "batch_tokens"),
        ({"seq_len": True}, "seq_len"),
    ],
)
def test_what_is_refused(changes, words):
    with pytest.raises((ValidationError, MeshwiseError), match=words):
        job(**changes)


def test_what_is_missing_is_named():
    with pytest.raises(ValidationError, match="seq_len"):
        TrainingJob(batch_tokens="4Mi")


def test_a_job_is_frozen_and_round_trips():
    j = job(tokens="15T", precision="bf16,master=fp32", optimizer="lion")
    assert TrainingJob(**j.model_dump()) == j
    assert TrainingJob.model_validate_json(j.model_dump_json()) == j
    with pytest.raises(ValidationError, match="frozen"):
        j.seq_len = 1


@pytest.mark.parametrize(("text", "moments"), [("adam", 2), (" AdamW ", 2), ("lion", 1), ("momentum", 1), ("SGD", 0)])
def test_optimizers(text, moments):
    assert parse_optimizer(text).moments == moments


def test_an_unknown_optimizer_is_named():
    with pytest.raises(UnknownNameError, match="unknown optimizer 'shampoo'"):
        parse_optimizer("shampoo")
    assert issubclass(UnitError, MeshwiseError)

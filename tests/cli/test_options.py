"""A pydantic model's fields as click options."""

from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, ConfigDict, Field

from meshwise.cli.options import request_options
from meshwise.commands.requests import validated
from meshwise.core.errors import MeshwiseError, UnitError
from meshwise.core.units import Quantity, format_count, parse_count


class Order(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Whose.")
    batch_tokens: Annotated[float, Quantity("tokens", parse_count, format_count, "4Mi")] = Field(
        default=4096, gt=0, le=1e12, description="How many."
    )
    share: float = Field(default=0.5, ge=0, lt=1, description="Which part.")
    maybe: Annotated[float | None, Quantity("tokens", parse_count, format_count, "4Mi")] = Field(
        default=None, description="Or not."
    )
    mode: Literal["fast", "slow"] = Field(default="fast", description="How.")
    loud: bool = Field(default=False, description="Whether.")
    tags: tuple[str, ...] = Field(default=(), description="Labels.")


def invoke(*words: str):
    seen: list[Order] = []

    @click.command()
    @request_options(Order, arguments=("name",), flags={"share": "--part"})
    def command(request: Order) -> None:
        seen.append(request)

    result = CliRunner().invoke(command, list(words))
    return seen[0] if seen else result


def test_defaults_are_the_fields():
    assert invoke("me") == Order(name="me")


def test_values_reach_the_fields():
    order = invoke(
        "me", "--batch-tokens", "4Mi", "--part", "0.25", "--maybe", "1k", "--mode", "slow", "--loud", "--tags", "a",
        "--tags", "b",
    )  # fmt: skip
    assert order == Order(
        name="me", batch_tokens=4194304, share=0.25, maybe=1000, mode="slow", loud=True, tags=("a", "b")
    )


def test_help_shows_description_example_bounds_and_default():
    text = " ".join(invoke("--help").output.split())
    assert "--batch-tokens TOKENS How many. [e.g. 4Mi; at most 1T; default: 4,096]" in text
    assert "--part NUMBER Which part. [at least 0; less than 1; default: 0.5]" in text
    assert "--mode [fast|slow] How. [default: fast]" in text
    assert "--loud / --no-loud Whether. [default: no]" in text


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["--batch-tokens", "4 apples"], UnitError, "--batch-tokens: unknown unit 'apples' in '4 apples'; write it as"),
        (["--batch-tokens", "-5"], UnitError, "--batch-tokens: expected more than zero, found '-5'"),
        (["--batch-tokens", "nan"], UnitError, "--batch-tokens: expected a finite number such as"),
        (["--batch-tokens", "5P"], MeshwiseError, "--batch-tokens: expected at most 1,000,000,000,000, found '5P'"),
        (["--part", "-1"], MeshwiseError, "--part: expected at least 0, found '-1'"),
        (["--part", "1"], MeshwiseError, "--part: expected less than 1, found '1'"),
        (["--part", "x"], MeshwiseError, "--part: expected a number, found 'x'"),
    ],
)
def test_errors_name_the_flag(words, kind, message):
    error = invoke("me", *words).exception
    assert type(error) is kind
    assert str(error).startswith(message)


def test_several_errors_come_together():
    error = invoke("me", "--part", "-1", "--batch-tokens", "x").exception
    assert isinstance(error, MeshwiseError)
    assert [line.split(":")[0] for line in str(error).splitlines()] == ["--batch-tokens", "--part"]


def test_unknown_and_missing_fields():
    with pytest.raises(MeshwiseError) as caught:
        validated(Order, {"nome": "me"})
    assert str(caught.value) == "name is missing\nnome: there is no such field"


def test_numbers_are_in_base_units_and_json_round_trips():
    order = Order(name="me", batch_tokens=8192)
    assert Order.model_validate_json(order.model_dump_json()) == order


def test_schema_carries_the_unit():
    schema = Order.model_json_schema()["properties"]["batch_tokens"]
    assert schema["unit"] == "tokens"
    assert schema["examples"] == ["4Mi"]
    assert schema["description"] == "How many."


@pytest.mark.parametrize("value", [True, [1], {"a": 1}, float("inf"), float("nan")])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(MeshwiseError, match="batch_tokens"):
        validated(Order, {"name": "me", "batch_tokens": value})

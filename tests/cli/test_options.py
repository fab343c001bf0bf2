"""A pydantic model's fields as click options."""

import inspect
from typing import Annotated, ClassVar, Literal

import pytest
from click.testing import CliRunner
from pydantic import AliasChoices, Field

from meshwise.cli.options import click_command
from meshwise.commands.command import command, verb
from meshwise.commands.requests import Flag, Request, validated
from meshwise.core.errors import MeshwiseError, UnitError
from meshwise.core.units import Quantity, format_count, parse_count


class Order(Request):
    positional = ("name",)

    name: str = Field(description="Whose.")
    batch_tokens: Annotated[float, Quantity("tokens", parse_count, format_count, "4Mi")] = Field(
        default=4096, gt=0, le=1e12, description="How many."
    )
    share: Annotated[float, Flag(name="--part")] = Field(default=0.5, ge=0, lt=1, description="Which part.")
    maybe: Annotated[float | None, Quantity("tokens", parse_count, format_count, "4Mi")] = Field(
        default=None, description="Or not."
    )
    mode: Literal["fast", "slow"] = Field(default="fast", description="How.")
    loud: bool = Field(default=False, description="Whether.")
    tags: tuple[str, ...] = Field(default=(), description="Labels.")
    most: int = Field(
        default=9, validation_alias=AliasChoices("most", "limit"), serialization_alias="most_s", description="Limit."
    )


def invoke(*words: str):
    seen: list[Order] = []

    @verb(Order)
    def order(_screen, request: Order) -> None:
        seen.append(request)

    result = CliRunner().invoke(click_command(order), list(words))
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


def test_a_former_flag_works_and_stays_out_of_the_help():
    assert invoke("me", "--limit", "3") == invoke("me", "--most", "3") == Order(name="me", limit=3)
    text = invoke("--help").output
    assert "--most N" in text
    assert "limit" not in text


def test_options_stand_under_their_sections_and_the_rest_is_less_common():
    class Sectioned(Order):
        sections: ClassVar = {"First": ("mode", "share")}

    text = CliRunner().invoke(click_command(verb(Sectioned)(lambda *_: None)), ["--help"]).output
    found = [line.split()[0] for line in text.splitlines() if line.endswith(":") or line.startswith("  --")]
    assert found == [
        "First:",
        "--mode",
        "--part",
        "Output:",
        "--details",
        "--explain",
        "--json",
        "--help",
        "Less",
        *found[9:],
    ]
    assert found[9:] == ["--batch-tokens", "--maybe", "--loud", "--tags", "--most"]


def test_the_json_key_of_a_field_is_its_name_unless_the_field_says_another():
    assert list(Order(name="me").echo()) == [*list(Order.model_fields)[:-1], "most_s"]


def test_a_function_of_a_request_has_the_parameters_of_its_fields():
    @command(Order)
    def order(place: int, request: Order, *, told: str = "", **more: int) -> tuple[int, Order, str, int]:
        """Order.

        Args:
            told: to whom.

        Raises:
            MeshwiseError: always.
        """
        return place, request, told, sum(more.values())

    assert order(1, "me", limit=4, tags=None, told="x", other=3) == (1, Order(name="me", most=4), "x", 3)
    assert str(inspect.signature(order)).startswith(
        "(place: int, name: 'str', *, batch_tokens: 'str | float' = 4096, share: 'float' = 0.5, "
        "maybe: 'str | float | None' = None, mode: 'Literal[\"fast\", \"slow\"]' = 'fast', loud: 'bool' = False, "
        "tags: 'tuple | None' = None, most: 'int' = 9, told: str = '', **more: int)"
    )
    assert "    maybe: Or not. (e.g. 4Mi)\n" in order.__doc__
    assert "    told: to whom.\n\nRaises:" in order.__doc__
    with pytest.raises(TypeError, match=r"order\(\): missing a required argument: 'name'"):
        order(1)
    with pytest.raises(MeshwiseError, match="mode: expected 'fast' or 'slow', found 'medium'"):
        order(1, "me", mode="medium")
